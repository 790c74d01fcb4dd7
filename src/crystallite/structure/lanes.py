"""Comparing 64 neighbouring entries at once: one word with a bit per entry that passes.

Compiled where there is a compiler (`vector_lanes`), else the same in NumPy, at some microseconds a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from crystallite.core.compiling import COMPILES
from crystallite.structure import vector_lanes

__all__ = ["LANES", "any_lane", "bit_count", "lowest_bit", "surviving_lanes", "unsettled_lanes"]

LANES = vector_lanes.LANES


def _lowest_bit(word: Any) -> int:
    bits = int(word)
    return (bits & -bits).bit_length() - 1


def _bit_count(word: Any) -> int:
    return int(word).bit_count()


def _surviving_lanes(row: np.ndarray, start: int, mask: Any, threshold: Any) -> np.uint64:
    return _word(_reach(_magnitudes(row, start, mask), threshold, start))


def _any_lane(row: np.ndarray, start: int, mask: Any, threshold: Any) -> bool:
    return bool(_reach(_magnitudes(row, start, mask), threshold, start).any())


def _unsettled_lanes(
    row: np.ndarray, start: int, mask: Any, threshold: Any, ceiling: Any, parent: np.ndarray, root: Any
) -> np.uint64:
    entries = _magnitudes(row, start, mask)
    stays = (parent[start : start + LANES] != root) | _reach(entries, ceiling, start)
    return _word(_reach(entries, threshold, start) & stays)


def _magnitudes(row: np.ndarray, start: int, mask: Any) -> np.ndarray:
    return row[start : start + LANES] & row.dtype.type(mask)


def _reach(entries: np.ndarray, limit: Any, start: int) -> np.ndarray:
    """Which entries are ≥ limit: one number, or one per column."""
    if isinstance(limit, np.ndarray):
        limit = limit[start : start + LANES]
    return entries >= (limit.astype(entries.dtype) if limit.dtype.kind == "i" else limit)


def _word(bits: np.ndarray) -> np.uint64:
    return np.packbits(bits, bitorder="little").view(np.uint64)[0]


if COMPILES:
    bit_count, lowest_bit, any_lane = vector_lanes.bit_count, vector_lanes.lowest_bit, vector_lanes.any_lane
    surviving_lanes, unsettled_lanes = vector_lanes.surviving_lanes, vector_lanes.unsettled_lanes
else:
    bit_count, lowest_bit, any_lane, surviving_lanes, unsettled_lanes = (
        _bit_count, _lowest_bit, _any_lane, _surviving_lanes, _unsettled_lanes,
    )  # fmt: skip
