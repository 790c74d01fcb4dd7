"""Numbers of 16 bits as float32, a few at a time, where compiled code meets them; others are left as they are."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np

from crystallite.core.compiling import overload
from crystallite.operators.runtime.instructions import copy_numbers

__all__ = ["wide_rows", "wide_vector"]


def wide_rows(weight: Any, row: int, count: int, buffer: Any) -> Any:
    """A matrix and where some rows of the weight begin in it: itself, or a buffer of wider numbers that they fill."""
    raise NotImplementedError("compiled code only")


@overload(wide_rows)
def _wide_rows_of(weight, row, count, buffer):
    if weight.dtype == buffer.dtype:
        return lambda weight, row, count, buffer: (weight, row)

    def widened(weight, row, count, buffer):
        depth = weight.shape[1]
        copy_numbers(weight.reshape(-1), row * depth, count * depth, buffer.dtype.type(0), buffer.reshape(-1), 0)
        return buffer, 0

    return widened


def wide_vector(numbers: Any, like: Any) -> Any:
    """A vector as numbers of the kind of `like`, itself or a copy."""
    raise NotImplementedError("compiled code only")


@overload(wide_vector)
def _wide_vector_of(numbers, like):
    if numbers.dtype == like.dtype:
        return lambda numbers, like: numbers

    def widened(numbers, like):
        wide = np.empty(len(numbers), like.dtype)
        copy_numbers(numbers, 0, len(numbers), like.dtype.type(0), wide, 0)
        return wide

    return widened
