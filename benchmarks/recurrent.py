"""Recurrent networks in Frobenius form against PyTorch's own: input 256, hidden 512, 128 time steps.

"speed-up" is the time of nn.LSTM or nn.GRU over ours in the same run; "ideal" what the multiply-adds left allow, those
of the input counted; "of ideal" their quotient. Hidden units are in random order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.timing import interleaved, show, store
from crystallite.operators.recurrent import BlockRecurrent

INPUT, HIDDEN, LENGTH = 256, 512, 128
WANTED = 0.8
Edges = Callable[[Tensor, Tensor], Tensor]  # whether the unit at place a hears the one at place b


def independent(a: Tensor, b: Tensor) -> Tensor:
    """Four components of 128 units that do not hear each other."""
    return a // 128 == b // 128


def triangular(a: Tensor, b: Tensor) -> Tensor:
    """Four strongly connected blocks, each hearing all before it."""
    return a // 128 >= b // 128


def ragged(a: Tensor, b: Tensor) -> Tensor:
    """Components of 256, 128, 64, … units."""
    return (HIDDEN - a).float().log2().ceil() == (HIDDEN - b).float().log2().ceil()


def single(a: Tensor, b: Tensor) -> Tensor:
    """One block: nothing to gain."""
    return a == a + 0 * b


def unconnected(a: Tensor, b: Tensor) -> Tensor:
    """No feedback at all."""
    return a != a + 0 * b


def planted(cls: type[nn.RNNBase], hears: Edges) -> nn.RNNBase:
    """A dense module with the given edges, its units shuffled."""
    torch.manual_seed(0)
    dense = cls(INPUT, HIDDEN).eval()
    place = torch.randperm(HIDDEN)
    kept = hears(place[:, None], place[None, :])
    with torch.no_grad():
        dense.weight_hh_l0.mul_(kept.repeat(len(dense.weight_hh_l0) // HIDDEN, 1))
    return dense


def row(threads: int, batch: int, cls: type[nn.RNNBase], hears: Edges, repeats: int) -> dict:
    torch.set_num_threads(threads)
    dense = planted(cls, hears)
    blocks = BlockRecurrent.from_dense(dense)
    x = torch.randn(LENGTH, batch, INPUT)
    with torch.inference_mode():
        difference = (dense(x)[0] - blocks(x)[0]).abs().max().item()
        times = interleaved({"dense": partial(dense, x), "blocks": partial(blocks, x)}, repeats)
    speed_up, ideal = times["dense"] / times["blocks"], blocks.dense_macs / blocks.macs
    return {
        "module": cls.__name__,
        "structure": hears.__name__,
        "batch": batch,
        "threads": threads,
        "dense ms": 1e3 * times["dense"],
        "blocks ms": 1e3 * times["blocks"],
        "speed-up": speed_up,
        "ideal": ideal,
        "of ideal": speed_up / ideal,
        "wanted": WANTED if hears in (independent, triangular) else None,
        "is faster": str(blocks.is_faster),
        "difference": difference,
    }


def main(repeats: int = 15) -> None:
    before = torch.get_num_threads()
    try:
        rows = [
            row(threads, batch, cls, hears, repeats)
            for hears in (independent, triangular, ragged, unconnected, single)
            for cls in (nn.LSTM, nn.GRU)
            for batch in (1, 16)
            for threads in (1, 2)
        ]
    finally:
        torch.set_num_threads(before)
    show(f"recurrent: input {INPUT}, hidden {HIDDEN}, {LENGTH} steps, float32, no gradients", rows)
    store("recurrent", rows)


if __name__ == "__main__":
    main()
