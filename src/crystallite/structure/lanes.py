"""Comparing 64 neighbouring entries at once: one machine word with a bit per entry that passes.

numba turns a Python loop into scalar code too easily here, so the comparison is written as LLVM vector
instructions (`<64 x i32>` and the like), which LLVM lowers to whatever the processor has: AVX, NEON, …
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

__all__ = ["LANES", "equal_lanes", "lowest_bit", "surviving_lanes"]

LANES = 64
_I32 = ir.IntType(32)


def _load(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """The 64 entries of a contiguous array from `offset` on."""
    vector = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), LANES)
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())
    return builder.load(pointer, align=array_type.dtype.bitwidth // 8)


def _splat(builder: Any, scalar: Any) -> Any:
    """One scalar in all 64 lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))


@intrinsic
def surviving_lanes(_typing: Any, row: Any, offset: Any, mask: Any, threshold: Any) -> Any:
    """Word whose bit j is set where (row[offset + j] & mask) ≥ threshold, unsigned.

    `threshold` is one number, or an array with a threshold for every column.
    """
    by_column = isinstance(threshold, types.Array)
    signature = types.uint64(row, types.intp, row.dtype, threshold if by_column else row.dtype)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        entries = builder.and_(_load(context, builder, sig.args[0], args[0], args[1]), _splat(builder, args[2]))
        limits = _load(context, builder, sig.args[3], args[3], args[1]) if by_column else _splat(builder, args[3])
        return builder.bitcast(builder.icmp_unsigned(">=", entries, limits), ir.IntType(LANES))

    return signature, generate


@intrinsic
def equal_lanes(_typing: Any, row: Any, offset: Any, value: Any) -> Any:
    """Word whose bit j is set where row[offset + j] == value."""
    signature = types.uint64(row, types.intp, row.dtype)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        entries = _load(context, builder, sig.args[0], args[0], args[1])
        return builder.bitcast(builder.icmp_signed("==", entries, _splat(builder, args[2])), ir.IntType(LANES))

    return signature, generate


@intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:
    """Position of the lowest set bit of a word that is not zero."""
    signature = types.int64(types.uint64)

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate
