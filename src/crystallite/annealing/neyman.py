"""The paper's first test: which weights are too large to be left over from initialisation."""

from __future__ import annotations

import math

import numpy as np

from crystallite.annealing.distributions import Null
from crystallite.annealing.histogram import magnitude_histogram
from crystallite.annealing.multiplicity import benjamini_hochberg_level, bonferroni_level, holm_level
from crystallite.core.arrays import Magnitudes
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice

__all__ = ["CORRECTIONS", "neyman_level", "percolation_level", "resolve_level"]

CORRECTIONS = (None, "bonferroni", "holm", "bh")


def percolation_level(rows: int, cols: int) -> float:
    """x* = 1/√(rows·cols), the level at which noise alone starts to hold a network together.

    On a pure-null matrix every entry survives a test at level x with probability x, so the kept edges are a random
    bipartite graph. A walk over it branches cols·x ways from a row and rows·x ways from a column; as soon as
    rows·cols·x² > 1 the branches no longer die out, and one giant component swallows nearly everything. Above x*
    "one block" therefore says nothing about the network; below x* noise stays in fragments. Keeping two true blocks
    apart takes more: not one false edge may join them, which is what Bonferroni and Holm control.

    >>> round(percolation_level(512, 784), 5)
    0.00158
    """
    return 1 / math.sqrt(max(rows * cols, 4))  # a 1×1 or 1×2 matrix still gets a level below 1


def resolve_level(level: float | str, rows: int, cols: int) -> float:
    """The level as a number: "percolation" is 1/√(rows·cols), a number in (0, 1) is itself."""
    if level == "percolation":
        return percolation_level(rows, cols)
    if isinstance(level, bool) or not (isinstance(level, (int, float, np.number)) and 0 < level < 1):
        raise InvalidOption(f'level must be a number between 0 and 1 or "percolation", got {level!r}')
    return float(level)


def neyman_level(null: Null, level: float, correction: str | None, matrix: Magnitudes, name: str = "matrix") -> float:
    """The level each single entry is tested at: |w| ≥ c with P_f0(|w| ≥ c) = it.

    None tests at `level` itself and "bonferroni" at level/(rows·cols): both without reading the matrix. "holm" and "bh"
    count magnitudes first: one pass, and one more for each histogram bin that has to be resolved (mostly one).
    """
    if correction is None:
        return level
    if correction == "bonferroni":
        return bonferroni_level(level, matrix.bits.size)
    check_choice("correction", correction, CORRECTIONS)
    count = holm_level if correction == "holm" else benjamini_hochberg_level
    return count(null, level, magnitude_histogram(matrix, name))
