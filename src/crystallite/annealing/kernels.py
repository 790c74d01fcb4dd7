"""Compiled passes over blocks of matrix rows; each runs without the interpreter lock.

Own code because NumPy would read the matrix, and write a copy of it, for every step; each pass here reads it once.

`bits` are magnitudes as unsigned integers that may carry the sign (see `crystallite.core.arrays`), `values` the numbers
themselves as float32 or float64. Accumulators are float64 or int64 and are added to, not overwritten.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from crystallite.annealing import plain_kernels as plain
from crystallite.core.compiling import intrinsic, ir, overload, types
from crystallite.core.parallel import compiled, compiled_or
from crystallite.core.prefetch import ask_for
from crystallite.structure.lanes import LANES, surviving_lanes

__all__ = [
    "add_and_mark",
    "add_column_magnitudes",
    "add_row_magnitudes",
    "band_misfit",
    "bin_by_column",
    "bin_by_row",
    "bin_patterns",
    "cell_of",
    "collect_bin",
    "magnitudes_of",
    "upper_halves",
]

_STRIP = 1024  # columns whose cells are in the nearest cache
_LONG_STRIP = 8192
_AHEAD = 2048  # bytes of a row that are asked for before they are needed


@compiled_or(plain.bin_patterns)
def bin_patterns(bits, mask, shift, counts):
    """counts[pattern >> shift] += 1 for every entry."""
    flat = bits.reshape(-1)
    for i in range(flat.size):
        counts[(flat[i] & mask) >> shift] += 1


@compiled_or(plain.collect_bin)
def collect_bin(bits, mask, shift, wanted, out):
    """The patterns whose high bits are `wanted`, into `out`; returns how many there are."""
    flat = bits.reshape(-1)
    found = 0
    for i in range(flat.size):
        pattern = flat[i] & mask
        if pattern >> shift == wanted:
            out[found] = pattern
            found += 1
    return found


@compiled_or(plain.magnitudes_of)
def magnitudes_of(bits, mask, table, out):
    """out = table[pattern]: the numbers that 8- and 16-bit patterns stand for."""
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[i, j] = table[bits[i, j] & mask]


@compiled_or(plain.upper_halves)
def upper_halves(bits, mask, out):
    """out = the 32-bit patterns whose upper halves the 16-bit patterns are, without their signs."""
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[i, j] = np.uint32(bits[i, j] & mask) << np.uint32(16)


@intrinsic
def _upper_half(_typing, bits):
    """The float32 whose upper half these 16 bits are."""

    def generate(_context, builder, _sig, args):
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, 16)), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _ask_for_lanes(_typing, row, start):
    """Have the lanes that come `_AHEAD` after these, which may lie past the end, on their way into the cache."""

    def generate(context, builder, sig, args):
        entries = context.make_array(sig.args[0])(context, builder, args[0])
        for line in range(0, LANES * sig.args[0].dtype.bitwidth // 8, 64):
            ask_for(builder, entries, args[1], _AHEAD + line)
        return context.get_dummy_value()

    return types.void(row, types.intp), generate


def _magnitude(number: Any) -> Any:
    """|number|; one of 16 bits is a bfloat16."""
    raise NotImplementedError("compiled code only")


@overload(_magnitude)
def _magnitude_of(number):
    if isinstance(number, types.Integer):
        return lambda number: _upper_half(number & np.uint16(0x7FFF))
    return lambda number: abs(number)


@compiled
def _mark_last(row, whole, mask, threshold, words):
    """What `add_and_mark` marks in the last columns, fewer than 64."""
    word = np.uint64(0)
    for column in range(whole, row.shape[0]):
        if np.uint64(row[column]) & np.uint64(mask) >= np.uint64(threshold):
            word |= np.uint64(1) << np.uint64(column - whole)
    if whole < row.shape[0]:
        words[whole // LANES] = word


@compiled_or(plain.add_column_magnitudes)
def add_column_magnitudes(values, sums):
    """sums[j] += Σ_i |values[i, j]|; values of 16 bits are patterns of bfloat16, decoded in registers.

    Eight rows are added in the precision of the values before they are added to the sums, which then cost a quarter of
    the traffic; a strip of columns at a time, so that its sums stay in a near cache. Short strips would be slower:
    memory is read ahead within a page only.
    """
    rows, cols = values.shape
    whole = rows - rows % 8
    for first in range(0, cols, _LONG_STRIP):
        strip = sums[first : first + _LONG_STRIP]
        width = strip.size
        for i in range(0, whole, 8):
            a = values[i, first : first + width]
            b = values[i + 1, first : first + width]
            c = values[i + 2, first : first + width]
            d = values[i + 3, first : first + width]
            e = values[i + 4, first : first + width]
            f = values[i + 5, first : first + width]
            g = values[i + 6, first : first + width]
            h = values[i + 7, first : first + width]
            for j in range(width):
                upper = (_magnitude(a[j]) + _magnitude(b[j])) + (_magnitude(c[j]) + _magnitude(d[j]))
                lower = (_magnitude(e[j]) + _magnitude(f[j])) + (_magnitude(g[j]) + _magnitude(h[j]))
                strip[j] += upper + lower
        for i in range(whole, rows):
            row = values[i, first : first + width]
            for j in range(width):
                strip[j] += _magnitude(row[j])


@compiled
def add_and_mark(values, bits, mask, threshold, sums, words):
    """`add_column_magnitudes`, and bit j % 64 of words[i, j // 64] is set where bits[i, j] & mask ≥ threshold.

    `bits` are the same entries as integers. Entries are read once: the second look at them finds them in the cache.
    Eight rows, which often lie a power of two apart, are more than a processor reads ahead by itself.
    """
    rows, cols = bits.shape
    whole, eights = cols - cols % LANES, rows - rows % 8
    for first in range(0, eights, 8):
        for start in range(0, whole, LANES):
            for i in range(first, first + 8):
                _ask_for_lanes(bits[i], start)
                words[i, start // LANES] = surviving_lanes(bits[i], start, mask, threshold)
            strip = sums[start : start + LANES]
            a, b = values[first, start : start + LANES], values[first + 1, start : start + LANES]
            c, d = values[first + 2, start : start + LANES], values[first + 3, start : start + LANES]
            e, f = values[first + 4, start : start + LANES], values[first + 5, start : start + LANES]
            g, h = values[first + 6, start : start + LANES], values[first + 7, start : start + LANES]
            for j in range(LANES):
                upper = (_magnitude(a[j]) + _magnitude(b[j])) + (_magnitude(c[j]) + _magnitude(d[j]))
                lower = (_magnitude(e[j]) + _magnitude(f[j])) + (_magnitude(g[j]) + _magnitude(h[j]))
                strip[j] += upper + lower
        for i in range(first, first + 8):
            _mark_last(bits[i], whole, mask, threshold, words[i])
    for i in range(eights, rows):
        for start in range(0, whole, LANES):
            words[i, start // LANES] = surviving_lanes(bits[i], start, mask, threshold)
        _mark_last(bits[i], whole, mask, threshold, words[i])
    add_column_magnitudes(values[:eights, whole:], sums[whole:])
    add_column_magnitudes(values[eights:], sums)


@compiled_or(plain.add_row_magnitudes)
def add_row_magnitudes(values, sums):
    """sums[i] += Σ_j |values[i, j]|, in eight interleaved partial sums so that the order of additions is fixed."""
    lanes = np.zeros(8)
    for i in range(values.shape[0]):
        row = values[i]
        lanes[:] = 0.0
        whole = row.size // 8 * 8
        for j in range(0, whole, 8):
            for lane in range(8):
                lanes[lane] += abs(row[j + lane])
        total = lanes.sum()
        for j in range(whole, row.size):
            total += abs(row[j])
        sums[i] += total


@compiled
def cell_of(v, start, split, split_cell, last):
    """The cell of v: of width 1 from `start` up to `split`, and again from there, where cell `split_cell` is.

    Without a branch: which side of `split` a number lies on cannot be predicted.
    """
    below = np.int32(min(v, split) - start)
    above = np.int32(split_cell) + np.int32(min(max(v - split, 0.0), float(last)))
    return min(below if v < split else above, np.int32(last))


@compiled
def _count(cells, used, counts):
    """counts[0, cell] += 1 for the first so many cells, in four rows by turns: neighbours often fall into one cell."""
    whole = used - used % 4
    for j in range(0, whole, 4):
        counts[0, cells[j]] += 1
        counts[1, cells[j + 1]] += 1
        counts[2, cells[j + 2]] += 1
        counts[3, cells[j + 3]] += 1
    for j in range(whole, used):
        counts[0, cells[j]] += 1


@compiled_or(plain.bin_by_column)
def bin_by_column(values, scales, start, split, split_cell, counts):
    """counts[cell of |value|·scale of its column] += 1, what lies beyond the last cell into it; scale 0 = leave out."""
    last = np.int32(counts.size - 1)
    cells = np.empty(_STRIP, np.int32)
    found = np.zeros((4, counts.size + 1), np.int64)  # the last for what is left out
    for first in range(0, values.shape[1], _STRIP):
        scale = scales[first : first + _STRIP]
        for i in range(values.shape[0]):
            row = values[i, first : first + _STRIP]
            for j in range(scale.size):
                cell = cell_of(abs(row[j]) * scale[j], start, split, split_cell, last)
                cells[j] = cell if scale[j] > 0 else last + np.int32(1)
            _count(cells, scale.size, found)
    counts += found.sum(0)[:-1]


@compiled_or(plain.bin_by_row)
def bin_by_row(values, scales, start, split, split_cell, counts):
    """`bin_by_column` with one scale per row."""
    last = np.int32(counts.size - 1)
    cells = np.empty(_STRIP, np.int32)
    found = np.zeros((4, counts.size), np.int64)
    for i in range(values.shape[0]):
        if scales[i] > 0:
            for first in range(0, values.shape[1], _STRIP):
                row = values[i, first : first + _STRIP]
                for j in range(row.size):
                    cells[j] = cell_of(abs(row[j]) * scales[i], start, split, split_cell, last)
                _count(cells, row.size, found)
    counts += found.sum(0)


@compiled
def band_misfit(counts, masses, low, high, most_groups):
    """Pearson's χ² of counts[low:high] against masses in at most `most_groups` bins of equal mass.

    Returns (χ², degrees of freedom, Σ|O − E|/2); 0 degrees of freedom where there are too few counts to tell.
    """
    total, mass = 0, 0.0
    for i in range(low, high):
        total += counts[i]
        mass += masses[i]
    groups = min(most_groups, total // 10, high - low)  # ten expected per bin: the χ² law holds to small p
    if groups < 2:
        return 0.0, 0, 0.0
    if mass == 0:
        return np.inf, 1, float(total)  # noise is never here
    statistic, misplaced, bins = 0.0, 0.0, 0
    observed, expected, cumulative, cut = 0, 0.0, 0.0, 1
    for i in range(low, high):
        observed += counts[i]
        expected += masses[i]
        cumulative += masses[i]
        if i == high - 1 or (cut < groups and cumulative > cut / groups * mass * (1 - 1e-12)):
            while cut < groups and cumulative > cut / groups * mass * (1 - 1e-12):
                cut += 1
            e = expected / mass * total
            statistic += (observed - e) ** 2 / max(e, 1e-9)
            misplaced += abs(observed - e)
            bins += 1
            observed, expected = 0, 0.0
    return statistic, max(bins - 1, 1), misplaced / 2
