"""Hubs: the few rows and columns that hold a block together (bordered block-diagonal form)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.maps import Permutation
from crystallite.core.parallel import compiled
from crystallite.core.suggest import suggest_keywords
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import Threshold, edge_patterns
from crystallite.structure.lanes import LANES, lowest_bit
from crystallite.structure.strong import bit_of, packed

__all__ = ["BorderedStructure", "hubs"]

Array = TypeVar("Array", bound="np.ndarray | torch.Tensor")
_ONE = np.uint64(1)
_DENSE = 8  # edges per neuron


@dataclass(frozen=True, eq=False, repr=False)
class BorderedStructure:
    """Blocks that appear once the hub rows and columns are set aside: they form the border of PWQᵀ.

    `structure` is that of the matrix without its hubs (which it lists as dormant). `separates` says whether the wanted
    separation was reached; if not, no small set of hubs does it, and the sets here are empty.
    """

    hub_rows: np.ndarray
    hub_cols: np.ndarray
    structure: BipartiteStructure
    separates: bool

    @property
    def n_hubs(self) -> int:
        return len(self.hub_rows) + len(self.hub_cols)

    @cached_property
    def P(self) -> Permutation:
        """Rows: blocks, dormant rows, hub rows last."""
        return Permutation(_last(self.structure.P.source, self.hub_rows))

    @cached_property
    def Q(self) -> Permutation:
        """Columns: blocks, dormant columns, hub columns last."""
        return Permutation(_last(self.structure.Q.source, self.hub_cols))

    def apply(self, matrix: Array) -> Array:
        """PWQᵀ: block diagonal, bordered by the hub rows below and the hub columns on the right."""
        if tuple(matrix.shape) != self.structure.shape:
            raise InvalidMatrix(f"expected shape {self.structure.shape}, got {tuple(matrix.shape)}")
        return self.P @ matrix @ self.Q.T

    def __repr__(self) -> str:
        rows, cols = self.structure.shape
        if not self.separates:
            return f"BorderedStructure({rows}×{cols}: no small set of hubs separates it)"
        r, c = len(self.hub_rows), len(self.hub_cols)
        border = f"border of {r} row{'s' * (r != 1)} and {c} column{'s' * (c != 1)}"
        inner = f"{self.structure.n_blocks} blocks, largest {self.structure.largest_share:.0%} of the neurons"
        return f"BorderedStructure({rows}×{cols}: {border}, {inner})"


@suggest_keywords
def hubs(
    matrix: Any,
    *,
    threshold: Threshold = None,
    largest_share: float = 0.5,
    max_hubs: int | None = None,
    name: str = "matrix",
) -> BorderedStructure:
    """A small set of rows and columns without which no block holds more than `largest_share` of the neurons.

    Finding the smallest such set is NP-hard. Greedy: as long as the largest block is too large, set aside the neuron
    whose removal splits it best (an articulation point that cuts off a tenth or more), or else the one with the most
    edges left; at the end every hub that is not needed after all goes back. A graph of eight or more edges per neuron
    is given up at once if setting aside the max_hubs neurons with the most edges does not do it: with so many edges no
    neuron of few is a bridge. O(max_hubs · edges) work, two bits per entry of memory.

    Args:
        matrix: as for `decompose`.
        threshold: as for `decompose`.
        largest_share: of the neurons that a block may hold at most.
        max_hubs: bounds the search; None: 1 % of the neurons or 5 % of the shorter side, whichever is less, at least 4.
            Noise with no structure needs far more, and the result then says so.
        name: what errors call the matrix.

    Returns:
        A `BorderedStructure`: the hubs, and the blocks that are left without them.

    Raises:
        InvalidOption: an option outside the values it may take.
        InvalidMatrix: NaN or infinity, or no numbers.

    Examples:
        >>> w = np.zeros((7, 6)); w[:3, :3] = w[3:6, 3:] = 1; w[6] = 1
        >>> hubs(w)
        BorderedStructure(7×6: border of 1 row and 0 columns, 2 blocks, largest 46% of the neurons)
    """
    if not (isinstance(largest_share, (int, float)) and 0 < largest_share <= 1):
        raise InvalidOption(f"largest_share must lie in (0, 1], got {largest_share!r}")
    if max_hubs is not None and (not isinstance(max_hubs, int) or max_hubs < 0):
        raise InvalidOption(f"max_hubs must be an integer ≥ 0, got {max_hubs!r}")
    m = magnitudes(matrix, name)
    if m.transposed:
        m = Magnitudes(m.bits.T, m.format)
    rows, cols = m.shape
    words = packed(m, edge_patterns(m, threshold), name)
    transposed = _transposed(words, cols)
    limit = int(largest_share * (rows + cols))
    most = max(4, min((rows + cols) // 100, min(rows, cols) // 20)) if max_hubs is None else max_hubs
    removed, separates = _separate(words, transposed, rows, cols, limit, most)
    hub_rows, hub_cols = np.flatnonzero(removed[:rows]), np.flatnonzero(removed[rows:])
    if not separates:
        hub_rows = hub_cols = np.zeros(0, np.intp)
        removed[:] = False
    label, _size = _components(words, transposed, rows, cols, removed)
    return BorderedStructure(hub_rows, hub_cols, BipartiteStructure.from_labels(*np.split(label, [rows])), separates)


def _last(order: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The order with some entries moved to its end."""
    stays = ~np.isin(order, moved)
    return np.concatenate([order[stays], order[~stays]])


