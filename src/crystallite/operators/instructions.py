"""Two things numba does not make of Python: sums kept in registers, and sigmoid and tanh by the vector.

Both are written as LLVM instructions, which LLVM lowers to whatever the processor has: AVX, NEON, …
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

__all__ = ["PANEL", "sigmoid", "tanh", "tile_product"]

PANEL = 16
"""Weights lie in panels, (panels, depth, 16): 16 neighbouring outputs fill a cache line, a panel is read in order."""

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FUSED = ["contract"]  # a product and a sum may become one instruction


class _Tile:
    """rows × panels sums in vector registers of 256 bits."""

    def __init__(self, context: Any, builder: Any, dtype: Any, rows: int, panels: int):
        self.builder, self.alignment, self.lanes = builder, dtype.bitwidth // 8, 256 // dtype.bitwidth
        self.vector = ir.VectorType(context.get_value_type(dtype), self.lanes)
        self.lane_groups = range(0, PANEL, self.lanes)
        keys = [(r, p, q) for r in range(rows) for p in range(panels) for q in self.lane_groups]
        # stack slots become registers, as nothing else reaches them
        self.sums = {key: cgutils.alloca_once(builder, self.vector) for key in keys}

    def _pointer(self, data: Any, offset: Any, lane: int) -> Any:
        place = self.builder.gep(data, [self.builder.add(offset, ir.Constant(_I64, lane))])
        return self.builder.bitcast(place, self.vector.as_pointer())

    def load(self, data: Any, offset: Any, lane: int) -> Any:
        return self.builder.load(self._pointer(data, offset, lane), align=self.alignment)

    def store(self, value: Any, data: Any, offset: Any, lane: int) -> None:
        self.builder.store(value, self._pointer(data, offset, lane), align=self.alignment)

    def splat(self, data: Any, offset: Any) -> Any:
        """One number in every lane."""
        scalar = self.builder.load(self.builder.gep(data, [offset]))
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, undefined, zeros)

    def add_product(self, slot: Any, a: Any, b: Any) -> None:
        product = self.builder.fmul(a, b, flags=_FUSED)
        self.builder.store(self.builder.fadd(self.builder.load(slot), product, flags=_FUSED), slot)


def tile_product(rows: int, panels: int) -> Any:
    """Compiled f(start, left, row, first, weight, panel, out, column): a tile of out = start + left @ weight.

    The tile begins at `row` and `panel`. Left columns begin at `first`, those of start and out at `column`; start has
    one row for all, or as many as out. left, start and out are matrices, weight (panels, depth, 16); all C-contiguous
    and of one dtype.
    """

    @intrinsic
    def product(
        _typing: Any, start: Any, left: Any, row: Any, first: Any, weight: Any, panel: Any, out: Any, column: Any
    ) -> Any:
        if any(array.layout != "C" for array in (start, left, weight, out)):
            raise TypingError("tile_product: expected C-contiguous arrays")
        index = types.intp
        signature = types.void(start, left, index, index, weight, index, out, index)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, _, row, first, _, panel, _, column = args
            arrays = [context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 1, 4, 6)]
            shapes = [cgutils.unpack_tuple(builder, array.shape) for array in arrays]
            start_data, left_data, weight_data, out_data = (array.data for array in arrays)
            (start_rows, start_width), (_, left_width), (_, depth, _), (_, out_width) = shapes
            width, zero = ir.Constant(_I64, PANEL), ir.Constant(_I64, 0)
            one_start = builder.icmp_signed("==", start_rows, ir.Constant(_I64, 1))

            def multiples(first: Any, count: int, stride: Any, offset: Any) -> list[Any]:
                numbers = [builder.add(first, ir.Constant(_I64, i)) for i in range(count)]
                return [builder.add(builder.mul(number, stride), offset) for number in numbers]

            left_rows = multiples(row, rows, left_width, first)
            weight_panels = multiples(panel, panels, builder.mul(depth, width), zero)
            columns = multiples(panel, panels, width, column)
            out_rows = multiples(row, rows, out_width, zero)
            start_stride = builder.select(one_start, zero, start_width)
            starts = multiples(row, rows, start_stride, zero)
            tile = _Tile(context, builder, sig.args[1].dtype, rows, panels)
            for (r, p, q), slot in tile.sums.items():
                builder.store(tile.load(start_data, builder.add(starts[r], columns[p]), q), slot)
            with cgutils.for_range(builder, depth) as loop:
                lines = [builder.add(start, builder.mul(loop.index, width)) for start in weight_panels]
                weights = {
                    (p, q): tile.load(weight_data, line, q) for p, line in enumerate(lines) for q in tile.lane_groups
                }
                states = [tile.splat(left_data, builder.add(start, loop.index)) for start in left_rows]
                for (r, p, q), slot in tile.sums.items():
                    tile.add_product(slot, states[r], weights[p, q])
            for (r, p, q), slot in tile.sums.items():
                tile.store(builder.load(slot), out_data, builder.add(out_rows[r], columns[p]), q)
            return context.get_dummy_value()

        return signature, generate

    return product


class _Real:
    """Arithmetic on one float32 or float64 number whose constants have its own type."""

    def __init__(self, context: Any, builder: Any, dtype: Any):
        self.builder, self.type = builder, context.get_value_type(dtype)
        self.single = dtype.bitwidth == 32
        self.whole = ir.IntType(dtype.bitwidth)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, float(np.float32(value)) if self.single else float(value))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSED), c, flags=_FUSED)

    def bounded(self, x: Any, bound: float) -> Any:
        """x within ±bound; NaN stays, as every comparison with it fails."""
        low, high = self.constant(-bound), self.constant(bound)
        x = self.builder.select(self.builder.fcmp_ordered(">", x, high), high, x)
        return self.builder.select(self.builder.fcmp_ordered("<", x, low), low, x)

    def exponential(self, x: Any) -> tuple[Any, Any]:
        """(p, 2ⁿ) with eˣ = 2ⁿ·(p + 1), by x = n·ln 2 + r, |r| ≤ ln 2 / 2, and the Taylor series of p = eʳ − 1.

        eˣ within 2 units in the last place; p keeps its relative precision near 0.
        """
        builder = self.builder
        mantissa, bias, bound, terms = (23, 127, 87.0, 7) if self.single else (52, 1023, 708.0, 13)
        high = 0.693359375 if self.single else 0.6931471803691238  # ln 2 with so few digits that n·high is exact
        low = float(np.log(np.longdouble(2)) - np.longdouble(high))
        x = self.bounded(x, bound)
        shift = self.constant(1.5 * 2.0**mantissa)  # adding it rounds to a whole number, which fills the lowest bits
        shifted = self.multiply_add(x, self.constant(1 / np.log(2)), shift)
        n = builder.fsub(shifted, shift)
        r = self.multiply_add(n, self.constant(-low), self.multiply_add(n, self.constant(-high), x))
        p = self.constant(0)
        for factorial in np.cumprod(np.arange(1.0, terms + 1))[::-1]:
            p = self.multiply_add(p, r, self.constant(1 / factorial))
        exponent = builder.add(builder.bitcast(shifted, self.whole), ir.Constant(self.whole, bias))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(self.whole, mantissa)), self.type)
        return builder.fmul(p, r), power


@intrinsic
def sigmoid(_typing: Any, x: Any) -> Any:
    """1 / (1 + e⁻ˣ), in the precision of x."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        real = _Real(context, builder, sig.args[0])
        p, power = real.exponential(builder.fneg(args[0]))
        exponential, one = real.multiply_add(p, power, power), real.constant(1)
        return builder.fdiv(one, builder.fadd(one, exponential))

    return x(x), generate


@intrinsic
def tanh(_typing: Any, x: Any) -> Any:
    """(e²ˣ − 1) / (e²ˣ + 1), in the precision of x."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        real = _Real(context, builder, sig.args[0])
        p, power = real.exponential(builder.fadd(args[0], args[0]))
        less_one = real.multiply_add(p, power, builder.fsub(power, real.constant(1)))
        return builder.fdiv(less_one, builder.fadd(less_one, real.constant(2)))

    return x(x), generate
