"""Convolutions of blocks of channels in compiled code, without the interpreter lock.

Own code because grouped convolutions of PyTorch are slow where groups have few channels, and because channels would
have to be gathered before and put into order after them. Here a block reads its channels wherever they lie, into a
buffer padded with zeros, and writes its own where they belong.

Where the output has the size of the input, and registers can be loaded by a bit for each number (AVX-512), there is no
buffer: a place of the kernel is the same step from every position of the image, and a bit says whether it stays inside.

Positions of a buffer are numbered row by row, padding included: moving by a place of the kernel is then the same step
from every position, and a block is a product of its weights with shifted lines of the buffer. What it computes where a
line wraps around is not written. A team of threads claims strips of rows of blocks of samples.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np

from crystallite.core.compiling import REGISTER_BITS
from crystallite.operators.runtime.conv_instructions import inside_product, shifted_product
from crystallite.operators.runtime.instructions import copy_numbers
from crystallite.operators.runtime.work_sharing import array_at, claim, member
from crystallite.operators.runtime.work_sharing import part as _part

__all__ = ["ARGUMENTS", "SLACK", "STRIP", "TILE", "entry", "in_place_entry"]

ARGUMENTS = (
    "stacks", "n_stacks", "inputs", "n_inputs", "places", "n_places", "bias", "n_bias", "x", "y", "samples",
    "in_channels", "out_channels", "height", "width", "out_height", "out_width", "kernel_height", "kernel_width",
    "pad_height", "pad_width", "step_height", "step_width", "strip", "most_inputs", "most_outputs", "blocks", "inside",
    "n_inside", "counter",
)  # fmt: skip
"""Of a call, 64-bit numbers; arrays are addresses and lengths. strip: output rows at a time; counter: 0 at first."""
SLACK = 64  # numbers past the end of a buffer that may be read
_ADDRESS, _GROUPS, _HEIGHT, _DEPTH, _COLUMN, _ROW = range(6)  # of a stack: equal blocks; depth: input channels
(
    _STACKS, _N_STACKS, _INPUTS, _N_INPUTS, _PLACES, _N_PLACES, _BIAS, _N_BIAS, _X, _Y, _SAMPLES, _IN, _OUT, _H, _W,
    _OUT_H, _OUT_W, _KERNEL_H, _KERNEL_W, _PAD_H, _PAD_W, _STEP_H, _STEP_W, _STRIP, _MOST_IN, _MOST_OUT, _BLOCKS,
    _INSIDE, _N_INSIDE, _COUNTER,
) = range(len(ARGUMENTS))  # fmt: skip

_LANE_BYTES = REGISTER_BITS // 8
_four_3, _four_2, _four_1 = (shifted_product(4, vectors) for vectors in (3, 2, 1))
TILE, STRIP = 2, 240  # registers of positions: computed at once, and of a task
_eight, _four, _one = (inside_product(rows, TILE) for rows in (8, 4, 1))
_four_wide, _one_wide = (inside_product(rows, 3 * TILE) for rows in (4, 1))
_one_3, _one_2, _one_1 = (shifted_product(1, vectors) for vectors in (3, 2, 1))


@_part
def _step(steps, channels, area, kernel_height, down, kernel_width, right):
    """Where the places of a kernel lie in a buffer whose channels have so many positions, in the order of weights."""
    d = 0
    for c in range(channels):
        for i in range(kernel_height):
            for j in range(kernel_width):
                steps[d] = c * area + i * down + j * right
                d += 1


@_part
def _fill(x, channels, first_row, pad_height, pad_width, buffer):
    """buffer[c] = rows of channel channels[c] from `first_row` of the padded image on, with zeros around."""
    _, height, width = x.shape
    _, lines, pitch = buffer.shape
    zero = buffer.dtype.type(0)
    for c in range(len(channels)):
        source, target = x[channels[c]].reshape(-1), buffer[c].reshape(-1)
        for i in range(lines):
            row, begin = first_row + i - pad_height, i * pitch
            if row < 0 or row >= height:
                for j in range(pitch):
                    target[begin + j] = zero
            else:
                for j in range(pad_width):
                    target[begin + j] = zero
                    target[begin + pad_width + width + j] = zero
                copy_numbers(source, row * width, width, zero, target, begin + pad_width)


@_part
def _products(weight, steps, numbers, count, made):
    """made[r, j] = Σ weight[r, d] · numbers[steps[d] + j] for j up to `count`, rounded up to whole registers."""
    lanes = _LANE_BYTES // numbers.itemsize
    rows = len(weight)
    for j in range(0, count, 3 * lanes):
        left = count - j
        for r in range(0, rows - rows % 4, 4):
            if left > 2 * lanes:
                _four_3(weight, r, steps, numbers, j, made)
            elif left > lanes:
                _four_2(weight, r, steps, numbers, j, made)
            else:
                _four_1(weight, r, steps, numbers, j, made)
        for r in range(rows - rows % 4, rows):
            if left > 2 * lanes:
                _one_3(weight, r, steps, numbers, j, made)
            elif left > lanes:
                _one_2(weight, r, steps, numbers, j, made)
            else:
                _one_1(weight, r, steps, numbers, j, made)


@_part
def _write(made, pitch, places, bias, first_row, rows, y):
    """y[places[r], first_row + i] = line i of made[r] + bias, without what lies between lines."""
    width = y.shape[2]
    for r in range(len(places)):
        add = bias[places[r]] if len(bias) else y.dtype.type(0)
        source, target = made[r], y[places[r]].reshape(-1)
        for i in range(rows):
            begin, into = i * pitch, (first_row + i) * width
            copy_numbers(source, begin, width, add, target, into)


@_part
def _convolve(given, stack, block, inputs, places, bias, x, first_row, rows, steps, numbers, made, y):
    """Some rows of what one block makes of a sample; `steps`, `numbers` and `made` are memory to work in."""
    height, depth, kernel = stack[_HEIGHT], stack[_DEPTH], given[_KERNEL_H] * given[_KERNEL_W]
    column, row, deep = stack[_COLUMN] + block * depth, stack[_ROW] + block * height, depth * kernel
    weight = array_at(stack[_ADDRESS] + block * height * deep * x.itemsize, height * deep, numbers)
    pitch = given[_W] + 2 * given[_PAD_W]
    lines = rows + (given[_KERNEL_H] - 1) * given[_STEP_H]
    _step(steps, depth, lines * pitch, given[_KERNEL_H], given[_STEP_H] * pitch, given[_KERNEL_W], given[_STEP_W])
    buffer = numbers[: depth * lines * pitch].reshape(depth, lines, pitch)
    _fill(x, inputs[column : column + depth], first_row, given[_PAD_H], given[_PAD_W], buffer)
    _products(weight.reshape(height, deep), steps, numbers, (rows - 1) * pitch + y.shape[2], made)
    _write(made, pitch, places[row : row + height], bias, first_row, rows, y)


@_part
def _meet(weight, steps, inside, vector, count, x, starts, out, begins):
    """So many registers of all rows of an image; rows of weights and tiles of the image stay in the cache."""
    rows, first = len(weight), vector * (_LANE_BYTES // x.itemsize)
    lanes, whole = _LANE_BYTES // x.itemsize, rows - rows % 8
    for v in range(0, count, TILE):
        for r in range(0, whole, 8):
            _eight(weight, r, steps, inside, vector + v, x, first + v * lanes, starts, out, begins)
    v = 0
    while v < count and whole < rows:
        r, wide = whole, v + 3 * TILE <= count
        if r + 4 <= rows:
            if wide:
                _four_wide(weight, r, steps, inside, vector + v, x, first + v * lanes, starts, out, begins)
            else:
                _four(weight, r, steps, inside, vector + v, x, first + v * lanes, starts, out, begins)
            r += 4
        while r < rows:
            if wide:
                _one_wide(weight, r, steps, inside, vector + v, x, first + v * lanes, starts, out, begins)
            else:
                _one(weight, r, steps, inside, vector + v, x, first + v * lanes, starts, out, begins)
            r += 1
        v += 3 * TILE if wide else TILE


@_part
def _convolve_in_place(given, stack, block, inputs, places, bias, inside, x, y, strip, room):
    """A strip of what one block makes of a sample, from the image as it lies; `room` takes what is past its end."""
    height, depth, kernel = stack[_HEIGHT], stack[_DEPTH], given[_KERNEL_H] * given[_KERNEL_W]
    column, row, deep = stack[_COLUMN] + block * depth, stack[_ROW] + block * height, depth * kernel
    numbers, made = x.reshape(-1), y.reshape(-1)
    weight = array_at(stack[_ADDRESS] + block * height * deep * x.itemsize, height * deep, numbers).reshape(
        height, deep
    )
    area, lanes = given[_H] * given[_W], _LANE_BYTES // x.itemsize
    steps, begins, starts = np.empty(deep, np.int64), np.empty(height, np.int64), np.zeros(height, x.dtype)
    _step(steps, 1, 0, given[_KERNEL_H], given[_STEP_H] * given[_W], given[_KERNEL_W], given[_STEP_W])
    for c in range(depth - 1, -1, -1):
        begin = inputs[column + c] * area - given[_PAD_H] * given[_W] - given[_PAD_W]
        for e in range(kernel):
            steps[c * kernel + e] = steps[e] + begin
    for r in range(height):
        begins[r] = places[row + r] * area
        if len(bias):
            starts[r] = bias[places[row + r]]
    first, whole = strip * STRIP, area // (TILE * lanes) * TILE
    last = min(first + STRIP, inside.shape[1])
    _meet(weight, steps, inside, first, min(last, whole) - first, numbers, starts, made, begins)
    if last > whole:
        for r in range(height):
            begins[r] = r * TILE * lanes - whole * lanes
        _meet(weight, steps, inside, whole, TILE, numbers, starts, room, begins)
        zero = x.dtype.type(0)
        for r in range(height):
            into = places[row + r] * area + whole * lanes
            copy_numbers(room, r * TILE * lanes, area - whole * lanes, zero, made, into)


@_part
def _arrays(given, like):
    """(stacks, inputs, places, bias, x, y) of a call."""
    samples = given[_SAMPLES]
    read, written = given[_IN] * given[_H] * given[_W], given[_OUT] * given[_OUT_H] * given[_OUT_W]
    return (
        array_at(given[_STACKS], given[_N_STACKS] * 6, given).reshape(-1, 6),
        array_at(given[_INPUTS], given[_N_INPUTS], given),
        array_at(given[_PLACES], given[_N_PLACES], given),
        array_at(given[_BIAS], given[_N_BIAS], like),
        array_at(given[_X], samples * read, like).reshape(samples, given[_IN], given[_H], given[_W]),
        array_at(given[_Y], samples * written, like).reshape(samples, given[_OUT], given[_OUT_H], given[_OUT_W]),
    )


def in_place_entry(number: Any) -> Any:
    """`entry` for an output of the size of the input, where the processor has registers of 512 bits."""
    bits = np.dtype(f"u{64 // np.dtype(number).itemsize // 8}").type

    def run(arguments):
        given = array_at(arguments, _COUNTER + 1, np.empty(0, np.int64))
        like = np.empty(0, number)
        stacks, inputs, places, bias, x, y = _arrays(given, like)
        kernel, registers = given[_KERNEL_H] * given[_KERNEL_W], given[_N_INSIDE]
        inside = array_at(given[_INSIDE], kernel * registers, np.empty(0, bits)).reshape(kernel, registers)
        room = np.empty(given[_MOST_OUT] * TILE * (_LANE_BYTES // like.itemsize), number)
        strips = (registers + STRIP - 1) // STRIP
        each = len(x) * strips
        task = claim(given[_COUNTER:], 0)
        while task < each * given[_BLOCKS]:
            block, rest = task // each, task % each  # its weights stay in the cache
            sample, strip = rest // strips, rest % strips
            for s in range(len(stacks)):
                if 0 <= block < stacks[s, _GROUPS]:
                    _convolve_in_place(
                        given, stacks[s], block, inputs, places, bias, inside, x[sample], y[sample], strip, room
                    )
                block -= stacks[s, _GROUPS]
            task = claim(given[_COUNTER:], 0)

    return member(run)


def entry(number: Any) -> Any:
    """The compiled function of a team's member for arrays of this kind: (address of `ARGUMENTS`) → nothing."""

    def run(arguments):
        given = array_at(arguments, _COUNTER + 1, np.empty(0, np.int64))
        like = np.empty(0, number)
        stacks, inputs, places, bias, x, y = _arrays(given, like)
        samples, blocks, strip, out_height = len(x), given[_BLOCKS], given[_STRIP], given[_OUT_H]
        pitch = given[_W] + 2 * given[_PAD_W]
        tall = (given[_KERNEL_H] - 1) * given[_STEP_H]
        steps = np.empty(given[_MOST_IN] * given[_KERNEL_H] * given[_KERNEL_W], np.int64)
        numbers = np.empty(given[_MOST_IN] * (strip + tall) * pitch + SLACK, number)
        numbers[len(numbers) - SLACK :] = 0
        lanes = _LANE_BYTES // like.itemsize
        made = np.empty((given[_MOST_OUT], (strip * pitch + lanes - 1) // lanes * lanes), number)
        strips = (out_height + strip - 1) // strip
        task = claim(given[_COUNTER:], 0)
        while task < samples * blocks * strips:
            block, rest = task // (samples * strips), task % (samples * strips)  # its weights stay in the cache
            sample, first_row = rest // strips, rest % strips * strip
            rows = min(strip, out_height - first_row)
            for s in range(len(stacks)):
                if 0 <= block < stacks[s, _GROUPS]:
                    _convolve(
                        given, stacks[s], block, inputs, places, bias, x[sample], first_row, rows, steps, numbers, made,
                        y[sample],
                    )  # fmt: skip
                block -= stacks[s, _GROUPS]
            task = claim(given[_COUNTER:], 0)

    return member(run)
