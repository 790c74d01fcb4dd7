"""Compiled passes over a matrix. Each reads a block of rows once, 64 entries at a time.

Own code because `scipy.sparse.csgraph` needs the survivors as a sparse matrix first, which takes many times as long.

Conventions: `block` holds magnitudes as unsigned integers (see `core.arrays`), `mask` clears the sign (and is itself
signed where it does, see `lanes`),
`threshold` is the smallest surviving pattern (one number, or one per column), `infinity` the first pattern that is
not a finite number, or 0 where every pattern is one. A pass returns the first row it met with a non-finite entry,
or −1.

Union-find forests are int32 arrays: `parent[node] == node` at a root; −1 marks a node not seen yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from crystallite.core.compiling import njit, overload, types
from crystallite.core.parallel import compiled
from crystallite.structure.lanes import LANES, any_lane, bit_count, lowest_bit, surviving_lanes, unsettled_lanes

__all__ = [
    "best_links",
    "collect_survivors",
    "count_survivors",
    "find",
    "flatten_forest",
    "join_columns",
    "link_columns",
    "merge_forest",
    "pack_survivors",
]

inlined = njit(
    nogil=True, inline="always"
)  # a call would count references to its arrays, which costs more than the work
ONE = np.uint64(1)
NO_ROOT = np.int32(-2)  # unlike −1, equal to no entry of a forest


@inlined
def bits_of(row, column, mask):
    """The magnitude pattern of one entry, unsigned."""
    return np.uint64(row[column]) & np.uint64(mask)


def limit_of(threshold: Any, column: int) -> Any:
    """The threshold that holds in a column."""
    return threshold[column] if isinstance(threshold, np.ndarray) else threshold


@overload(limit_of)
def _limit_of(threshold, column):  # unannotated: numba compares the signatures
    if isinstance(threshold, types.Array):
        return lambda threshold, column: threshold[column]
    return lambda threshold, column: threshold


@inlined
def _last_word(row, start, mask, threshold):
    """Bits of the surviving columns from `start` to the end of the row, fewer than 64."""
    word = np.uint64(0)
    for column in range(start, row.shape[0]):
        if bits_of(row, column, mask) >= limit_of(threshold, column):
            word |= ONE << np.uint64(column - start)
    return word


@inlined
def _any_non_finite(row, start, mask, infinity):
    """Whether the row holds a non-finite entry from `start` to its end."""
    found = False
    for column in range(start, row.shape[0]):
        found |= bits_of(row, column, mask) >= infinity
    return found and infinity != 0


@inlined
def find(parent, node):
    """Root of a node, halving the path on the way."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@inlined
def join_columns(word, start, root, parent):
    """Put the columns of a word into the set of `root`, or start a set; returns the set's root."""
    while word:
        column = np.int32(start + lowest_bit(word))
        word &= word - ONE
        if parent[column] < 0:
            parent[column] = column
        other = find(parent, column)
        if root < 0:
            root = other
        elif other < root:
            parent[root] = other
            root = other
        else:
            parent[other] = root
        parent[column] = root
    return root


