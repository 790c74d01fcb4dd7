"""Vector registers of sums, and what moves between them and arrays, for kernels written as LLVM instructions.

Weights of 16 bits come as integers, as numba knows no such numbers: unsigned ones are bfloat16, signed ones float16.
They become float32 in registers.
"""

from __future__ import annotations

from typing import Any

from crystallite.core.compiling import REGISTER_BITS, cgutils, ir, types
from crystallite.core.index_checks import CHECK_INDICES, check_span

__all__ = ["PANEL", "Tile"]

PANEL = 16
"""Weights lie in panels, (panels, depth, 16): 16 neighbouring outputs fill a cache line, a panel is read in order."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FUSED = ["contract"]  # a product and a sum may become one instruction


class Tile:
    """rows × panels × width sums in vector registers of so many bits."""

    def __init__(
        self, context: Any, builder: Any, dtype: Any, rows: int, panels: int, width: int = PANEL,
        bits: int = REGISTER_BITS,
    ):  # fmt: skip
        self.context, self.builder = context, builder
        self.alignment, self.lanes = dtype.bitwidth // 8, bits // dtype.bitwidth
        self.vector = ir.VectorType(context.get_value_type(dtype), self.lanes)
        self.lane_groups = range(0, width, self.lanes)
        keys = [(r, p, q) for r in range(rows) for p in range(panels) for q in self.lane_groups]
        # stack slots become registers, as nothing else reaches them
        self.sums = {key: cgutils.alloca_once(builder, self.vector) for key in keys}

    def _pointer(self, array: Any, offset: Any, lane: int) -> Any:
        first = self.builder.add(offset, ir.Constant(_I64, lane))
        check_span(self.context, self.builder, array, first, self.lanes)
        return self.builder.bitcast(self.builder.gep(array.data, [first]), self.vector.as_pointer())

    def load(self, array: Any, offset: Any, lane: int) -> Any:
        return self.builder.load(self._pointer(array, offset, lane), align=self.alignment)

    def load_where(self, bits: Any, array: Any, offset: Any, lane: int) -> Any:
        """The numbers whose bits are set, 0 in other lanes: those need not lie in the array."""
        first = self.builder.add(offset, ir.Constant(_I64, lane))
        self._check_where(bits, array, first)
        flags, pointer = ir.VectorType(ir.IntType(1), self.lanes), self.vector.as_pointer()
        name = f"llvm.masked.load.v{self.lanes}f{8 * self.alignment}.p0"
        kind = ir.FunctionType(self.vector, [pointer, _I32, flags, self.vector])
        load = cgutils.get_or_insert_function(self.builder.module, kind, name)
        here = self.builder.bitcast(self.builder.gep(array.data, [first]), pointer)
        nothing = ir.Constant(self.vector, [0.0] * self.lanes)
        return self.builder.call(
            load, [here, ir.Constant(_I32, self.alignment), self.builder.bitcast(bits, flags), nothing]
        )

    def _check_where(self, bits: Any, array: Any, first: Any) -> None:
        if CHECK_INDICES:
            for lane in range(self.lanes):
                bit = self.builder.and_(bits, ir.Constant(bits.type, 1 << lane))
                with self.builder.if_then(self.builder.icmp_unsigned("!=", bit, ir.Constant(bits.type, 0))):
                    check_span(self.context, self.builder, array, self.builder.add(first, ir.Constant(_I64, lane)), 1)

    def load_wide(self, dtype: Any, array: Any, offset: Any, lane: int) -> Any:
        """The same from an array of the tile's numbers or of 16 bits, of which dtype says which they are."""
        if not isinstance(dtype, types.Integer):
            return self.load(array, offset, lane)
        first = self.builder.add(offset, ir.Constant(_I64, lane))
        check_span(self.context, self.builder, array, first, self.lanes)
        halves = ir.VectorType(_I16, self.lanes)
        pointer = self.builder.bitcast(self.builder.gep(array.data, [first]), halves.as_pointer())
        return self._widened(dtype, self.builder.load(pointer, align=2), lambda kind: ir.VectorType(kind, self.lanes))

    def number(self, dtype: Any, array: Any, offset: Any) -> Any:
        """One number of such an array."""
        value = self.builder.load(self.place(array, offset))
        return self._widened(dtype, value, lambda kind: kind) if isinstance(dtype, types.Integer) else value

    def _widened(self, dtype: Any, bits: Any, shaped: Any) -> Any:
        """float32 of 16 bits."""
        if dtype.signed:
            return self.builder.fpext(self.builder.bitcast(bits, shaped(ir.HalfType())), shaped(ir.FloatType()))
        wide, sixteen = self.builder.zext(bits, shaped(_I32)), ir.Constant(_I32, 16)
        shift = sixteen if wide.type == _I32 else ir.Constant(wide.type, [sixteen] * self.lanes)
        return self.builder.bitcast(self.builder.shl(wide, shift), shaped(ir.FloatType()))

    def store(self, value: Any, array: Any, offset: Any, lane: int) -> None:
        self.builder.store(value, self._pointer(array, offset, lane), align=self.alignment)

    def place(self, array: Any, offset: Any) -> Any:
        """Where one number of an array lies."""
        check_span(self.context, self.builder, array, offset, 1)
        return self.builder.gep(array.data, [offset])

    def splat(self, array: Any, offset: Any) -> Any:
        """One number of an array in every lane."""
        return self.repeated(self.builder.load(self.place(array, offset)))

    def repeated(self, scalar: Any) -> Any:
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def all_lanes(self, index: Any) -> Any:
        """An index in every lane."""
        undefined = ir.Constant(ir.VectorType(_I64, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, index, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(
            first, undefined, ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        )

    def lane_sums(self, rows: list[list[Any]]) -> list[Any]:
        """The sum of the lanes of each row's vectors: neighbours first, of two rows in one instruction.

        Which rows are summed together does not change the order of a row's additions.
        """
        vectors = []
        for parts in rows:
            joined = parts[0]
            for part in parts[1:]:
                joined = self.builder.fadd(joined, part)
            vectors.append(joined)
        width = self.lanes  # of the sums that are left of each row
        while width > 1:
            pairs = [vectors[i : i + 2] for i in range(0, len(vectors), 2)]
            vectors = []
            for pair in pairs:
                count = len(pair) * pair[0].type.count
                even, odd = (
                    ir.Constant(ir.VectorType(_I32, count // 2), list(range(side, count, 2))) for side in (0, 1)
                )
                vectors.append(
                    self.builder.fadd(*(self.builder.shuffle_vector(pair[0], pair[-1], side) for side in (even, odd)))
                )
            width //= 2
        places = [(vector, lane) for vector in vectors for lane in range(vector.type.count)]
        return [self.builder.extract_element(vector, ir.Constant(_I32, lane)) for vector, lane in places]

    def add_product(self, slot: Any, a: Any, b: Any) -> None:
        product = self.builder.fmul(a, b, flags=_FUSED)
        self.builder.store(self.builder.fadd(self.builder.load(slot), product, flags=_FUSED), slot)
