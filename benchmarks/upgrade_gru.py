"""The two GRUs of g2p-en, which read the letters of a word and speak its phonemes, brought to exact blocks.

`python -m benchmarks.upgrade_gru [--blocks 2 4] [--looks 8] [--steps 300] [--rates 2e-3 5e-3] [--level 0.05]`. Without
labels: the network learns to return what the dense one returns for words of WordNet. Judged by 1,000 others: how many
are spoken exactly as the dense network speaks them. The rate is the one that is best after 200 steps, by 1,000 words
that neither train nor judge; the search counts in the time.
Needs WordNet (the Debian package wordnet-base) and g2p-en (pip install --no-deps g2p-en).
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import product

import torch
from torch import Tensor, nn

import crystallite as cx
from benchmarks.fitted_tasks import WORDNET
from benchmarks.fitted_units import agreement, lemmas, speller, spoken
from benchmarks.timing import show, store
from benchmarks.upgrade_minilm import Some, proof
from crystallite.graph.chains import find_chains
from crystallite.separation import upgrade


@torch.inference_mode()
def perplexity(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Of what the dense network says, phoneme by phoneme."""
    total, phonemes = 0.0, 0
    for batch in batches:
        logits, following = model(batch["letters"], batch["spoken"][:, :-1]), batch["spoken"][:, 1:]
        total += float(nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"))
        phonemes += following.numel()
    return float(torch.tensor(total / max(phonemes, 1)).exp())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--looks", type=int, default=8, help="how often quality is looked at while training")
    parser.add_argument("--steps", type=int, default=300, help="between two looks")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 5e-3])
    parser.add_argument("--search", type=int, default=200, help="steps of each run that a rate is chosen by")
    parser.add_argument("--level", type=float, default=0.05)
    parser.add_argument("--words", type=int, default=30_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--wordnet", default=WORDNET)
    options = parser.parse_args(arguments)
    model, known = speller(), lemmas(options.wordnet)
    for each in model.parameters():
        each.requires_grad_(True)
    random.Random(0).shuffle(known)
    judged, choosing, rest = known[:1000], known[1000:2000], known[2000 : 2000 + options.words]
    judge, choose, heard = agreement(model, judged), agreement(model, choosing), spoken(model, judged, 0)
    rows = [{"blocks": 1, "step": 0, "agreement": judge(model), "perplexity": perplexity(model, heard)}]
    data, results = spoken(model, rest, 0), []
    for blocks, seed in product(options.blocks, range(options.seeds)):
        common = {"blocks": blocks, "level": options.level, "targets": ["encoder", "decoder"], "seed": seed}
        tried, began = {}, time.process_time()
        for rate in options.rates:
            short = upgrade(model, data=Some(data, options.search), epochs=1, learning_rate=rate, **common)
            tried[rate] = choose(short)
        rate = max(tried, key=lambda rate: tried[rate])
        about = {"blocks": blocks, "seed": seed, "rate": rate}
        print(f"  {blocks} blocks: agreement after {options.search} steps by rate {tried}", flush=True)
        curve: list[dict] = []

        def look(some: nn.Module, curve: list[dict] = curve, about: dict = about) -> float:
            found = {"agreement": judge(some), "perplexity": perplexity(some, heard)}
            curve.append(about | {"step": options.steps * len(curve)} | found)
            print(f"  {curve[-1]}", flush=True)
            return found["agreement"]

        small = upgrade(
            model, data=Some(data, options.steps), epochs=options.looks, learning_rate=rate, metric=look, **common
        )
        before, after = cx.summary(small).macs
        rows += curve
        results.append(about | {
            "agreement": judge(small), "perplexity": perplexity(small, heard), "multiply-adds": after / before,
            "processor seconds": time.process_time() - began,
            **proof(small, find_chains(model, ["encoder", "decoder"], example=heard[0])),
        })  # fmt: skip
        store("upgrade_gru", [*rows, *results])
    show("GRUs of g2p-en over the steps", rows)
    show("saved", results)


if __name__ == "__main__":
    main()
