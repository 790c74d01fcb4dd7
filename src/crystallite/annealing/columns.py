"""Column sums of |w|, and one histogram of |w| relative to its column's mean: all the random-walk test reads."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from crystallite.annealing import kernels
from crystallite.annealing.histogram import non_finite
from crystallite.core.arrays import Magnitudes
from crystallite.core.errors import InvalidMatrix
from crystallite.core.parallel import over_tasks, thread_count

__all__ = ["Cells", "column_sums", "relative_histogram"]

_CHUNKS = 32  # fixed, not one per thread: the order of additions must not depend on the machine
_ENTRIES_AT_ONCE = 1 << 18  # decoded together where the format has fewer than 32 bits: they stay in the cache
_SAMPLE_RUN = 1 << 16

Rows = tuple[int, int]


class Cells(NamedTuple):
    """Cells of width 1 that begin at `start`, and anew at `split`, where cell number `split_cell` begins."""

    start: float
    split: float
    split_cell: int
    total: int


def column_sums(matrix: Magnitudes, name: str = "matrix") -> np.ndarray:
    """Σ_i |w_ij| of the caller's columns in float64, the same on any number of threads.

    One pass. Raises `InvalidMatrix` if an entry is not finite, which makes its column's sum not finite.
    """
    lines, length = matrix.shape  # lines of memory: rows, or columns if the memory is column-major
    step = -(-lines // _CHUNKS) or 1
    chunks = [(start, min(start + step, lines)) for start in range(0, lines, step)]

    def add(rows: Rows) -> np.ndarray:
        sums = np.zeros(rows[1] - rows[0] if matrix.transposed else length)
        if matrix.format == "bfloat16" and not matrix.transposed and matrix.bits.flags.c_contiguous:
            kernels.add_column_magnitudes(matrix.block(*rows), sums)
            return sums
        for first, last in _decodable(matrix, rows):
            if matrix.transposed:
                kernels.add_row_magnitudes(_values(matrix, first, last), sums[first - rows[0] : last - rows[0]])
            else:
                kernels.add_column_magnitudes(_values(matrix, first, last), sums)
        return sums

    parts = over_tasks(thread_count(matrix), chunks, add)
    if matrix.transposed:
        total = np.concatenate(parts) if parts else np.zeros(0)
    else:
        total = np.sum(parts, axis=0) if parts else np.zeros(length)
    if not np.all(np.isfinite(total)):
        error = non_finite(matrix, name)
        overflow = InvalidMatrix(f"{name}: the sum of a column's magnitudes overflows float64; rescale the matrix")
        raise overflow if " 0 NaN" in str(error) else error
    return total


def relative_histogram(matrix: Magnitudes, scales: np.ndarray, cells: Cells, limit: int | None = None) -> np.ndarray:
    """How many |w_ij|·scales_j are in each cell, the last also for all beyond; columns with scale 0 are left out.

    With a limit, a larger matrix is represented by evenly spaced runs of its rows (columns, if its memory is
    column-major) that hold at least `limit` entries together: always the same ones.
    """
    lines, length = matrix.shape
    run = max(1, _SAMPLE_RUN // max(length, 1))
    count = -(-lines // run)
    if limit is not None and matrix.bits.size > limit:
        count = min(count, -(-limit // (run * length)))
        starts = (np.arange(count) * (lines - run) // max(count - 1, 1)).tolist()
    else:
        starts = [run * i for i in range(count)]

    def bin_run(start: int) -> np.ndarray:
        counts = np.zeros(cells.total, np.int64)
        stop = min(start + run, lines)
        values = _values(matrix, start, stop)
        if matrix.transposed:
            kernels.bin_by_row(values, scales[start:stop], cells.start, cells.split, cells.split_cell, counts)
        else:
            kernels.bin_by_column(values, scales, cells.start, cells.split, cells.split_cell, counts)
        return counts

    return (
        np.sum(over_tasks(thread_count(matrix), starts, bin_run), axis=0) if starts else np.zeros(cells.total, np.int64)
    )


def _decodable(matrix: Magnitudes, rows: Rows) -> list[Rows]:
    """A range of rows, cut so that decoding a part takes little memory."""
    step = max(1, _ENTRIES_AT_ONCE // max(1, matrix.shape[1]))
    if matrix.mask > 0xFFFF and matrix.bits.flags.c_contiguous:
        step = max(1, rows[1] - rows[0])
    return [(start, min(start + step, rows[1])) for start in range(*rows, step)]


def _values(matrix: Magnitudes, start: int, stop: int) -> np.ndarray:
    """Rows start:stop as float32 or float64 numbers; those of 8 and 16 bits lose their sign."""
    block = matrix.block(start, stop)
    if matrix.mask > 0xFFFF:
        return block.view(f"f{block.dtype.itemsize}")
    out = np.empty(block.shape, np.float32)
    if matrix.format == "bfloat16":  # the upper half of a float32
        kernels.upper_halves(block, matrix.storage(matrix.mask), out.view(np.uint32))
    else:
        kernels.magnitudes_of(block, matrix.storage(matrix.mask), _decoding_table(matrix.format), out)
    return out


@functools.cache
def _decoding_table(format: str) -> np.ndarray:
    """The number of every pattern of a format of at most 16 bits, exact in float32."""
    m = Magnitudes(np.zeros((0, 0), np.uint8), format)
    with np.errstate(invalid="ignore"):  # the patterns that are no numbers
        return m.values(np.arange(m.mask + 1)).astype(np.float32)
