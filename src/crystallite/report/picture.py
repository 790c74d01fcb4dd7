"""Matrices as small grids: where the kept weights lie in any order, and the blocks of every level in one order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.structure.levels import LevelProfile

__all__ = ["NEVER", "SHARES", "LevelOrder", "densities", "level_order", "share_stops"]

SHARES = (0.0, 0.02, 0.1, 0.25, 0.5, 0.9)  # of a cell's weights; 0 means any weight at all
NEVER = 255  # a stop that no threshold of the slider reaches
_BLOCK_ENTRIES = 1 << 21  # looked at together


@dataclass(frozen=True)
class LevelOrder:
    """One order of all neurons in which the blocks of every level are runs of neighbours.

    Single linkage joins whole runs, so two neighbours are in one block exactly down to the threshold at which their
    runs were joined. `gaps[i]` is that threshold between neurons i and i + 1 (0: never).
    """

    neurons: np.ndarray  # (columns + rows,) columns are 0 … cols − 1, rows follow
    gaps: np.ndarray  # (columns + rows − 1,)
    cols: int

    @property
    def is_row(self) -> np.ndarray:
        return self.neurons >= self.cols

    @property
    def row_order(self) -> np.ndarray:
        """order[new] = old, as in a `Permutation`."""
        return self.neurons[self.is_row] - self.cols

    @property
    def col_order(self) -> np.ndarray:
        return self.neurons[~self.is_row]


def level_order(profile: LevelProfile) -> LevelOrder:
    """The order in which the blocks of a matrix stay together at every level, the largest parts first.

    >>> from crystallite.structure.levels import level_profile
    >>> order = level_order(level_profile(np.array([[3.0, 0.0, 1.0], [0.0, 2.0, 0.0]])))
    >>> order.row_order.tolist(), order.col_order.tolist(), order.gaps.tolist()
    ([0, 1], [0, 2, 1], [3.0, 1.0, 0.0, 2.0])
    """
    total = sum(profile.group_sizes)
    parent, size = list(range(total)), [1] * total
    head, tail, after, gap = list(range(total)), list(range(total)), [-1] * total, [0.0] * total

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    edges = zip(profile.first.tolist(), profile.second.tolist(), profile.weights.tolist(), strict=True)
    for first, second, weight in edges:  # heaviest first
        large, small = find(first), find(second)
        if size[large] < size[small]:
            large, small = small, large
        after[tail[large]], gap[tail[large]] = head[small], weight
        tail[large] = tail[small]
        parent[small] = large
        size[large] += size[small]
    neurons, gaps = [], []
    for root in sorted((n for n in range(total) if parent[n] == n), key=lambda n: -size[n]):
        node = head[root]
        while node >= 0:
            neurons.append(node)
            gaps.append(gap[node])
            node = after[node]
    return LevelOrder(np.array(neurons, np.intp), np.array(gaps[:-1]), profile.group_sizes[0])


def densities(matrix: Any, limits: Any, orders: list[tuple[np.ndarray, np.ndarray]], grid: int) -> list[np.ndarray]:
    """The share of entries |w| ≥ limits (one, or one per column) in each cell, for each (row order, column order).

    >>> w = np.array([[0.0, 5.0], [5.0, 0.0]])
    >>> [d.tolist() for d in densities(w, 1.0, [(np.arange(2), np.arange(2)), (np.array([1, 0]), np.arange(2))], 2)]
    [[[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]]
    """
    source = _by_rows(matrix)
    rows, cols = source.shape
    cells = [(_cells(row_order, grid), _cells(col_order, grid)) for row_order, col_order in orders]
    shape = min(grid, rows), min(grid, cols)
    kept = [np.zeros(shape[0] * shape[1], np.int64) for _ in orders]
    for start, block in _blocks(source):
        at_row, at_col = np.nonzero(block >= limits)
        for (row_cell, col_cell), counts in zip(cells, kept, strict=True):
            place = row_cell[at_row + start] * shape[1] + col_cell[at_col]
            counts += np.bincount(place, minlength=len(counts))
    full = _cell_sizes(rows, shape[0])[:, None] * _cell_sizes(cols, shape[1])
    return [counts.reshape(shape) / np.maximum(full, 1) for counts in kept]


def share_stops(
    matrix: Any, thresholds: np.ndarray, row_order: np.ndarray, col_order: np.ndarray, grid: int
) -> tuple[np.ndarray, np.ndarray]:
    """At which of the descending thresholds each share of `SHARES` of a cell is kept, and how many entries each keeps.

    Returns (shares, grid rows, grid cols) uint8 with `NEVER`, and (thresholds,) counts #{|w| ≥ threshold}. Both are
    exact; one pass.
    """
    source = _by_rows(matrix)
    rows, cols = source.shape
    row_cell, col_cell = _cells(row_order, grid), _cells(col_order, grid)
    shape = min(grid, rows), min(grid, cols)
    stops = len(thresholds) + 1
    counts = np.zeros(shape[0] * shape[1] * stops, np.int64)
    ascending = np.ascontiguousarray(thresholds[::-1])
    for start, block in _blocks(source):
        stop = len(thresholds) - np.searchsorted(ascending, block, side="right")  # the first threshold ≤ |w|
        cell = row_cell[start : start + len(block), None] * shape[1] + col_cell
        counts += np.bincount((cell * stops + stop).ravel(), minlength=len(counts))
    reached = counts.reshape(*shape, stops)[..., :-1].cumsum(-1)  # (grid rows, grid cols, thresholds)
    full = _cell_sizes(rows, shape[0])[:, None] * _cell_sizes(cols, shape[1])
    wanted = np.maximum(1, np.ceil(np.array(SHARES)[:, None, None] * full))
    first = np.stack([(reached < w[..., None]).sum(-1) for w in wanted])
    return np.where(first == len(thresholds), NEVER, first).astype(np.uint8), reached.sum((0, 1))


def _by_rows(matrix: Any) -> Magnitudes:
    source = magnitudes(matrix)
    return Magnitudes(source.bits.T, source.format) if source.transposed else source


def _blocks(source: Magnitudes) -> Iterator[tuple[int, np.ndarray]]:
    """Magnitudes of some rows at a time, as float64."""
    rows, cols = source.shape
    step = max(1, _BLOCK_ENTRIES // max(1, cols))
    for start in range(0, rows, step):
        yield start, source.values(source.block(start, min(start + step, rows)))


def _cells(order: np.ndarray, grid: int) -> np.ndarray:
    """The cell of each old index when order[new] = old."""
    cell = np.empty(len(order), np.intp)
    cell[order] = np.arange(len(order)) * min(grid, len(order)) // max(1, len(order))
    return cell


def _cell_sizes(length: int, cells: int) -> np.ndarray:
    return np.bincount(np.arange(length) * cells // max(1, length), minlength=cells)
