"""Products of blocks in compiled code, without the interpreter lock, on the weights where they lie.

Own code because PyTorch has no product that reads scattered inputs: gathering them first costs what the blocks save.

Many samples run in panels, (panels, features, numbers of a cache line): a line is one feature of as many samples as fit
into it. A shuffle of features then moves whole lines, a weight meets all samples of a line in one instruction, and
panels are independent from the first layer to the last. Few samples run row by row.

All layers run in one call, by a team of threads that claim parts of the work (`teamwork`). The layers are rows of a
table `stages`, their stacks of equal blocks rows of a table `stacks`; arrays are named by their addresses.

Weights and biases may be of 16 bits: a few rows at a time become float32, in the cache or in registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import Any

import numpy as np

from crystallite.core.compiling import REGISTER_BITS, njit
from crystallite.operators.runtime.functions import erf, sigmoid, tanh
from crystallite.operators.runtime.instructions import (
    copy_line,
    copy_numbers,
    dot_rows,
    line_product,
    transpose_tile,
)
from crystallite.operators.runtime.wide_numbers import wide_rows, wide_vector
from crystallite.operators.runtime.work_sharing import array_at, claim, finish, member, wait
from crystallite.operators.runtime.work_sharing import part as _part

__all__ = ["ACTIVATIONS", "entry"]

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid")
_NONE, _RELU, _GELU, _GELU_TANH, _SILU, _TANH, _SIGMOID = range(len(ACTIVATIONS))
# the columns of the tables, and the arguments of a call
_FIRST, _LAST, _BIAS, _N_BIAS, _COLUMNS, _N_COLUMNS, _ACTIVATION, _ROWS, _MACS = range(9)
_ADDRESS, _BLOCKS, _HEIGHT, _DEPTH, _COLUMN, _ROW = range(6)
_STAGES, _N_STAGES, _STACKS, _N_STACKS, _PLACES, _N_PLACES, _OUT_BIAS, _N_OUT_BIAS = range(8)
_OUTPUTS, _FEATURES, _MOST, _X, _SAMPLES, _Y, _SCRATCH, _PARTS, _GROUP = range(8, 17)
_COUNTERS = 17  # zeros; they follow the arguments

_MOST_ROWS, _PANELS = (8, 2) if REGISTER_BITS == 512 else (6, 1)  # of a tile: as many sums as there are registers for
_dots4, _dots1, _long_dot = dot_rows(4, 2), dot_rows(1, 2), dot_rows(1, 8)  # the first two sum in the same order
_LONG = 256  # numbers of a row from which on rows are read one by one, in the order they lie: what prefetchers like
_CACHE = 1 << 17  # bytes of lines gathered at a time; they stay in the second-level cache while the weights pass
_LINE = 64  # bytes
_LANE_BYTES = REGISTER_BITS // 8
_LINES_TURNED = 4  # of a sample's outputs, written in one piece: rows 4096 bytes apart share a few places of the cache
_inlined = njit(nogil=True, inline="always")  # only called once: numba would compile it alone and again in its caller


@_part
def _lines(size, like):
    """Memory for so many numbers, from the beginning of a cache line on: a wide register would meet two lines else."""
    memory = np.empty(size + _LINE // like.itemsize, like.dtype)
    first = -memory.ctypes.data % _LINE // like.itemsize
    return memory[first : first + size]


@_part
def _to_panels(x, panels, low, high):
    """panels[p, j, i] = x[p·width + i, j] for features [low, high), and 0 past the last sample."""
    features, width = panels.shape[1:]
    lanes = _LANE_BYTES // x.itemsize
    numbers, lines = x.reshape(-1), panels.reshape(-1)
    for p in range(len(panels)):
        samples = min(width, len(x) - p * width)
        tiled = low + (high - low) // lanes * lanes if samples == width else low
        for first in range(low, tiled, width):
            for i in range(0, width, lanes):  # all of a line of x, one piece after the other
                for j in range(first, min(first + width, tiled), lanes):
                    transpose_tile(
                        numbers, (p * width + i) * features + j, features, lines, (p * features + j) * width + i, width
                    )
        for j in range(tiled, high):
            line = panels[p, j]
            for i in range(samples):
                line[i] = x[p * width + i, j]
            for i in range(samples, width):
                line[i] = 0


@_part
def _from_panels(panels, places, bias, y, low, high):
    """y[p·width + i, j] = panels[p, places[j], i] + bias[j] for outputs [low, high); past the last line is 0."""
    lines, width = panels.shape[1:]
    lanes, outputs, wide = _LANE_BYTES // y.itemsize, y.shape[1], _LINES_TURNED * width
    numbers, zero = y.reshape(-1), panels.dtype.type(0)
    some, turned = _lines(wide * width, panels).reshape(wide, width), _lines(width * wide, panels)
    together = some.reshape(-1)
    for p in range(len(panels)):
        samples = min(width, len(y) - p * width)
        for first in range(low, high, wide):
            count = min(wide, high - first)
            for j in range(count):
                place = places[first + j] if len(places) else first + j
                add = bias[first + j] if len(bias) else zero
                if place < lines:
                    copy_line(panels, p * lines + place, add, some, j)
                else:
                    for i in range(width):
                        some[j, i] = add
            for i in range(0, width, lanes):
                for j in range(0, count, lanes):
                    transpose_tile(together, j * width + i, width, turned, i * wide + j, wide)
            for i in range(samples):
                copy_numbers(turned, i * wide, count, zero, numbers, (p * width + i) * outputs + first)


@_part
def _take_rows(state, places, bias, y, low, high):
    """y[i, j] = state[i, places[j]] + bias[j] for outputs [low, high); a place past the last column is 0."""
    width, zero = state.shape[1], state.dtype.type(0)
    for i in range(len(y)):
        row, out = state[i], y[i]
        if len(places) and len(bias):
            for j in range(low, high):  # without branches
                value = row[min(places[j], width - 1)]
                out[j] = (value if places[j] < width else zero) + bias[j]
        else:
            for j in range(low, high):
                place = places[j] if len(places) else j
                add = bias[j] if len(bias) else zero
                out[j] = row[place] + add if place < width else add


@_part
def _activate(numbers, activation):
    """numbers = σ(numbers), in place."""
    one, half = numbers.dtype.type(1), numbers.dtype.type(0.5)
    if activation == _GELU:
        scale = numbers.dtype.type(math.sqrt(0.5))
        for i in range(len(numbers)):
            numbers[i] = half * numbers[i] * (one + erf(numbers[i] * scale))
    elif activation == _GELU_TANH:
        scale, cubic = numbers.dtype.type(math.sqrt(2 / math.pi)), numbers.dtype.type(0.044715)
        for i in range(len(numbers)):
            x = numbers[i]
            numbers[i] = half * x * (one + tanh(scale * (x + cubic * x * x * x)))
    elif activation == _SILU:
        for i in range(len(numbers)):
            numbers[i] = numbers[i] * sigmoid(numbers[i])
    elif activation == _TANH:
        for i in range(len(numbers)):
            numbers[i] = tanh(numbers[i])
    elif activation == _SIGMOID:
        for i in range(len(numbers)):
            numbers[i] = sigmoid(numbers[i])


def _rows_of_panels(rows):
    """Compiled f(weight, row, bias, relu, lines, first, out, place): so many rows of all panels."""
    several, one = line_product(rows, _PANELS), line_product(rows, 1)

    @_part
    def product(weight, row, bias, relu, lines, first, out, place):
        whole = len(out) - len(out) % _PANELS
        for p in range(0, whole, _PANELS):
            several(weight, row, bias, relu, lines, p, first, out, place)
        for p in range(whole, len(out)):
            one(weight, row, bias, relu, lines, p, first, out, place)

    return product


_most, _four, _two, _one = (_rows_of_panels(rows) for rows in (_MOST_ROWS, 4, 2, 1))


@_part
def _tiles(weight, low, high, bias, relu, lines, first, out, place, buffer):
    """Rows [low, high) of one block; row 0 would be written to `place`. A few rows of weights serve all panels."""
    row = low
    while row < high:
        if row + _MOST_ROWS <= high and (_MOST_ROWS == 8 or row + 8 != high):
            some, begin = wide_rows(weight, row, _MOST_ROWS, buffer)
            _most(some, begin, bias, relu, lines, first, out, place + row)
            row += _MOST_ROWS
        elif row + 4 <= high:
            some, begin = wide_rows(weight, row, 4, buffer)
            _four(some, begin, bias, relu, lines, first, out, place + row)
            row += 4
        elif row + 2 <= high:
            some, begin = wide_rows(weight, row, 2, buffer)
            _two(some, begin, bias, relu, lines, first, out, place + row)
            row += 2
        else:
            some, begin = wide_rows(weight, row, 1, buffer)
            _one(some, begin, bias, relu, lines, first, out, place + row)
            row += 1


@_part
def _panel_products(weight, low, high, bias, activation, lines, columns, first, out, place):
    """Lines of out = σ(block @ lines + bias) for rows [low, high) of a stack of blocks, (blocks, rows, columns).

    The lines a block reads are consecutive, or named by `columns`; those of the first block begin at `first`. What
    row 0 of the stack gives is written to `place`, where its bias lies too.
    """
    _, height, depth = weight.shape
    width = out.shape[2]
    relu = activation == _RELU
    step = max(1, min(len(out), _CACHE // max(1, depth * _LINE)))
    gathered = _lines((step if len(columns) else 0) * depth * width, out).reshape(-1, depth, width)
    buffer = np.empty((_MOST_ROWS if weight.itemsize < out.itemsize else 0, depth), out.dtype)
    zero = out.dtype.type(0)
    for start in range(0, len(out), step):
        stop = min(start + step, len(out))
        for block in range(low // height, (high + height - 1) // height):
            begin, end = max(low, block * height) - block * height, min(high - block * height, height)
            into = place + block * height
            read, reads = lines[start:stop], first + block * depth
            if len(columns):
                for p in range(start, stop):
                    for j in range(depth):
                        copy_line(
                            lines, p * lines.shape[1] + columns[reads + j], zero, gathered, (p - start) * depth + j
                        )
                read, reads = gathered, 0
            _tiles(weight[block], begin, end, bias, relu, read, reads, out[start:stop], into, buffer)
    if activation > _RELU:
        for p in range(len(out)):
            _activate(out[p, place + low : place + high].reshape(-1), activation)


@_part
def _row_products(weight, low, high, bias, activation, state, columns, first, out, place):
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
                line[j] = 0 if activation == _RELU and value < 0 else value
    if activation > _RELU:
        for i in range(len(out)):
            _activate(out[i, place + low : place + high], activation)


def _share_of(products):
    """Compiled f(stage, stacks, part, parts, state, out, kind) by these products."""

    @_part
    def share(stage, stacks, part, parts, state, out, kind):
        """One of so many equal parts of a layer's multiply-adds; its weights and bias are of a kind."""
        numbers = out.reshape(-1)
        bias = wide_vector(array_at(stage[_BIAS], stage[_N_BIAS], kind), numbers)
        columns = array_at(stage[_COLUMNS], stage[_N_COLUMNS], stage)
        macs, activation = stage[_MACS], stage[_ACTIVATION]
        before = 0
        for i in range(stage[_FIRST], stage[_LAST]):
            blocks, height, depth = stacks[i, _BLOCKS], stacks[i, _HEIGHT], stacks[i, _DEPTH]
            low, high = (0, blocks * height) if part == 0 else (0, 0)  # of dormant rows: they go to the first
            if depth:
                low = min(max((macs * part // parts - before) // depth, 0), blocks * height)
                high = min(max((macs * (part + 1) // parts - before) // depth, 0), blocks * height)
            if low < high:
                weight = array_at(stacks[i, _ADDRESS], blocks * height * depth, kind).reshape(blocks, height, depth)
                products(weight, low, high, bias, activation, state, columns, stacks[i, _COLUMN], out, stacks[i, _ROW])
            before += blocks * height * depth

    return share


_panel_share, _row_share = _share_of(_panel_products), _share_of(_row_products)


@_part
def _bounds(total, part, parts, unit):
    """Where a part of [0, total) begins and ends, at multiples of a unit."""
    units = (total + unit - 1) // unit
    return units * part // parts * unit, min(units * (part + 1) // parts * unit, total)


@_inlined
def _by_rows(stages, stacks, kind, places, bias, x, y, scratch, counters, parts):
    """Few samples: each layer in parts, which the team shares, and then the next."""
    samples, half = len(x), len(scratch) // 2
    state = x
    for s in range(len(stages)):
        begin = s % 2 * half
        out = scratch[begin : begin + samples * stages[s, _ROWS]].reshape(samples, stages[s, _ROWS])
        part = claim(counters, s)
        while part < parts:
            _row_share(stages[s], stacks, part, parts, state, out, kind)
            finish(counters, s)
            part = claim(counters, s)
        wait(counters, s, parts)
        state = out
    part = claim(counters, len(stages))
    while part < parts:
        low, high = _bounds(y.shape[1], part, parts, 16)
        _take_rows(state, places, bias, y, low, high)
        part = claim(counters, len(stages))


@_inlined
def _by_layers(stages, stacks, kind, places, bias, x, y, scratch, counters, parts):
    """Few panels: each layer in parts, which the team shares, and then the next."""
    width = _LINE // scratch.itemsize
    panels, half, unit = (len(x) + width - 1) // width, len(scratch) // 2, width // 2
    features, count = x.shape[1], len(stages)
    state = scratch[half : half + panels * features * width].reshape(panels, features, width)
    part = claim(counters, count)
    while part < parts:
        low, high = _bounds(features, part, parts, unit)
        _to_panels(x, state, low, high)
        finish(counters, count)
        part = claim(counters, count)
    wait(counters, count, parts)
    for s in range(count):
        begin, rows = s % 2 * half, stages[s, _ROWS]
        out = scratch[begin : begin + panels * rows * width].reshape(panels, rows, width)
        part = claim(counters, s)
        while part < parts:
            _panel_share(stages[s], stacks, part, parts, state, out, kind)
            finish(counters, s)
            part = claim(counters, s)
        wait(counters, s, parts)
        state = out
    part = claim(counters, count + 1)
    while part < parts:
        low, high = _bounds(y.shape[1], part, parts, unit)
        _from_panels(state, places, bias, y, low, high)
        part = claim(counters, count + 1)


@_inlined
def _by_panels(stages, stacks, kind, places, bias, x, y, most, counters, group):
    """Many panels: each thread takes some of them, whose state fits into its cache, through all layers."""
    width = _LINE // x.itemsize
    panels, features = (len(x) + width - 1) // width, x.shape[1]
    groups = (panels + group - 1) // group
    number = claim(counters, 0)
    begin, end = _bounds(features, 0, 1, 1)
    size = (group if number < groups else 0) * most * width
    here, there = _lines(size, x), _lines(size, x)
    while number < groups:
        count = min(group, panels - number * group)
        first, last = number * group * width, min((number * group + count) * width, len(x))
        state = here[: count * features * width].reshape(count, features, width)
        _to_panels(x[first:last], state, begin, end)
        for s in range(len(stages)):
            out = there[: count * stages[s, _ROWS] * width].reshape(count, stages[s, _ROWS], width)
            _panel_share(stages[s], stacks, begin, begin + 1, state, out, kind)
            state = out
            here, there = there, here
        _from_panels(state, places, bias, y[first:last], begin, y.shape[1])
        number = claim(counters, 0)


def entry(number: Any, stored: Any) -> Any:
    """The compiled function of a team's member for arrays of numbers of this kind, weights and biases of another:
    (address of its arguments) → nothing.

    parts: into how many a layer is cut for the team; 0: members take panels through all layers. group: how many at a
    time; 0: few samples, row by row, where one member alone needs no memory to share (address 0).
    """

    def run(arguments):
        given = array_at(arguments, _COUNTERS, np.empty(0, np.int64))
        like, kind = np.empty(0, number), np.empty(0, stored)
        stages = array_at(given[_STAGES], given[_N_STAGES] * 9, given).reshape(-1, 9)
        stacks = array_at(given[_STACKS], given[_N_STACKS] * 6, given).reshape(-1, 6)
        places = array_at(given[_PLACES], given[_N_PLACES], given)
        bias = wide_vector(array_at(given[_OUT_BIAS], given[_N_OUT_BIAS], kind), like)
        samples, most, parts, group = given[_SAMPLES], given[_MOST], given[_PARTS], given[_GROUP]
        features, outputs = given[_FEATURES], given[_OUTPUTS]
        x = array_at(given[_X], samples * features, like).reshape(samples, features)
        y = array_at(given[_Y], samples * outputs, like).reshape(samples, outputs)
        counters = array_at(arguments + 8 * _COUNTERS, 2 * len(stages) + 4, given)
        width = _LINE // like.itemsize
        if parts == 0:
            _by_panels(stages, stacks, kind, places, bias, x, y, most, counters, group)
        elif group == 0:
            scratch = array_at(given[_SCRATCH], 2 * samples * most, like)
            if given[_SCRATCH] == 0:
                scratch = np.empty(2 * samples * most, number)
            _by_rows(stages, stacks, kind, places, bias, x, y, scratch, counters, parts)
        else:
            scratch = array_at(given[_SCRATCH], 2 * ((samples + width - 1) // width) * most * width, like)
            _by_layers(stages, stacks, kind, places, bias, x, y, scratch, counters, parts)

    return member(run)
