"""The comparisons of `lanes` as machine code.

numba turns a Python loop into scalar code too easily here, so the comparisons are written as LLVM vector instructions,
which LLVM lowers to whatever the processor has: AVX, NEON, …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crystallite.core.compiling import intrinsic, ir, types
from crystallite.core.index_checks import check_span

__all__ = ["LANES", "any_lane", "bit_count", "lowest_bit", "surviving_lanes", "unsettled_lanes"]

LANES = 64
_I32, _I64 = ir.IntType(32), ir.IntType(64)


class _Group:
    """A few of the 64 lanes, as many as fill a vector register of 256 bits: more would spill registers."""

    def __init__(self, context: Any, builder: Any, size: int, offset: Any):
        self.context, self.builder, self.size, self.offset = context, builder, size, offset

    def load(self, array_type: Any, array: Any) -> Any:
        """The group's entries of a contiguous array."""
        vector = ir.VectorType(ir.IntType(array_type.dtype.bitwidth), self.size)
        entries = self.context.make_array(array_type)(self.context, self.builder, array)
        check_span(self.context, self.builder, entries, self.offset, self.size)
        pointer = self.builder.bitcast(self.builder.gep(entries.data, [self.offset]), vector.as_pointer())
        return self.builder.load(pointer, align=array_type.dtype.bitwidth // 8)

    def splat(self, scalar: Any) -> Any:
        """One scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, self.size), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.size), [0] * self.size)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def magnitudes(self, array_type: Any, array: Any, mask: Any) -> Any:
        """The group's entries without their signs."""
        return self.builder.and_(self.load(array_type, array), self.splat(mask))

    def at_least(self, entries: Any, limit_type: Any, limit: Any, signed: bool) -> Any:
        """entries ≥ limit, where limit is one number or an array with one per column."""
        compare = self.builder.icmp_signed if signed else self.builder.icmp_unsigned
        if isinstance(limit_type, types.Array):
            return compare(">=", entries, self.load(limit_type, limit))
        if signed:  # processors compare for > only
            return compare(">", entries, self.splat(self.builder.sub(limit, ir.Constant(limit.type, 1))))
        return compare(">=", entries, self.splat(limit))


def _word(context: Any, builder: Any, array_type: Any, start: Any, condition: Callable[[_Group], Any]) -> Any:
    """The 64 bits of a condition on the lanes from `start` on."""
    word = ir.Constant(_I64, 0)
    for first, group in _groups(context, builder, array_type, start):
        bits = builder.zext(builder.bitcast(condition(group), ir.IntType(group.size)), _I64)
        word = builder.or_(word, builder.shl(bits, ir.Constant(_I64, first)))
    return word


def _groups(context: Any, builder: Any, array_type: Any, start: Any) -> list[tuple[int, _Group]]:
    """The 64 lanes from `start` on, each group with the number of its first one."""
    size = max(8, 256 // array_type.dtype.bitwidth)
    return [
        (first, _Group(context, builder, size, builder.add(start, ir.Constant(start.type, first))))
        for first in range(0, LANES, size)
    ]


def _limit_type(row: Any, threshold: Any) -> Any:
    return threshold if isinstance(threshold, types.Array) else row.dtype


def _mask_type(row: Any, mask: Any) -> Any:
    """The mask keeps its signedness, which says how to compare: signed where it clears the sign bit.

    Then no entry has that bit and both ways agree, but processors compare signed numbers in half the instructions.
    """
    return types.Integer.from_bitwidth(row.dtype.bitwidth, signed=mask.signed)


@intrinsic
def surviving_lanes(_typing: Any, row: Any, start: Any, mask: Any, threshold: Any) -> Any:
    """Word whose bit j is set where (row[start + j] & mask) ≥ threshold; threshold: one, or one per column."""
    signature = types.uint64(row, types.intp, _mask_type(row, mask), _limit_type(row, threshold))

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, sign_mask, limit = args

        def survives(group: _Group) -> Any:
            entries = group.magnitudes(sig.args[0], array, sign_mask)
            return group.at_least(entries, sig.args[3], limit, sig.args[2].signed)

        return _word(context, builder, sig.args[0], first, survives)

    return signature, generate


@intrinsic
def any_lane(_typing: Any, row: Any, start: Any, mask: Any, threshold: Any) -> Any:
    """Whether `surviving_lanes` has a bit at all, which is cheaper to know than which."""
    signature = types.boolean(row, types.intp, _mask_type(row, mask), _limit_type(row, threshold))

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, sign_mask, limit = args
        found = None
        for _, group in _groups(context, builder, sig.args[0], first):
            entries = group.magnitudes(sig.args[0], array, sign_mask)
            passes = group.at_least(entries, sig.args[3], limit, sig.args[2].signed)
            found = passes if found is None else builder.or_(found, passes)
        bits = builder.bitcast(found, ir.IntType(group.size))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return signature, generate


@intrinsic
def unsettled_lanes(
    _typing: Any, row: Any, start: Any, mask: Any, threshold: Any, ceiling: Any, parent: Any, root: Any
) -> Any:
    """Like `surviving_lanes`, without the columns whose parent is already `root`; entries ≥ ceiling stay in any case.

    The three comparisons are combined before their bits are gathered, which is the costly step.
    """
    limit_type = _limit_type(row, threshold)
    signature = types.uint64(row, types.intp, _mask_type(row, mask), limit_type, row.dtype, parent, parent.dtype)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, first, sign_mask, limit, top, parents, known = args

        def unsettled(group: _Group) -> Any:
            entries = group.magnitudes(sig.args[0], array, sign_mask)
            elsewhere = builder.icmp_signed("!=", group.load(sig.args[5], parents), group.splat(known))
            stays = builder.or_(elsewhere, group.at_least(entries, sig.args[4], top, sig.args[2].signed))
            return builder.and_(group.at_least(entries, sig.args[3], limit, sig.args[2].signed), stays)

        return _word(context, builder, sig.args[0], first, unsettled)

    return signature, generate


@intrinsic
def lowest_bit(_typing: Any, word: Any) -> Any:
    """Position of the lowest set bit of a word that is not zero."""
    signature = types.int64(types.uint64)

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate


@intrinsic
def bit_count(_typing: Any, word: Any) -> Any:
    """How many bits of a word are set."""
    signature = types.int64(types.uint64)

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return signature, generate
