"""Blocks at every threshold at once, read off the maximum spanning forest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple, overload

import numpy as np

from crystallite.core.arrays import magnitudes
from crystallite.core.drawing import Drawing, side_by_side
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.parallel import compiled
from crystallite.core.run_charts import curve, line_chart
from crystallite.core.suggest import suggest_keywords
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.structure.directed_levels import DirectedProfile, directed_profile
from crystallite.structure.forest import kruskal, roots, spanning_forest
from crystallite.structure.kernels import find

__all__ = ["Level", "LevelProfile", "chain_labels", "level_profile"]


class Level(NamedTuple):
    """The blocks of {|w| ≥ threshold}, counted."""

    threshold: float
    n_blocks: int
    largest_share: float  # neurons in the largest block as a share of all
    dormant: tuple[int, ...]  # neurons without an edge: (columns, rows), or one count for each layer of a chain


@dataclass(frozen=True, eq=False, repr=False)
class LevelProfile:
    """Blocks, largest block and dormant neurons as functions of the threshold; they change only at `thresholds`.

    Neurons come in groups: the columns and the rows of one matrix, or the layers of neurons of a chain of matrices.

    >>> level_profile(np.array([[3.0, 0.0, 1.0], [0.0, 2.0, 0.0]]))
    LevelProfile(2 + 3 neurons, 3 levels: up to 2 blocks; largest reaches 60% of the neurons)
    """

    group_sizes: tuple[int, ...]
    thresholds: np.ndarray  # (levels,) descending; the counts below hold for thresholds[k + 1] < c ≤ thresholds[k]
    n_blocks: np.ndarray  # (levels,)
    largest: np.ndarray  # (levels,) neurons in the largest block
    squares: np.ndarray  # (levels,) Σ (neurons in a block)²
    dormant: np.ndarray  # (levels, groups) neurons without an edge
    first: np.ndarray  # (edges,) the forest's edges between neurons numbered through all groups
    second: np.ndarray
    weights: np.ndarray  # (edges,) descending

    @property
    def largest_share(self) -> np.ndarray:
        """(levels,) neurons in the largest block as a share of all."""
        return self.largest / max(1, sum(self.group_sizes))

    @property
    def active_share(self) -> np.ndarray:
        """(levels,) neurons in some block as a share of all."""
        return 1 - self.dormant.sum(1) / max(1, sum(self.group_sizes))

    @property
    def effective_blocks(self) -> np.ndarray:
        """(levels,) (Σ size)² / Σ size²: k for k equal blocks, near 1 for one giant block and its crumbs."""
        return (sum(self.group_sizes) - self.dormant.sum(1)) ** 2 / self.squares

    def at(self, threshold: float) -> Level:
        """The counts at any threshold ≥ 0, O(log levels). Zeros are no edges, also at 0.

        >>> level_profile(np.array([[3.0, 0.0, 1.0], [0.0, 2.0, 0.0]])).at(1.5)
        Level(threshold=1.5, n_blocks=2, largest_share=0.4, dormant=(1, 0))
        """
        k = self._kept(self.thresholds, threshold) - 1
        if k < 0:
            return Level(threshold, 0, 0.0, self.group_sizes)
        share = float(self.largest_share[k])
        return Level(threshold, int(self.n_blocks[k]), share, tuple(self.dormant[k].tolist()))

    def labels(self, threshold: float) -> list[np.ndarray]:
        """Block label of every neuron at a threshold, one array for each group; −1 is dormant. O(neurons)."""
        total = sum(self.group_sizes)
        edges = self._kept(self.weights, threshold)
        parent = np.arange(total, dtype=np.int32)
        kruskal(self.first[:edges], self.second[:edges], parent)
        label = roots(parent)
        touched = np.zeros(total, bool)
        touched[self.first[:edges]] = touched[self.second[:edges]] = True
        label[~touched] = -1
        return np.split(label, np.cumsum(self.group_sizes)[:-1])

    def structure(self, threshold: float) -> BipartiteStructure:
        """The blocks at a threshold > 0, as `decompose` would find them, without reading the matrix again.

        At 0 those of the nonzero entries, which is `decompose` without a threshold.
        """
        if len(self.group_sizes) != 2:
            raise InvalidOption(
                f"a chain of {len(self.group_sizes) - 1} matrices has no single structure; use labels()"
            )
        cols, rows = self.labels(threshold)
        return BipartiteStructure.from_labels(rows, cols)

    def to_pandas(self) -> Any:
        """One row per level."""
        import pandas

        columns = {"threshold": self.thresholds, "blocks": self.n_blocks, "largest_share": self.largest_share}
        names = (
            ("columns", "rows") if len(self.group_sizes) == 2 else [f"layer {i}" for i in range(len(self.group_sizes))]
        )
        for name, counts in zip(names, self.dormant.T, strict=True):
            columns[f"dormant {name}"] = counts
        return pandas.DataFrame(columns)

    def plot(self) -> Drawing:
        """A picture of the blocks, and of the largest one, over all thresholds; the strictest is on the right."""
        return side_by_side(
            [
                line_chart({"": curve(self.thresholds, values)}, "threshold |w| ≥", label, share, log=True)
                for label, values, share in (
                    ("blocks", self.n_blocks, False),
                    ("neurons in the largest block", self.largest_share, True),
                )
            ]
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.plot().svg()}"

    @staticmethod
    def _kept(descending: np.ndarray, threshold: float) -> int:
        """How many of the values are ≥ threshold."""
        if not (isinstance(threshold, (int, float, np.number)) and threshold >= 0):
            raise InvalidOption(f"threshold must be a number ≥ 0, got {threshold!r}")
        return len(descending) - int(np.searchsorted(descending[::-1], threshold, side="left"))

    def __repr__(self) -> str:
        neurons = " + ".join(map(str, self.group_sizes[::-1] if len(self.group_sizes) == 2 else self.group_sizes))
        most, share = self.n_blocks.max(initial=0), self.largest_share.max(initial=0.0)
        return (
            f"LevelProfile({neurons} neurons, {len(self.thresholds)} levels: up to {most} blocks; "
            f"largest reaches {share:.0%} of the neurons)"
        )


@overload
def level_profile(
    weight: Any,
    kind: Literal["bipartite"] = ...,
    *,
    scales: Sequence[float] | None = ...,
    name: str = ...,
) -> LevelProfile: ...


@overload
def level_profile(
    weight: Any, kind: Literal["directed"], *, thresholds: Sequence[float] | None = ..., name: str = ...
) -> DirectedProfile: ...


@suggest_keywords
def level_profile(
    weight: Any,
    kind: Literal["bipartite", "directed"] = "bipartite",
    *,
    scales: Sequence[float] | None = None,
    thresholds: Sequence[float] | None = None,
    name: str = "matrix",
) -> LevelProfile | DirectedProfile:
    """Number of blocks, largest block and dormant neurons of {|w| ≥ c}, at every c from one computation.

    Two to four passes over the matrix, O(rows + cols) memory. The forest of a union of matrices is a subset of the
    union of their forests, so a chain costs what its matrices cost. kind="directed" needs about 30 passes for the
    tree of strong components (`DirectedProfile`), and one more for each threshold whose layers are asked for.

    Args:
        weight: A matrix; or a list of matrices W₁, W₂, … that share neurons as consecutive layers do (the rows of one
            are the columns of the next), for the blocks of the whole chain.
        kind: "bipartite" for feed-forward matrices; "directed" for square feedback matrices: strong and weak
            components and isolated nodes, exact at every level.
        scales: Divides each matrix of a chain, so that one threshold means the same in all of them: pass each layer's
            null scale (the bound or σ of its initialisation). Layers trained alike share no raw threshold otherwise.
        thresholds: Only these, one pass each; kind="directed" only.
        name: What errors call the matrix.

    Returns:
        A `LevelProfile`, or a `DirectedProfile`.

    Raises:
        InvalidOption: An option does not fit the kind.
        InvalidMatrix: Shapes do not fit, or entries are not finite.
    """
    if kind not in ("bipartite", "directed"):
        raise InvalidOption(f'kind must be "bipartite" or "directed", got {kind!r}')
    if kind == "directed":
        if scales is not None:
            raise InvalidOption('scales are for a chain of matrices; kind="directed" takes one')
        return directed_profile(weight, thresholds, name)
    if thresholds is not None:
        raise InvalidOption('thresholds are for kind="directed"; the bipartite profile covers every level')
    chain = isinstance(weight, (list, tuple)) and len(weight) > 0 and np.ndim(weight[0]) == 2
    matrices = list(weight) if chain else [weight]
    divisors = [1.0] * len(matrices) if scales is None else [float(s) for s in scales]
    if len(divisors) != len(matrices) or not all(0 < s < np.inf for s in divisors):
        raise InvalidOption(f"scales must be {len(matrices)} positive numbers, one per matrix, got {scales!r}")
    sizes: list[int] = []
    first, second, weights = [], [], []
    for i, (matrix, divisor) in enumerate(zip(matrices, divisors, strict=True)):
        label = f"{name}[{i}]" if chain else name
        m = magnitudes(matrix, label)
        rows, cols = m.shape[::-1] if m.transposed else m.shape
        if not sizes:
            sizes.append(cols)
        elif sizes[-1] != cols:
            raise InvalidMatrix(f"{label}: expected {sizes[-1]} columns, the rows of the layer before, got {cols}")
        forest = spanning_forest(m, label)
        first.append(forest.cols + sum(sizes[:-1]))
        second.append(forest.rows + sum(sizes))
        weights.append(forest.weights / divisor)
        sizes.append(rows)
    return _profile(tuple(sizes), np.concatenate(first), np.concatenate(second), np.concatenate(weights))


def chain_labels(weights: Sequence[Any], name: str = "layer") -> list[np.ndarray]:
    """Component of every neuron of consecutive layers under their nonzero weights, one array per layer of neurons.

    The inputs first; −1 is a neuron without an edge. W₁, W₂, … share neurons: the rows of one are the columns of the
    next. One pass over each matrix.

    >>> [labels.tolist() for labels in chain_labels([np.eye(2), np.array([[0.0, 1.0]])])]
    [[0, 1], [0, 1], [1]]
    """
    sizes = [np.shape(weights[0])[1], *(np.shape(w)[0] for w in weights)]
    offset = np.concatenate([[0], np.cumsum(sizes)])
    first, second = [], []
    for i, w in enumerate(weights):
        if np.shape(w)[1] != sizes[i]:
            raise InvalidMatrix(f"{name} {i}: expected {sizes[i]} columns, the rows before, got {np.shape(w)[1]}")
        for rows, cols in decompose(w, name=f"{name} {i}").blocks:  # a star joins what a block joins
            first += [np.full(len(rows) + len(cols), offset[i] + cols[0])]
            second += [np.concatenate([offset[i] + cols, offset[i + 1] + rows])]
    parent = np.arange(offset[-1], dtype=np.int32)
    if first:
        kruskal(np.concatenate(first).astype(np.int32), np.concatenate(second).astype(np.int32), parent)
    label = roots(parent)
    touched = np.zeros(offset[-1], bool)
    if second:
        touched[np.concatenate(second)] = True
    result = np.full(offset[-1], -1)
    result[touched] = np.unique(label[touched], return_inverse=True)[1]
    return np.split(result, offset[1:-1])


def _profile(sizes: tuple[int, ...], first: np.ndarray, second: np.ndarray, weights: np.ndarray) -> LevelProfile:
    order = np.argsort(weights, kind="stable")[::-1]
    first, second, weights = first[order].astype(np.int32), second[order].astype(np.int32), weights[order]
    keep = kruskal(first, second, np.arange(sum(sizes), dtype=np.int32))
    first, second, weights = first[keep], second[keep], weights[keep]
    group = np.repeat(np.arange(len(sizes)), sizes)
    n_blocks, largest, squares, dormant = _history(first, second, group, np.array(sizes))
    last = np.append(weights[1:] != weights[:-1], True)[: len(weights)]  # the last edge of each distinct weight
    levels = (weights[last], n_blocks[last], largest[last], squares[last], dormant[last])
    return LevelProfile(sizes, *levels, first, second, weights)


@compiled
def _history(first, second, group, sizes):
    """What a `LevelProfile` counts, after each edge of the forest: blocks, largest, Σ size², dormant per group."""
    edges = first.shape[0]
    parent = np.arange(group.shape[0]).astype(np.int32)
    size = np.ones(group.shape[0], np.int64)
    n_blocks = np.empty(edges, np.int64)
    largest = np.empty(edges, np.int64)
    squares = np.empty(edges, np.float64)
    dormant = np.empty((edges, sizes.shape[0]), np.int64)
    blocks, most, square = 0, 0, 0.0
    left = sizes.copy()
    for e in range(edges):
        a = find(parent, first[e])
        b = find(parent, second[e])
        blocks += 1
        for node, root in ((first[e], a), (second[e], b)):
            if size[root] > 1:
                blocks -= 1
                square -= float(size[root]) ** 2
            else:
                left[group[node]] -= 1
        parent[b] = a
        size[a] += size[b]
        most = max(most, size[a])
        square += float(size[a]) ** 2
        n_blocks[e] = blocks
        largest[e] = most
        squares[e] = square
        dormant[e] = left
    return n_blocks, largest, squares, dormant
