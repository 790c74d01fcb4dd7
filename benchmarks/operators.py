"""Reorganized operators against the dense layers they replace, at 1 and 2 threads."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import nn

import crystallite as cx
from benchmarks.timing import interleaved, show, store

BATCHES = (1, 16, 128)
BLOCKS = (4, 16)


def planted(sizes: list[int], k: int, shared: bool, seed: int = 0) -> nn.Sequential:
    """A stack of ReLU layers with k equal blocks each, scattered by random permutations.

    shared: consecutive layers agree on the partition of the neurons between them; otherwise each draws its own.
    """
    rng = np.random.default_rng(seed)
    stages: list[nn.Module] = []
    label = rng.permutation(np.arange(sizes[0]) % k)
    for n, m in itertools.pairwise(sizes):
        rows = rng.permutation(np.arange(m) % k)
        cols = label if shared else rng.permutation(np.arange(n) % k)
        layer = nn.Linear(n, m)
        with torch.no_grad():
            layer.weight *= torch.from_numpy(rows[:, None] == cols)
        stages += [layer, nn.ReLU()]
        label = rows
    return nn.Sequential(*stages[:-1]).eval()


def compare(task: str, dense: nn.Module, small: nn.Module, width: int, k: float) -> list[dict]:
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for batch in BATCHES:
            x = torch.randn(batch, width)
            with torch.inference_mode():
                scale = float(dense(x).abs().max())
                assert float((dense(x) - small(x)).abs().max()) <= 1e-4 * max(scale, 1.0)
                best = interleaved(
                    {"dense": lambda x=x: dense(x), "ours": lambda x=x: small(x)}, repeats=60, budget=8, pause=0
                )
            speedup = best["dense"] / best["ours"]
            rows.append(
                {
                    "task": task,
                    "k": k,
                    "threads": threads,
                    "batch": batch,
                    "dense ms": best["dense"] * 1e3,
                    "ours ms": best["ours"] * 1e3,
                    "speed-up": speedup,
                    "of ideal": speedup / k,
                }
            )
    return rows


def stacks() -> list[dict]:
    """(a) stacks of 4 layers 4096² and 6 layers 1024², partitions shared or independent."""
    rows = []
    for layers, width in ((4, 4096), (6, 1024)):
        for k in BLOCKS:
            for shared in (True, False):
                dense = planted([width] * (layers + 1), k, shared)
                small = cx.reorganize(dense, level=None).eval()
                task = f"{layers} × {width}², {'folded' if shared else 'shuffled'}"
                rows += compare(task, dense, small, width, k)
    return rows


def single() -> list[dict]:
    """(b) one layer with both permutations at run time."""
    rows = []
    for n, m in ((4096, 4096), (768, 3072)):
        for k in BLOCKS:
            dense = planted([n, m], k, shared=False)
            layer = dense[0]
            small = cx.BlockLinear.from_dense(layer.weight, layer.bias, cx.decompose(layer.weight)).eval()
            rows += compare(f"{n}→{m}", dense, small, n, k)
    return rows


def main() -> None:
    before = torch.get_num_threads()
    try:
        folded = stacks()
        show("(a) stacks of ReLU layers", folded)
        one = single()
        show("(b) one layer, both permutations at run time", one)
    finally:
        torch.set_num_threads(before)
    store("operators", folded + one)
