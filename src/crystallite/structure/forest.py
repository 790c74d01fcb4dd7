"""Maximum spanning forest of a weight matrix seen as a bipartite graph, in a few passes over it.

The components of {|w| ≥ c} for every c at once are those of this forest, so it answers all questions about levels.
A dense Prim or Kruskal would handle every entry one by one. Here one pass collects the few heaviest entries per
neuron (by a sampled threshold) and Kruskal joins them; what is left outside the giant set is joined by Borůvka rounds
that compare 64 entries at a time. Exact for any input: the threshold only decides how much is left for the rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crystallite.core.arrays import Magnitudes
from crystallite.core.parallel import compiled, over_rows, thread_count
from crystallite.structure.components import kernel_arguments, kernel_mask, refuse_non_finite
from crystallite.structure.kernels import best_links, collect_survivors, find

__all__ = ["Forest", "kruskal", "roots", "spanning_forest"]

_HEAVY_PER_NODE = 4  # entries collected per neuron: enough that nearly all neurons join the giant set
_SAMPLED_ROWS, _SAMPLED_ENTRIES = 256, 1 << 14

Edges = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, columns, magnitude patterns


@dataclass(frozen=True)
class Forest:
    """Edges of a maximum spanning forest, heaviest first; together they join whatever the matrix joins."""

    rows: np.ndarray  # (edges,)
    cols: np.ndarray  # (edges,)
    weights: np.ndarray  # (edges,) |w| as float64, descending, none zero


def spanning_forest(matrix: Magnitudes, name: str = "matrix") -> Forest:
    """Maximum spanning forest of the bipartite graph with an edge of weight |w| at every nonzero entry.

    Two to four passes over the matrix and O((rows + cols) log) work beside them; O(rows + cols) memory.
    """
    rows, cols = matrix.shape
    parent = np.arange(rows + cols, dtype=np.int32)  # columns first, then rows
    joined = _join(parent, cols, _heaviest(matrix, name))
    kept = [joined]
    while True:
        label = roots(parent)
        giant = int(np.bincount(label).argmax()) if len(label) else -1
        if (label == giant).all():
            break
        joined = _join(parent, cols, _links_out(matrix, label, giant))
        if not len(joined[0]):
            break
        kept.append(joined)
    edge_rows, edge_cols, bits = _heaviest_first(*(np.concatenate(part) for part in zip(*kept, strict=True)))
    if matrix.transposed:
        edge_rows, edge_cols = edge_cols, edge_rows
    return Forest(edge_rows, edge_cols, matrix.values(bits))


@compiled
def kruskal(first, second, parent):
    """Which edges join two sets, taking them in order; `parent` is updated."""
    keep = np.zeros(first.shape[0], np.bool_)
    for e in range(first.shape[0]):
        a = find(parent, first[e])
        b = find(parent, second[e])
        if a != b:
            parent[max(a, b)] = min(a, b)
            keep[e] = True
    return keep


@compiled
def roots(parent):
    """Root of every node."""
    label = np.empty_like(parent)
    for node in range(parent.shape[0]):
        label[node] = find(parent, node)
    return label


def _heaviest_first(rows: np.ndarray, cols: np.ndarray, bits: np.ndarray) -> Edges:
    order = np.argsort(bits)[::-1]
    return rows[order], cols[order], bits[order]


def _join(parent: np.ndarray, cols: int, edges: Edges) -> Edges:
    """Kruskal over the given edges: those that joined two sets."""
    edge_rows, edge_cols, bits = _heaviest_first(*edges)
    keep = kruskal(edge_cols, edge_rows + np.int32(cols), parent)
    return edge_rows[keep], edge_cols[keep], bits[keep]


def _heaviest(matrix: Magnitudes, name: str) -> Edges:
    """All entries above a threshold that leaves a few per neuron."""
    wanted = _HEAVY_PER_NODE * sum(matrix.shape)
    threads = thread_count(matrix)
    capacity = 2 * wanted // threads + 1024
    threshold = _sampled_threshold(matrix, wanted)
    while True:
        counts, edges = _collect(matrix, threshold, threads, capacity, name)
        if max(counts) <= capacity:
            return edges
        # More entries than sampled lie above it (ties, or an uneven matrix): keep the upper part of what was seen.
        threshold = max(int(np.quantile(edges[2], 0.75, method="higher")), threshold + 1)


def _sampled_threshold(matrix: Magnitudes, wanted: int) -> int:
    """A pattern that about `wanted` entries reach, from evenly spaced rows."""
    rows, cols = matrix.shape
    if rows * cols <= wanted:
        return 1
    chosen = np.linspace(0, rows - 1, min(rows, _SAMPLED_ROWS)).astype(int)
    step = max(1, len(chosen) * cols // _SAMPLED_ENTRIES)
    sample = np.concatenate([matrix.block(r, r + 1)[0][i % step :: step] for i, r in enumerate(chosen)])
    place = len(sample) - 1 - int(len(sample) * wanted / (rows * cols))
    return max(1, int(np.partition(sample & matrix.storage(matrix.mask), place)[place]))


def _collect(matrix: Magnitudes, threshold: int, threads: int, capacity: int, name: str) -> tuple[list[int], Edges]:
    """Entries that reach the threshold, and how many each thread met: more than its capacity if they did not fit."""
    mask, limit, infinity = kernel_arguments(matrix, threshold)
    rows, cols = (np.empty((threads, capacity), np.int32) for _ in range(2))
    bits = np.empty((threads, capacity), matrix.storage)
    counts = [0] * threads

    def collect(thread: int, first_row: int, block: np.ndarray) -> None:
        buffers = (rows[thread], cols[thread], bits[thread])
        counts[thread], bad = collect_survivors(block, first_row, mask, limit, infinity, *buffers, counts[thread])
        refuse_non_finite(matrix, bad, name)

    over_rows(matrix, collect)
    filled = [np.concatenate([part[t, :n] for t, n in enumerate(counts)]) for part in (rows, cols, bits)]
    return counts, (filled[0], filled[1], filled[2])


def _links_out(matrix: Magnitudes, label: np.ndarray, giant: int) -> Edges:
    """One Borůvka round: the heaviest edge out of every set but the giant one."""
    threads = thread_count(matrix)
    best_bits = np.zeros((threads, len(label)), matrix.storage)  # zero entries are no edges and never win
    best_row, best_col = (np.full((threads, len(label)), -1, np.int32) for _ in range(2))
    unreachable = matrix.storage(np.iinfo(matrix.storage).max)
    outside_cols = np.flatnonzero(label[: matrix.shape[1]] != giant)
    needs = np.full(matrix.shape[1], unreachable)
    needs[outside_cols] = 1
    column_needs = np.tile(needs, (threads, 1))
    mask = kernel_mask(matrix)

    def search(thread: int, first_row: int, block: np.ndarray) -> None:
        best = (best_bits[thread], best_row[thread], best_col[thread])
        best_links(block, first_row, mask, label, np.int32(giant), outside_cols, column_needs[thread], *best)

    over_rows(matrix, search)
    winner = best_bits.argmax(0)  # the first thread, hence the first in reading order, where weights tie
    at = (winner, np.arange(len(label)))
    found = best_bits[at] > 0
    return best_row[at][found], best_col[at][found], best_bits[at][found]
