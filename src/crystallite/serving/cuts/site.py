"""`Site`: blocks of an operator that can run side by side, each elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

__all__ = ["Cost", "FeatureSite", "Groups", "Named", "Site", "nbytes"]

Groups = Sequence[Sequence[int]]  # the blocks of each piece, by number
Named = dict[str, tuple[int, ...]]  # by the name of a piece, its blocks


class Cost(NamedTuple):
    """What a block computes for one input vector, and what it holds."""

    macs: int
    nbytes: int

    @classmethod
    def sum(cls, costs: Iterable[Cost]) -> Cost:
        """Of all of them."""
        found = list(costs)
        return cls(sum(cost.macs for cost in found), sum(cost.nbytes for cost in found))


@dataclass(frozen=True)
class Site:
    """Blocks of one operator that do not hear each other, what each of them costs, and how some are taken out."""

    name: str  # below the operator: "layers.1"; "" where the operator has only this one
    costs: tuple[Cost, ...]  # of each block
    part: Callable[[Sequence[int]], nn.Module]  # some blocks as a module in memory of its own; others are not read


@dataclass(frozen=True)
class FeatureSite(Site):
    """Blocks that each read some features of a vector and write some of the next: its lines."""

    reads: tuple[np.ndarray, ...]  # of each block, lines of the vector before
    writes: tuple[np.ndarray, ...]  # of each block, lines of the vector after
    idle: Tensor  # (lines,) what each line holds that no block writes


def nbytes(module: nn.Module) -> int:
    """Bytes of all that a module holds."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
