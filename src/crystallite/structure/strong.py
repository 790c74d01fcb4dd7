"""Strongly connected components of a thresholded square matrix: the graph engine for feedback matrices.

One pass packs the survivors into a bit matrix (1/32 of float32 weights); everything after works on its words, so a
depth-first search over n nodes costs n²/64 word operations however many edges there are.
"""

from __future__ import annotations

import numpy as np

from crystallite.core.arrays import Magnitudes
from crystallite.core.parallel import compiled, over_rows
from crystallite.structure.components import kernel_arguments, refuse_non_finite
from crystallite.structure.kernels import find, inlined, pack_survivors
from crystallite.structure.lanes import LANES, lowest_bit

__all__ = ["bit_of", "condense", "layers_and_weak_components", "packed", "strong_components", "unpacked"]

_ONE = np.uint64(1)
_SIX_BITS = np.uint64(63)


def packed(matrix: Magnitudes, threshold: int | np.ndarray, name: str = "matrix") -> np.ndarray:
    """Bit matrix (rows, ⌈cols/64⌉) of the entries ≥ threshold."""
    rows, cols = matrix.shape
    mask, limit, infinity = kernel_arguments(matrix, threshold)
    words = np.zeros((rows, -(-cols // LANES)), np.uint64)

    def pack(_thread: int, first_row: int, block: np.ndarray) -> None:
        refuse_non_finite(matrix, pack_survivors(block, first_row, mask, limit, infinity, words), name)

    over_rows(matrix, pack)
    return words


def unpacked(words: np.ndarray, cols: int) -> np.ndarray:
    """The bit matrix as a Boolean array."""
    little_endian = words.astype("<u8", copy=False).view(np.uint8)
    return np.unpackbits(little_endian, axis=1, bitorder="little")[:, :cols].astype(bool)


@inlined
def bit_of(node):
    """The bit of a node in its word."""
    return _ONE << (np.uint64(node) & _SIX_BITS)


@compiled
def strong_components(words):
    """Component of every node, numbered so that a component comes after all it depends on.

    words[i] holds the predecessors of i (the paper's W(i, j) ≠ 0 ⇔ j → i). Gabow's path-based search, without
    recursion: `path` are the nodes not yet assigned, `bounds` where each candidate component begins on it.
    """
    nodes, width = words.shape
    component = np.full(nodes, -1, np.int32)
    place = np.full(nodes, -1, np.int32)  # position on the path
    unvisited = np.zeros(width, np.uint64)
    on_path = np.zeros(width, np.uint64)
    path = np.empty(nodes, np.int32)
    bounds = np.empty(nodes, np.int32)
    frames = np.empty(nodes, np.int32)  # the search stack: nodes, and the next word of each
    next_word = np.zeros(nodes, np.int32)
    for node in range(nodes):
        unvisited[node // LANES] |= bit_of(node)
    count = 0
    for start in range(nodes):
        if place[start] >= 0:
            continue
        path_length, bound_count, depth = 0, 0, 0
        descend = start
        while True:
            if descend >= 0:
                place[descend] = path_length
                path[path_length] = descend
                bounds[bound_count] = path_length
                frames[depth] = descend
                path_length += 1
                bound_count += 1
                depth += 1
                unvisited[descend // LANES] &= ~bit_of(descend)
                on_path[descend // LANES] |= bit_of(descend)
                descend = -1
            node = frames[depth - 1]
            k = next_word[node]
            while k < width:
                word = words[node, k]
                fresh = word & unvisited[k]
                if fresh:
                    descend = k * LANES + lowest_bit(fresh)
                    break
                if bounds[bound_count - 1] > 0:  # else the whole path is one candidate already
                    word &= on_path[k]
                    while word:
                        other = place[k * LANES + lowest_bit(word)]
                        word &= word - _ONE
                        while bounds[bound_count - 1] > other:
                            bound_count -= 1
                k += 1
            next_word[node] = k
            if descend >= 0:
                continue
            depth -= 1
            if bounds[bound_count - 1] == place[node]:
                bound_count -= 1
                while path_length > place[node]:
                    path_length -= 1
                    member = path[path_length]
                    component[member] = count
                    on_path[member // LANES] &= ~bit_of(member)
                count += 1
            if depth == 0:
                break
    return component, count


@compiled
def condense(words, component, count, largest):
    """Bit matrix of the condensation (the paper's M_C): bit q of row p is set where q → p and p ≠ q.

    Edges into and out of the `largest` component are handled by the word, not one by one.
    """
    nodes, width = words.shape
    condensed = np.zeros((count, (count + LANES - 1) // LANES), np.uint64)
    inside = np.zeros(width, np.uint64)
    for node in range(nodes):
        if component[node] == largest:
            inside[node // LANES] |= bit_of(node)
    for node in range(nodes):
        mine = component[node]
        touches_largest = False
        for k in range(width):
            word = words[node, k]
            if word & inside[k]:
                touches_largest = True
                word &= ~inside[k]
            while word:
                other = component[k * LANES + lowest_bit(word)]
                word &= word - _ONE
                if other != mine:
                    condensed[mine, other // LANES] |= bit_of(other)
        if touches_largest and mine != largest:
            condensed[mine, largest // LANES] |= bit_of(largest)
    return condensed


@compiled
def layers_and_weak_components(condensed, order):
    """Layer of each component (sources are 0) and the root of its weakly connected set; `order` is topological."""
    count, width = condensed.shape
    layer = np.zeros(count, np.int32)
    parent = np.arange(count).astype(np.int32)
    for p in order:
        for k in range(width):
            word = condensed[p, k]
            while word:
                q = k * LANES + lowest_bit(word)
                word &= word - _ONE
                layer[p] = max(layer[p], layer[q] + 1)
                a = find(parent, np.int32(p))
                b = find(parent, np.int32(q))
                if a < b:
                    parent[b] = a
                else:
                    parent[a] = b
    for p in range(count):
        parent[p] = find(parent, np.int32(p))
    return layer, parent
