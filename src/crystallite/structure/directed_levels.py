"""Strong and weak components of a feedback matrix at every threshold at once.

Strongly connected components only grow as the threshold falls, so all of them together are a tree of at most n − 1
mergers. Halving the range of thresholds finds it: what is one component at the middle merged above it, and everything
else, with those components contracted, merges below; each edge goes to one side only (Tarjan, 1983).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse

from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.errors import InvalidOption
from crystallite.structure.decompose import decompose
from crystallite.structure.forest import kruskal, spanning_forest

__all__ = ["DirectedLevel", "DirectedProfile", "directed_profile", "strong_mergers"]


class DirectedLevel(NamedTuple):
    """The feedback structure of {|w| ≥ threshold}, counted."""

    threshold: float
    n_scc: int
    n_components: int
    largest_scc_share: float
    isolated: int


@dataclass(frozen=True, eq=False, repr=False)
class DirectedProfile:
    """Feedback structure as a function of the threshold: one entry of each array per threshold, descending.

    From `level_profile` without `thresholds` these are all at which strong components, weak components or isolated
    nodes change, so that `at` is exact everywhere. Layers may also change between them: `n_layers` is exact at the
    thresholds that are listed, and `decompose` says it for any other.
    """

    weight: Any  # as it was given
    name: str
    thresholds: np.ndarray
    n_scc: np.ndarray  # strongly connected components, isolated nodes included
    n_components: np.ndarray  # weakly connected components, isolated nodes included
    largest_scc_share: np.ndarray  # nodes in the largest SCC as a share of all
    isolated: np.ndarray
    is_exact: bool  # nothing but layers changes between the thresholds

    @cached_property
    def n_layers(self) -> np.ndarray:
        """Layers at each threshold; one pass over the matrix for each, when first asked for."""
        found = [decompose(self.weight, "directed", threshold=float(c), name=self.name) for c in self.thresholds]
        return np.array([d.n_layers for d in found], int)

    def at(self, threshold: float) -> DirectedLevel:
        """The counts at any threshold > 0, O(log levels).

        Raises:
            InvalidOption: The profile is one of chosen thresholds, and this is none of them.

        Examples:
            >>> from crystallite import level_profile
            >>> level_profile(np.array([[0.0, 3.0], [1.0, 0.0]]), kind="directed").at(2.0)
            DirectedLevel(threshold=2.0, n_scc=2, n_components=1, largest_scc_share=0.5, isolated=0)
        """
        k = len(self.thresholds) - int(np.searchsorted(self.thresholds[::-1], threshold, side="left")) - 1
        if not self.is_exact and (k < 0 or self.thresholds[k] != threshold):
            raise InvalidOption(f"{self.name}: only the thresholds that were chosen are known, {threshold!r} is not")
        nodes = np.shape(self.weight)[0]
        if k < 0:
            return DirectedLevel(threshold, nodes, nodes, min(nodes, 1) / max(nodes, 1), nodes)
        counts = int(self.n_scc[k]), int(self.n_components[k])
        return DirectedLevel(threshold, *counts, float(self.largest_scc_share[k]), int(self.isolated[k]))

    def to_pandas(self) -> Any:
        """One row per threshold."""
        import pandas

        names = ("thresholds", "n_scc", "n_components", "largest_scc_share", "n_layers", "isolated")
        return pandas.DataFrame({name: getattr(self, name) for name in names})

    def __repr__(self) -> str:
        nodes, levels = np.shape(self.weight)[0], len(self.thresholds)
        fewest = int(self.n_scc.min(initial=nodes))
        return f"DirectedProfile({nodes} nodes, {levels} levels: {nodes} to {fewest} strong components)"


def directed_profile(weight: Any, thresholds: Sequence[float] | None, name: str) -> DirectedProfile:
    """The profile at chosen thresholds, one pass each, or at all at which something changes."""
    if thresholds is not None:
        found = [decompose(weight, "directed", threshold=float(c), name=name) for c in thresholds]
        profile = DirectedProfile(
            weight, name, np.asarray(thresholds, np.float64),
            np.array([d.n_scc for d in found], int), np.array([d.n_components for d in found], int),
            np.array([d.largest_share for d in found], float), np.array([d.isolated.sum() for d in found], int), False,
        )  # fmt: skip
        profile.__dict__["n_layers"] = np.array([d.n_layers for d in found], int)  # known already
        return profile
    nodes = decompose(weight, "directed", name=name).size  # refuses what is not square or not finite
    matrix = magnitudes(weight, name)
    strong, when = strong_mergers(weight, matrix, name)
    forest = spanning_forest(matrix, name)
    # rows and columns are the same nodes here: the forest of the joined graph is part of the forest of the two sides
    off = forest.rows != forest.cols
    order = np.argsort(forest.weights[off], kind="stable")[::-1]
    ends, weak = np.stack([forest.rows[off], forest.cols[off]])[:, order].astype(np.int32), forest.weights[off][order]
    weak = weak[kruskal(ends[0], ends[1], np.arange(nodes, dtype=np.int32))]
    first_edge = np.zeros(nodes)
    np.maximum.at(first_edge, np.concatenate([forest.rows, forest.cols]), np.tile(forest.weights, 2))
    levels = np.unique(np.concatenate([when, weak, first_edge[first_edge > 0]]))[::-1]
    merged, joined, touched = (
        np.searchsorted(-np.sort(times)[::-1], -levels, side="right") for times in (when, weak, first_edge)
    )
    largest = _largest(strong, nodes)
    return DirectedProfile(
        weight, name, levels, nodes - merged, nodes - joined, largest[merged] / max(nodes, 1), nodes - touched, True
    )


def strong_mergers(weight: Any, matrix: Magnitudes, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(mergers, 2) nodes whose strong components become one, and (mergers,) the threshold at which; descending.

    About 30 passes find the threshold below which no edge changes anything; what is above, O(n log n) edges where
    weights have no order, is halved log₂(distinct weights) times.
    """
    nodes = matrix.shape[0]

    def components(pattern: int) -> int:
        limit = float(matrix.values(np.array([pattern], matrix.storage))[0])
        return decompose(weight, "directed", threshold=limit, name=name).n_scc

    last = decompose(weight, "directed", name=name).n_scc
    if last == nodes:
        return np.zeros((0, 2), np.intp), np.zeros(0)
    enough, too_high = 1, matrix.infinity
    while too_high - enough > 1:
        middle = (enough + too_high) // 2
        enough, too_high = (middle, too_high) if components(middle) == last else (enough, middle)
    source, target, ranks, values = _edges(matrix, enough)
    return _halved(source, target, ranks, values, nodes)


