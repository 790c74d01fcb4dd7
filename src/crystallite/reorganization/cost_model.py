"""Whether blocks are worth their overhead: the one place that decides, by what benchmarks/operators.py measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["CostModel"]


class _Cost(NamedTuple):
    """What blocks cost beside their products."""

    worth: float  # the share of the dense multiply-adds that those of the blocks may be at most
    per_call: int  # what a call takes longer than that of the dense layer, in multiply-adds of one sample
    per_block: int  # the same for each block


_COSTS = {
    "linear": _Cost(0.75, 100_000, 100),
    "link": _Cost(0.75, 0, 100),  # a layer of a chain, which is called as a whole
    "chain": _Cost(0.75, 40_000, 100),
    "feed-forward": _Cost(0.75, 400_000, 1_000),
    "convolution": _Cost(0.75, 20_000, 0),
}


@dataclass(frozen=True)
class CostModel:
    """Says whether blocks replace a layer: where they are expected to run faster, or wherever they need less."""

    only_if_faster: bool = True

    def is_faster(self, kind: str, dense_macs: int, block_macs: int, blocks: int) -> bool:
        """Whether the blocks of a layer should replace it.

        >>> CostModel().is_faster("linear", 1024 * 1024, 4 * 256 * 256, 4)
        True
        >>> [CostModel(faster).is_faster("linear", 64 * 64, 4 * 16 * 16, 4) for faster in (True, False)]
        [False, True]
        """
        if not self.only_if_faster:
            return block_macs < dense_macs
        cost = _COSTS[kind]
        overhead = cost.per_call + cost.per_block * blocks
        return block_macs <= cost.worth * dense_macs and block_macs + overhead <= dense_macs

    def convolution_is_faster(
        self, dense_macs: int, block_macs: int, channels: float, blocks: int, compiled: bool
    ) -> bool:
        """The same for a convolution whose blocks have so many channels.

        Grouped convolutions of few channels are slow. compiled: our own kernel computes them; what it takes beside the
        products, for copying images, is a share of the dense convolution.
        """
        if self.only_if_faster and compiled:
            block_macs += dense_macs // 16
        elif self.only_if_faster:
            channels = max(1.0, channels)
            block_macs = round(block_macs * (1 + 10 / channels + 100 / channels**2))
        return self.is_faster("convolution", dense_macs, block_macs, blocks)
