"""Products of blocks in compiled code, without the interpreter lock, on the weights where they lie.

Many samples run in panels, (panels, features, numbers of a cache line): a line is one feature of as many samples as fit
into it. A shuffle of features then moves whole lines, a weight meets all samples of a line in one instruction, and
panels are independent from the first layer to the last. Few samples run row by row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import njit

from crystallite.operators.instructions import copy_line, dot_rows, line_product, transpose_tile
from crystallite.parallel import compiled

__all__ = ["from_panels", "panel_products", "row_products", "take_rows", "to_panels"]

_lines6, _lines4, _lines2, _lines1 = (line_product(rows) for rows in (6, 4, 2, 1))
_dots4, _dots1, _long_dot = dot_rows(4, 2), dot_rows(1, 2), dot_rows(1, 8)  # the first two sum in the same order
_LONG = 128  # numbers of a row from which on rows are read one by one, in the order they lie: what prefetchers like
_CACHE = 1 << 17  # bytes of lines gathered at a time; they stay in the second-level cache while the weights pass


@compiled
def to_panels(x, panels):
    """panels[p, j, i] = x[p·width + i, j], and 0 past the last sample."""
    features, width = panels.shape[1:]
    lanes = width // 2  # of a register: half a line
    numbers, lines = x.reshape(-1), panels.reshape(-1)
    for p in range(len(panels)):
        samples = min(width, len(x) - p * width)
        tiled = features // lanes * lanes if samples == width else 0
        for j in range(0, tiled, lanes):
            for i in range(0, width, lanes):
                transpose_tile(
                    numbers, (p * width + i) * features + j, features, lines, (p * features + j) * width + i, width
                )
        for j in range(tiled, features):
            line = panels[p, j]
            for i in range(samples):
                line[i] = x[p * width + i, j]
            for i in range(samples, width):
                line[i] = 0


@compiled
def from_panels(panels, places, bias, y):
    """y[p·width + i, j] = panels[p, places[j], i] + bias[j]; a place past the last line is 0."""
    lines, width = panels.shape[1:]
    lanes, outputs = width // 2, y.shape[1]
    numbers = y.reshape(-1)
    some = np.empty((lanes, width), panels.dtype)
    together = some.reshape(-1)
    for p in range(len(panels)):
        samples = min(width, len(y) - p * width)
        for first in range(0, outputs, lanes):
            count = min(lanes, outputs - first)
            for j in range(count):
                place = places[first + j] if len(places) else first + j
                add = bias[first + j] if len(bias) else panels.dtype.type(0)
                if place < lines:
                    copy_line(panels, p * lines + place, add, some, j)
                else:
                    for i in range(width):
                        some[j, i] = add
            if count == lanes and samples == width:
                for i in range(0, width, lanes):
                    transpose_tile(together, i, width, numbers, (p * width + i) * outputs + first, outputs)
            else:
                for i in range(samples):
                    for j in range(count):
                        y[p * width + i, first + j] = some[j, i]


@compiled
def take_rows(state, places, bias, y):
    """y[i, j] = state[i, places[j]] + bias[j]; a place past the last column is 0."""
    for i in range(len(y)):
        for j in range(y.shape[1]):
            place = places[j] if len(places) else j
            add = bias[j] if len(bias) else state.dtype.type(0)
            y[i, j] = state[i, place] + add if place < state.shape[1] else add


@njit(nogil=True)
def _tiles(weight, low, high, bias, relu, lines, first, out, place):
    """Rows [low, high) of one block; row 0 would be written to `place`. A few rows of weights serve all panels."""
    row = low
    while row < high:
        if row + 6 <= high and row + 8 != high:
            for p in range(len(out)):
                _lines6(weight, row, bias, relu, lines, p, first, out, place + row)
            row += 6
        elif row + 4 <= high:
            for p in range(len(out)):
                _lines4(weight, row, bias, relu, lines, p, first, out, place + row)
            row += 4
        elif row + 2 <= high:
            for p in range(len(out)):
                _lines2(weight, row, bias, relu, lines, p, first, out, place + row)
            row += 2
        else:
            for p in range(len(out)):
                _lines1(weight, row, bias, relu, lines, p, first, out, place + row)
            row += 1


@compiled
def panel_products(weight, low, high, bias, relu, lines, columns, first, out, place):
    """Lines of out = σ(block @ lines + bias) for rows [low, high) of a stack of blocks, (blocks, rows, columns).

    The lines a block reads are consecutive, or named by `columns`; those of the first block begin at `first`. What
    row 0 of the stack gives is written to `place`, where its bias lies too.
    """
    _, height, depth = weight.shape
    width = out.shape[2]
    step = max(1, min(len(out), _CACHE // max(1, depth * 64)))
    gathered = np.empty((step if len(columns) else 0, depth, width), out.dtype)
    zero = out.dtype.type(0)
    for start in range(0, len(out), step):
        stop = min(start + step, len(out))
        for block in range(low // height, (high + height - 1) // height):
            begin, end = max(low, block * height) - block * height, min(high - block * height, height)
            into = place + block * height
            reads = first + block * depth
            if len(columns):
                for p in range(start, stop):
                    for j in range(depth):
                        copy_line(
                            lines, p * lines.shape[1] + columns[reads + j], zero, gathered, (p - start) * depth + j
                        )
                _tiles(weight[block], begin, end, bias, relu, gathered, 0, out[start:stop], into)
            else:
                _tiles(weight[block], begin, end, bias, relu, lines[start:stop], reads, out[start:stop], into)


@compiled
def row_products(weight, low, high, bias, relu, state, columns, first, out, place):
    """The same for few samples: state and out are (samples, features)."""
    _, height, depth = weight.shape
    gathered = np.empty(depth if len(columns) else 0, out.dtype)
    for block in range(low // height, (high + height - 1) // height):
        begin, end = max(low, block * height) - block * height, min(high - block * height, height)
        into = place + block * height
        for i in range(len(out)):  # the block stays in the cache
            x, reads = state[i], first + block * depth
            if len(columns):
                for j in range(depth):
                    gathered[j] = x[columns[reads + j]]
                x, reads = gathered, 0
            line = out[i]
            row = begin
            while row < end:
                if depth >= _LONG:
                    _long_dot(weight[block], row, x, reads, line, into + row)
                    row += 1
                elif row + 4 <= end:
                    _dots4(weight[block], row, x, reads, line, into + row)
                    row += 4
                else:
                    _dots1(weight[block], row, x, reads, line, into + row)
                    row += 1
            for j in range(into + begin, into + end):
                value = line[j] + bias[j] if len(bias) else line[j]
                line[j] = 0 if relu and value < 0 else value