@compiled
def _transposed(words, cols):
    """Bit matrix of the transpose."""
    rows = words.shape[0]
    result = np.zeros((cols, (rows + LANES - 1) // LANES), np.uint64)
    for r in range(rows):
        for k in range(words.shape[1]):
            word = words[r, k]
            while word:
                result[k * LANES + lowest_bit(word), r // LANES] |= bit_of(r)
                word &= word - _ONE
    return result


@compiled
def _components(words, transposed, rows, cols, removed):
    """Label of every neuron (rows, then columns) and the sizes, neurons removed or without an edge being −1."""
    label = np.full(rows + cols, -1, np.int64)
    size = np.zeros(rows + cols, np.int64)
    stack = np.empty(rows + cols, np.int64)
    count = 0
    for start in range(rows):
        if removed[start] or label[start] >= 0:
            continue
        label[start] = count
        stack[0] = start
        depth, members = 1, 0
        while depth:
            depth -= 1
            node = stack[depth]
            members += 1
            of_row = node < rows
            source = words[node] if of_row else transposed[node - rows]
            offset = rows if of_row else 0
            for k in range(source.shape[0]):
                word = source[k]
                while word:
                    other = offset + k * LANES + lowest_bit(word)
                    word &= word - _ONE
                    if label[other] < 0 and not removed[other]:
                        label[other] = count
                        stack[depth] = other
                        depth += 1
        if members == 1:
            label[start] = -1
        else:
            size[count] = members
            count += 1
    return label, size[:count]


@compiled
def _degree(node, words, transposed, rows, removed):
    of_row = node < rows
    source = words[node] if of_row else transposed[node - rows]
    offset = rows if of_row else 0
    degree = 0
    for k in range(source.shape[0]):
        word = source[k]
        while word:
            if not removed[offset + k * LANES + lowest_bit(word)]:
                degree += 1
            word &= word - _ONE
    return degree


@compiled
def _best_cut(words, transposed, rows, cols, label, wanted, size):
    """The neuron of a block whose removal leaves the smallest largest part, and that part (Tarjan's low points)."""
    nodes = rows + cols
    found = np.full(nodes, -1, np.int64)  # discovery time
    low = np.zeros(nodes, np.int64)
    below = np.ones(nodes, np.int64)  # neurons in the search tree under a node
    cut = np.zeros(nodes, np.int64)  # of these, how many fall off when the node goes
    largest_part = np.zeros(nodes, np.int64)
    parent = np.full(nodes, -1, np.int64)
    next_word = np.zeros(nodes, np.int64)
    rest = np.zeros(nodes, np.uint64)  # bits of the current word not looked at yet
    stack = np.empty(nodes, np.int64)
    start = 0
    while label[start] != wanted:
        start += 1
    clock = 1
    found[start] = 0
    stack[0] = start
    depth = 1
    while depth:
        node = stack[depth - 1]
        of_row = node < rows
        source = words[node] if of_row else transposed[node - rows]
        offset = rows if of_row else 0
        descended = False
        while True:
            if rest[node] == 0:
                if next_word[node] == source.shape[0]:
                    break
                rest[node] = source[next_word[node]]
                next_word[node] += 1
                continue
            other = offset + (next_word[node] - 1) * LANES + lowest_bit(rest[node])
            rest[node] &= rest[node] - _ONE
            if label[other] != wanted or other == parent[node]:
                continue
            if found[other] >= 0:
                low[node] = min(low[node], found[other])
                continue
            parent[other] = node
            found[other] = low[other] = clock
            clock += 1
            stack[depth] = other
            depth += 1
            descended = True
            break
        if descended:
            continue
        depth -= 1
        if depth:
            above = stack[depth - 1]
            below[above] += below[node]
            low[above] = min(low[above], low[node])
            if low[node] >= found[above]:
                cut[above] += below[node]
                largest_part[above] = max(largest_part[above], below[node])
    best, best_part = -1, size
    for node in range(nodes):
        if label[node] == wanted:
            part = max(largest_part[node], size - 1 - cut[node])
            if part < best_part:
                best, best_part = node, part
    return best, best_part


@compiled
def _separate(words, transposed, rows, cols, limit, most):
    """Greedy separator; see `hubs`."""
    removed = np.zeros(rows + cols, np.bool_)
    degree = np.empty(rows + cols, np.int64)
    for node in range(rows + cols):
        degree[node] = _degree(node, words, transposed, rows, removed)
    if degree.sum() > _DENSE * (rows + cols):
        removed[np.argsort(-degree)[:most]] = True
        _label, size = _components(words, transposed, rows, cols, removed)
        if size.shape[0] and size.max() > limit:
            return removed, False
        removed[:] = False
    order = np.empty(most, np.int64)
    taken = 0
    while True:
        label, size = _components(words, transposed, rows, cols, removed)
        largest = size.argmax() if size.shape[0] else -1
        if largest < 0 or size[largest] <= limit:
            break
        if taken == most:
            return removed, False
        node, part = _best_cut(words, transposed, rows, cols, label, largest, size[largest])
        if part * 10 > size[largest] * 9:
            most_edges = -1
            for candidate in range(rows + cols):
                if label[candidate] == largest:
                    edges = _degree(candidate, words, transposed, rows, removed)
                    if edges > most_edges:
                        node, most_edges = candidate, edges
        removed[node] = True
        order[taken] = node
        taken += 1
    for i in range(taken):
        removed[order[i]] = False
        _label, size = _components(words, transposed, rows, cols, removed)
        if size.shape[0] and size.max() > limit:
            removed[order[i]] = True
    return removed, True