def _edges(matrix: Magnitudes, least: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Edges of at least this pattern between different nodes, the rank of each weight from the largest, and weights."""
    found = []
    mask = matrix.storage(matrix.mask)
    for start in range(0, matrix.shape[0], matrix.rows_per_block):
        patterns = matrix.block(start, min(start + matrix.rows_per_block, matrix.shape[0])) & mask
        rows, cols = np.nonzero(patterns >= matrix.storage(least))
        found.append((rows + start, cols, patterns[rows, cols]))
    rows, cols, patterns = (np.concatenate(parts) for parts in zip(*found, strict=True))
    rows, cols, patterns = (side[rows != cols] for side in (rows, cols, patterns))
    distinct, place = np.unique(patterns, return_inverse=True)
    target, source = (cols, rows) if matrix.transposed else (rows, cols)
    return source, target, len(distinct) - 1 - place, matrix.values(distinct)[::-1]


def _halved(
    source: np.ndarray, target: np.ndarray, rank: np.ndarray, values: np.ndarray, nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mergers, by halving all open ranges of ranks at once: one pass over the edges left for each depth."""
    low, high = np.full(len(rank), -1), np.full(len(rank), len(values) - 1)  # merges at a rank in (low, high]
    member = np.arange(nodes)  # an original node of each node of the problems
    pairs, when = [], []
    while len(rank):
        middle = np.where(high - low > 1, (low + high) // 2, high)
        active = rank <= middle
        count = len(member)
        graph = sparse.coo_array(
            (np.ones(int(active.sum()), np.int8), (source[active], target[active])), (count, count)
        )
        total, label = sparse.csgraph.connected_components(graph.tocsr(), connection="strong")
        final = high - low == 1
        inside = label[source] == label[target]
        ends = np.unique(np.concatenate([source[final & inside], target[final & inside]]))
        if len(ends):  # these components merge at exactly this rank
            at = np.zeros(count, np.intp)
            at[source[final & inside]] = at[target[final & inside]] = high[final & inside]
            first = np.full(total, -1)
            first[label[ends][::-1]] = ends[::-1]
            rest = ends[first[label[ends]] != ends]
            pairs.append(np.column_stack([member[first[label[rest]]], member[rest]]))
            when.append(at[rest])
        left, right = ~final & inside & active, ~final & ~inside
        heads = np.zeros(total, np.intp)
        heads[label] = member
        source, target = (
            np.concatenate([side[left], count + label[side[right]]]) for side in (source, target)
        )  # contracted nodes get numbers of their own
        low = np.concatenate([low[left], middle[right]])
        high = np.concatenate([middle[left], high[right]])
        rank = np.concatenate([rank[left], rank[right]])
        used, numbers = np.unique(np.concatenate([source, target]), return_inverse=True)
        source, target = numbers[: len(source)], numbers[len(source) :]
        member = np.concatenate([member, heads])[used]
    if not pairs:
        return np.zeros((0, 2), np.intp), np.zeros(0)
    ranks = np.concatenate(when)
    order = np.argsort(ranks, kind="stable")
    return np.concatenate(pairs)[order], values[ranks[order]].astype(np.float64)


def _largest(pairs: np.ndarray, nodes: int) -> np.ndarray:
    """(mergers + 1,) size of the largest component before the first merger and after each."""
    parent, size = list(range(nodes)), [1] * nodes
    largest = [min(nodes, 1)]

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for a, b in pairs.tolist():
        a, b = root(a), root(b)
        parent[b] = a
        size[a] += size[b]
        largest.append(max(largest[-1], size[a]))
    return np.array(largest, float)
