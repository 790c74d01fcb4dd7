"""Compiled passes over the entries of a matrix that an earlier pass has marked, one bit for each entry.

The conventions are those of `kernels`.
"""

from __future__ import annotations

import numpy as np

from crystallite.core.parallel import compiled
from crystallite.structure.kernels import NO_ROOT, ONE, bits_of, find, inlined, join_columns, limit_of
from crystallite.structure.lanes import LANES, lowest_bit

__all__ = ["link_marked"]

_ROWS_ASKED = 8


@compiled
def _listed(marks, settled, places, columns):
    """List the columns that are marked: two of those that are settled, all that are not.

    Without branches where it can be: which words have a bit cannot be predicted. Returns how many of both kinds.
    """
    count = used = 0
    for k in range(marks.shape[0]):
        word = marks[k] & settled[k]
        while word and count < 2:
            columns[count] = k * LANES + lowest_bit(word)
            count += 1
            word &= word - ONE
        if count == 2:
            break
    few = count
    for k in range(marks.shape[0]):
        places[used] = k
        used += (marks[k] & ~settled[k]) != 0
    for i in range(used):
        k = places[i]
        word = marks[k] & ~settled[k]
        while word:
            columns[count] = k * LANES + lowest_bit(word)
            count += 1
            word &= word - ONE
    return few, count


@inlined
def _settled_survivor(row, marks, settled, mask, threshold):
    """A column of a word that is settled and survives in a row, or −1."""
    for k in range(marks.shape[0]):
        word = marks[k] & settled[k]
        while word:
            column = k * LANES + lowest_bit(word)
            word &= word - ONE
            if bits_of(row, column, mask) >= limit_of(threshold, column):
                return column
    return -1


@compiled
def link_marked(block, first_row, mask, threshold, words, anchor, parent, common, settled):
    """`link_columns` for rows of finite entries whose candidates are marked: only these are looked at.

    words: bit j % 64 of words[row, j // 64] is set at least where entry (row, j) survives. settled: bits of columns
    that are in the common set, of which a row needs only one that survives. Candidates lie far apart in memory, so
    those of some rows are all asked for before the first is needed.
    """
    rows, cols = block.shape
    settled_then = settled.copy()
    columns, ends = np.empty((_ROWS_ASKED, cols + 2), np.int32), np.empty((_ROWS_ASKED, 2), np.int64)
    places, passes = np.empty(words.shape[1], np.int32), np.empty((_ROWS_ASKED, cols + 2), np.bool_)
    for begin in range(0, rows, _ROWS_ASKED):
        asked = min(_ROWS_ASKED, rows - begin)
        settled_then[:] = settled
        for i in range(asked):
            ends[i] = _listed(words[first_row + begin + i], settled, places, columns[i])
        for i in range(asked):
            row = block[begin + i]
            for j in range(ends[i, 1]):
                column = columns[i, j]
                passes[i, j] = bits_of(row, column, mask) >= limit_of(threshold, column)
        for i in range(asked):
            root = NO_ROOT
            for j in range(ends[i, 1]):
                if passes[i, j] and (root < 0 or parent[columns[i, j]] != root):
                    root = join_columns(ONE, columns[i, j], root, parent)
            if ends[i, 0] == 2 and not (passes[i, 0] or passes[i, 1]):
                row, marks = block[begin + i], words[first_row + begin + i]
                column = _settled_survivor(row, marks, settled_then, mask, threshold)
                root = join_columns(ONE, column, root, parent) if column >= 0 else root
            if root < 0:
                continue
            anchor[first_row + begin + i] = root
            if common[0] >= 0 and find(parent, common[0]) == root:
                common[1] += 1
                for j in range(ends[i, 0], ends[i, 1]):
                    if passes[i, j]:
                        settled[columns[i, j] // LANES] |= ONE << np.uint64(columns[i, j] % LANES)
            elif common[1] > 0:
                common[1] -= 1
            else:
                common[0], common[1] = root, LANES
                settled[:] = 0
