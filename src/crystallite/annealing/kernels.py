"""Compiled passes over blocks of matrix rows; each runs without the interpreter lock.

`bits` are magnitudes as unsigned integers that may carry the sign (see `crystallite.arrays`), `values` the numbers
themselves as float32 or float64. Accumulators are float64 or int64 and are added to, not overwritten.
"""

from __future__ import annotations

import numpy as np

from crystallite.parallel import compiled

__all__ = [
    "add_column_magnitudes",
    "add_row_magnitudes",
    "bin_by_column",
    "bin_by_row",
    "bin_patterns",
    "collect_bin",
    "count_at_least",
    "count_at_least_by_column",
    "magnitudes_of",
    "upper_halves",
]

_STRIP = 1024  # columns


@compiled
def bin_patterns(bits, mask, shift, counts):
    """counts[pattern >> shift] += 1 for every entry."""
    flat = bits.reshape(-1)
    for i in range(flat.size):
        counts[(flat[i] & mask) >> shift] += 1


@compiled
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


@compiled
def count_at_least(bits, mask, threshold):
    """How many entries have a pattern ≥ threshold, and the largest pattern."""
    total, largest = 0, mask ^ mask
    for i in range(bits.shape[0]):
        row = bits[i]
        kept = np.uint32(0)  # as narrow as the entries, so that the loop fills the vector registers
        for j in range(row.size):
            pattern = row[j] & mask
            largest = max(largest, pattern)
            kept += np.uint32(pattern >= threshold)
        total += int(kept)
    return total, largest


@compiled
def count_at_least_by_column(bits, mask, thresholds):
    """How many entries reach the threshold of their column, and the largest pattern."""
    total, largest = 0, mask ^ mask
    for i in range(bits.shape[0]):
        row = bits[i]
        kept = np.uint32(0)
        for j in range(row.size):
            pattern = row[j] & mask
            largest = max(largest, pattern)
            kept += np.uint32(pattern >= thresholds[j])
        total += int(kept)
    return total, largest


@compiled
def magnitudes_of(bits, mask, table, out):
    """out = table[pattern]: the numbers that 8- and 16-bit patterns stand for."""
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[i, j] = table[bits[i, j] & mask]


@compiled
def upper_halves(bits, mask, out):
    """out = the 32-bit patterns whose upper halves the 16-bit patterns are, without their signs."""
    for i in range(bits.shape[0]):
        for j in range(bits.shape[1]):
            out[i, j] = np.uint32(bits[i, j] & mask) << np.uint32(16)


@compiled
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


@compiled
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
def bin_by_column(values, scales, counts):
    """counts[⌊|value|·scale of its column⌋] += 1, what lies beyond the last bin into the last; scale 0 = leave out."""
    last = counts.size - 1
    for i in range(values.shape[0]):
        row = values[i]
        for j in range(row.size):
            if scales[j] > 0:
                counts[min(int(abs(row[j]) * scales[j]), last)] += 1


@compiled
def bin_by_row(values, scales, counts):
    """`bin_by_column` with one scale per row."""
    last = counts.size - 1
    for i in range(values.shape[0]):
        row = values[i]
        if scales[i] > 0:
            for j in range(row.size):
                counts[min(int(abs(row[j]) * scales[i]), last)] += 1
