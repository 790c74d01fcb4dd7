"""The passes of `kernels` in NumPy, for where there is no compiler; tests hold them equal."""

from __future__ import annotations

import numpy as np

__all__ = [
    "add_column_magnitudes",
    "add_row_magnitudes",
    "bin_by_column",
    "bin_by_row",
    "bin_patterns",
    "collect_bin",
    "magnitudes_of",
    "upper_halves",
]

_AT_A_TIME = 1 << 20  # entries: a cell of each takes eight bytes


def bin_patterns(bits: np.ndarray, mask: np.integer, shift: int, counts: np.ndarray) -> None:
    flat = bits.reshape(-1)
    for first in range(0, flat.size, _AT_A_TIME):
        patterns = flat[first : first + _AT_A_TIME] & mask
        counts += np.bincount((patterns >> shift).astype(np.intp), minlength=counts.size)


def collect_bin(bits: np.ndarray, mask: np.integer, shift: int, wanted: int, out: np.ndarray) -> int:
    patterns = bits.reshape(-1) & mask
    found = patterns[patterns >> shift == wanted]
    out[: found.size] = found
    return found.size


def magnitudes_of(bits: np.ndarray, mask: np.integer, table: np.ndarray, out: np.ndarray) -> None:
    np.take(table, bits & mask, out=out)


def upper_halves(bits: np.ndarray, mask: np.integer, out: np.ndarray) -> None:
    np.left_shift(bits & mask, np.uint32(16), out=out, dtype=np.uint32)


def add_column_magnitudes(values: np.ndarray, sums: np.ndarray) -> None:
    if values.dtype == np.uint16:  # patterns of bfloat16
        wide = np.empty(values.shape, np.uint32)
        upper_halves(values, np.uint16(0x7FFF), wide)
        values = wide.view(np.float32)
    whole = len(values) - len(values) % 8
    a, b, c, d, e, f, g, h = (np.abs(values[i:whole:8]) for i in range(8))
    sums += (((a + b) + (c + d)) + ((e + f) + (g + h))).sum(0, dtype=np.float64)
    sums += np.abs(values[whole:]).sum(0, dtype=np.float64)


def add_row_magnitudes(values: np.ndarray, sums: np.ndarray) -> None:
    sums += np.abs(values).sum(1, dtype=np.float64)


def bin_by_column(
    values: np.ndarray, scales: np.ndarray, start: float, split: float, split_cell: int, counts: np.ndarray
) -> None:
    counted = scales > 0
    for rows in _some_rows(values):
        _add_cells(np.abs(values[rows][:, counted]) * scales[counted], start, split, split_cell, counts)


def bin_by_row(
    values: np.ndarray, scales: np.ndarray, start: float, split: float, split_cell: int, counts: np.ndarray
) -> None:
    counted = np.flatnonzero(scales > 0)
    for rows in _some_rows(values[: counted.size]):
        chosen = counted[rows]
        _add_cells(np.abs(values[chosen]) * scales[chosen, None], start, split, split_cell, counts)


def _some_rows(values: np.ndarray) -> list[slice]:
    step = max(1, _AT_A_TIME // max(1, values.shape[1]))
    return [slice(first, first + step) for first in range(0, len(values), step)]


def _add_cells(v: np.ndarray, start: float, split: float, split_cell: int, counts: np.ndarray) -> None:
    last = counts.size - 1
    below = np.trunc(np.minimum(v, split) - start).astype(np.intp)
    above = split_cell + np.trunc(np.minimum(v - split, float(last))).astype(np.intp)
    counts += np.bincount(np.minimum(np.where(v < split, below, above), last).ravel(), minlength=counts.size)
