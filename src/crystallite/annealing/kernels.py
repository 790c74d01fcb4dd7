"""Compiled passes over blocks of matrix rows; each runs without the interpreter lock.

Own code because NumPy would read the matrix, and write a copy of it, for every step; each pass here reads it once.

`bits` are magnitudes as unsigned integers that may carry the sign (see `crystallite.core.arrays`), `values` the numbers
themselves as float32 or float64. Accumulators are float64 or int64 and are added to, not overwritten.
"""

from __future__ import annotations

import numpy as np

from crystallite.annealing import plain_kernels as plain
from crystallite.core.parallel import compiled, compiled_or

__all__ = [
    "add_column_magnitudes",
    "add_column_upper_halves",
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

_STRIP = 1024  # columns


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


@compiled_or(plain.add_column_magnitudes)
def add_column_magnitudes(values, sums):
    """sums[j] += Σ_i |values[i, j]|.

    Four rows are added in the precision of the values before they are added to the sums, which then cost a quarter of
    the traffic; a strip of columns at a time, so that its sums stay in the nearest cache.
    """
    rows, cols = values.shape
    whole = rows - rows % 4
    for first in range(0, cols, _STRIP):
        strip = sums[first : first + _STRIP]
        width = strip.size
        for i in range(0, whole, 4):
            a = values[i, first : first + width]
            b = values[i + 1, first : first + width]
            c = values[i + 2, first : first + width]
            d = values[i + 3, first : first + width]
            for j in range(width):
                strip[j] += (abs(a[j]) + abs(b[j])) + (abs(c[j]) + abs(d[j]))
        for i in range(whole, rows):
            row = values[i, first : first + width]
            for j in range(width):
                strip[j] += abs(row[j])


@compiled_or(plain.add_column_upper_halves)
def add_column_upper_halves(bits, mask, sums):
    """`add_column_magnitudes` for bfloat16 patterns, the upper halves of float32 ones; decoded in the nearest cache."""
    rows, cols = bits.shape
    wide = np.zeros((4, _STRIP), np.uint32)
    numbers = wide.view(np.float32)
    for first in range(0, cols, _STRIP):
        strip = sums[first : first + _STRIP]
        width = strip.size
        for i in range(0, rows, 4):
            taken = min(4, rows - i)
            for k in range(4):
                target = wide[k]
                if k < taken:
                    row = bits[i + k, first : first + width]
                    for j in range(width):
                        target[j] = np.uint32(row[j] & mask) << np.uint32(16)
                else:
                    target[:width] = 0
            a, b, c, d = numbers[0], numbers[1], numbers[2], numbers[3]
            for j in range(width):
                strip[j] += (a[j] + b[j]) + (c[j] + d[j])


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
    """The cell of v: of width 1 from `start` up to `split`, and again from there, where cell `split_cell` is."""
    cell = int(v - start) if v < split else split_cell + int(min(v - split, float(last)))
    return min(cell, last)


@compiled_or(plain.bin_by_column)
def bin_by_column(values, scales, start, split, split_cell, counts):
    """counts[cell of |value|·scale of its column] += 1, what lies beyond the last cell into it; scale 0 = leave out."""
    last = counts.size - 1
    for i in range(values.shape[0]):
        row = values[i]
        for j in range(row.size):
            if scales[j] > 0:
                counts[cell_of(abs(row[j]) * scales[j], start, split, split_cell, last)] += 1


@compiled_or(plain.bin_by_row)
def bin_by_row(values, scales, start, split, split_cell, counts):
    """`bin_by_column` with one scale per row."""
    last = counts.size - 1
    for i in range(values.shape[0]):
        row = values[i]
        if scales[i] > 0:
            for j in range(row.size):
                counts[cell_of(abs(row[j]) * scales[i], start, split, split_cell, last)] += 1


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