@inlined
def _settle(word, start, infinity, limits, floor):
    """Put the columns of a word out of reach, and say what the others of the 64 begin at."""
    while word:
        limits[start + lowest_bit(word)] = infinity
        word &= word - ONE
    least = infinity
    for column in range(start, start + LANES):
        least = min(least, limits[column])
    floor[start // LANES] = least


@compiled
def link_columns(block, first_row, mask, threshold, infinity, anchor, parent, common, limits, floor):
    """Join the columns that survive together in a row.

    Rows need no nodes of their own: anchor[row] is one column of the row's set, or −1 where nothing survives.
    Columns already in the row's set are dropped 64 at a time, so that once a block has formed its survivors cost
    no more than the entries that do not survive, and the branch on what is left is well predicted.

    Most rows are often in one set, the common one. Columns that are known to be in it, too, have infinity as their
    threshold in `limits`, and floor is the smallest of each 64 of these: mostly a row of the set is compared with that
    alone, and neither thresholds nor parents are read. common: a column of the set that most rows were in so far (−1:
    none yet), and by how many rows (the vote of Boyer and Moore; a set begins with some, as changing it costs a row).
    """
    rows, cols = block.shape
    whole = cols - cols % LANES
    ceiling = infinity if infinity else mask
    for r in range(rows):
        row = block[r]
        root, home = NO_ROOT, np.int32(-1)
        if infinity and common[0] >= 0:
            home = find(parent, common[0])
        for start in range(0, whole, LANES):
            if root == home:
                if not any_lane(row, start, mask, floor[start // LANES]):
                    continue
                word = surviving_lanes(row, start, mask, limits)
            elif root == NO_ROOT:
                if not any_lane(row, start, mask, threshold):
                    continue
                word = surviving_lanes(row, start, mask, threshold)
            else:
                word = unsettled_lanes(row, start, mask, threshold, ceiling, parent, root)
            if word:
                if infinity and any_lane(row, start, mask, infinity):
                    return first_row + r
                root = join_columns(word, start, root, parent)
                if home >= 0:
                    home = find(parent, common[0])
                    if root == home:
                        _settle(word, start, infinity, limits, floor)
        root = join_columns(_last_word(row, whole, mask, threshold), whole, root, parent)
        if _any_non_finite(row, whole, mask, infinity):
            return first_row + r
        if root < 0:
            continue
        anchor[first_row + r] = root
        if home >= 0 and find(parent, common[0]) == root:
            common[1] += 1
        elif common[1] > 0:
            common[1] -= 1
        else:
            common[0], common[1] = root, LANES
            limits[:] = threshold
            for start in range(0, whole, LANES):
                _settle(np.uint64(0), start, infinity, limits, floor)
    return -1


@compiled
def merge_forest(parent, other):
    """Add the joins of one forest to another over the same nodes."""
    for node in range(parent.shape[0]):
        if other[node] < 0:
            continue
        if parent[node] < 0:
            parent[node] = node
        if parent[other[node]] < 0:
            parent[other[node]] = other[node]
        a = find(parent, node)
        b = find(parent, other[node])
        if a < b:
            parent[b] = a
        else:
            parent[a] = b


@compiled
def flatten_forest(parent):
    """Every seen node points at its root."""
    for node in range(parent.shape[0]):
        if parent[node] >= 0:
            parent[node] = find(parent, node)


@compiled
def count_survivors(block, first_row, mask, threshold, infinity):
    """How many entries survive; returns (count, bad row)."""
    rows, cols = block.shape
    whole = cols - cols % LANES
    count = 0
    for r in range(rows):
        row = block[r]
        bad = np.uint64(0)
        for start in range(0, whole, LANES):
            count += bit_count(surviving_lanes(row, start, mask, threshold))
            if infinity:
                bad |= surviving_lanes(row, start, mask, infinity)
        count += bit_count(_last_word(row, whole, mask, threshold))
        if bad or _any_non_finite(row, whole, mask, infinity):
            return count, first_row + r
    return count, -1


@compiled
def pack_survivors(block, first_row, mask, threshold, infinity, words):
    """Bit matrix of the survivors: bit j % 64 of words[row, j // 64] is set where entry (row, j) survives."""
    rows, cols = block.shape
    whole = cols - cols % LANES
    for r in range(rows):
        row = block[r]
        bad = np.uint64(0)
        for start in range(0, whole, LANES):
            words[first_row + r, start // LANES] = surviving_lanes(row, start, mask, threshold)
            if infinity:
                bad |= surviving_lanes(row, start, mask, infinity)
        if whole < cols:
            words[first_row + r, whole // LANES] = _last_word(row, whole, mask, threshold)
        if bad or _any_non_finite(row, whole, mask, infinity):
            return first_row + r
    return -1


@inlined
def _append(word, start, row_index, row, mask, out_rows, out_cols, out_bits, count):
    while word:
        column = start + lowest_bit(word)
        word &= word - ONE
        if count < out_rows.shape[0]:
            out_rows[count] = row_index
            out_cols[count] = column
            out_bits[count] = bits_of(row, column, mask)
        count += 1
    return count


@compiled
def collect_survivors(block, first_row, mask, threshold, infinity, out_rows, out_cols, out_bits, count):
    """Append positions and patterns of the survivors; returns (count, bad row), the count going on past a full buffer.

    Non-finite entries are the largest patterns of all, so they are among the survivors.
    """
    rows, cols = block.shape
    whole = cols - cols % LANES
    for r in range(rows):
        row = block[r]
        before = count
        for start in range(0, whole, LANES):
            word = surviving_lanes(row, start, mask, threshold)
            if word:
                count = _append(word, start, first_row + r, row, mask, out_rows, out_cols, out_bits, count)
        word = _last_word(row, whole, mask, threshold)
        count = _append(word, whole, first_row + r, row, mask, out_rows, out_cols, out_bits, count)
        for e in range(before, min(count, out_bits.shape[0])):
            if infinity and out_bits[e] >= infinity:
                return count, first_row + r
        if count > out_rows.shape[0]:
            return out_rows.shape[0] + 1, -1
    return count, -1


@inlined
def _offer(word, start, row_index, row, mask, mine, giant, label, needs, best_bits, best_row, best_col):
    """Let the set of the row and the sets of the columns in a word take the edges that beat their best."""
    while word:
        column = start + lowest_bit(word)
        word &= word - ONE
        other = label[column]
        if other == mine:
            continue
        bits = bits_of(row, column, mask)
        if other != giant:
            if bits > best_bits[other]:
                best_bits[other] = bits
                best_row[other] = row_index
                best_col[other] = column
            needs[column] = best_bits[other] + ONE
        if mine != giant and bits > best_bits[mine]:
            best_bits[mine] = bits
            best_row[mine] = row_index
            best_col[mine] = column


@compiled
def best_links(block, first_row, mask, label, giant, outside_cols, needs, best_bits, best_row, best_col):
    """Heaviest edge out of every set except the giant one; the first in reading order where weights tie.

    label: set of every column, then of every row. needs: what an entry of a column must reach to beat the best edge of
    the column's set so far, out of reach for columns of the giant set. A running maximum is beaten O(log) times, so
    nearly all words of 64 entries are empty. Rows of the giant set need only the columns outside it.
    """
    rows, cols = block.shape
    whole = cols - cols % LANES
    few_columns = outside_cols.shape[0] * 16 < cols  # fewer cache lines than a row has
    for r in range(rows):
        row = block[r]
        mine = label[cols + first_row + r]
        if mine == giant and few_columns:
            for column in outside_cols:
                if bits_of(row, column, mask) >= needs[column]:
                    _offer(
                        ONE, column, first_row + r, row, mask, mine, giant, label, needs, best_bits, best_row, best_col
                    )
            continue
        for start in range(0, cols, LANES):
            if start < whole:
                word = surviving_lanes(row, start, mask, needs)
                if mine != giant:
                    word |= surviving_lanes(row, start, mask, best_bits[mine] + ONE)
            else:
                word = _last_word(row, whole, mask, needs)
                if mine != giant:
                    word |= _last_word(row, whole, mask, best_bits[mine] + ONE)
            if word:
                _offer(word, start, first_row + r, row, mask, mine, giant, label, needs, best_bits, best_row, best_col)
