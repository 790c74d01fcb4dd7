"""Column sums of |w|, and one histogram of |w| relative to its column's mean: all the random-walk test reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from crystallite.annealing import kernels
from crystallite.annealing.histogram import non_finite
from crystallite.core.arrays import Magnitudes
from crystallite.core.compiling import COMPILES
from crystallite.core.errors import InvalidMatrix
from crystallite.core.parallel import over_tasks, thread_count
from crystallite.structure.components import kernel_arguments

__all__ = ["Cells", "can_mark", "column_sums", "marked_column_sums", "relative_histogram"]

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
    length = matrix.shape[1]

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

    return _summed(matrix, add, name)


def can_mark(matrix: Magnitudes) -> bool:
    """Whether `marked_column_sums` takes a matrix: one of rows that lie as they are read."""
    in_place = not matrix.transposed and bool(matrix.bits.flags.c_contiguous)
    return COMPILES and in_place and matrix.format in ("float32", "float64", "bfloat16")


def marked_column_sums(matrix: Magnitudes, pattern: int, name: str = "matrix") -> tuple[np.ndarray, np.ndarray]:
    """`column_sums`, and a bit for each entry whose magnitude has at least this pattern, in the same pass.

    The marks are (rows, ⌈cols / 64⌉) words, as `structure.components.marked_components` takes them: one bit per entry.
    """
    lines, length = matrix.shape
    mask, limit, _ = kernel_arguments(matrix, pattern)
    words = np.empty((lines, -(-length // 64)), np.uint64)

    def add(rows: Rows) -> np.ndarray:
        sums, block = np.zeros(length), matrix.block(*rows)
        values = block if matrix.format == "bfloat16" else block.view(matrix.format)
        kernels.add_and_mark(values, block, mask, limit, sums, words[slice(*rows)])
        return sums

    return _summed(matrix, add, name), words


def _summed(matrix: Magnitudes, add: Callable[[Rows], np.ndarray], name: str) -> np.ndarray:
    """What `add` finds in ranges of lines of memory: rows, or columns if the memory is column-major."""
    lines, length = matrix.shape
    step = -(-lines // _CHUNKS) or 1
    parts = over_tasks(
        thread_count(matrix), [(start, min(start + step, lines)) for start in range(0, lines, step)], add
    )
    if matrix.transposed:
        total = np.concatenate(parts) if parts else np.zeros(0)
    else:
        total = np.zeros(length)
        for part in parts:
            total += part
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
