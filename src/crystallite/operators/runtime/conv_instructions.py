"""Products of weights with the lines of an image, in registers: convolutions as LLVM instructions."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from crystallite.core.compiling import REGISTER_BITS, cgutils, intrinsic, ir, numba, types
from crystallite.core.prefetch import ask_for
from crystallite.operators.runtime.tile import Tile

__all__ = ["inside_product", "shifted_product"]

_I64 = ir.IntType(64)
_AHEAD = 1024  # bytes of each channel that are asked for before they are needed


def shifted_product(rows: int, vectors: int) -> Any:
    """Compiled f(weight, row, steps, numbers, first, out): registers of rows of a product with shifted lines.

    out[row + r, first + j] = Σ weight[row + r, d] · numbers[steps[d] + first + j] for `rows` r and the lanes j of so
    many registers. weight and out are matrices, numbers and steps vectors; all C-contiguous, numbers of one dtype.
    """

    @intrinsic
    def product(_typing: Any, weight: Any, row: Any, steps: Any, numbers: Any, first: Any, out: Any) -> Any:
        if any(array.layout != "C" for array in (weight, steps, numbers, out)):
            raise numba.TypingError("shifted_product: expected C-contiguous arrays")
        signature = types.void(weight, types.intp, steps, numbers, types.intp, out)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, row, _, _, first, _ = args
            arrays = [context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 2, 3, 5)]
            weight, steps, numbers, out = arrays
            _, depth = cgutils.unpack_tuple(builder, weight.shape)
            _, written = cgutils.unpack_tuple(builder, out.shape)
            dtype = sig.args[0].dtype
            tile = Tile(context, builder, dtype, rows, 1, vectors * REGISTER_BITS // dtype.bitwidth)
            zero = ir.Constant(tile.vector, [0.0] * tile.lanes)
            for slot in tile.sums.values():
                builder.store(zero, slot)
            places = [builder.add(row, ir.Constant(_I64, r)) for r in range(rows)]
            starts = [builder.mul(place, depth) for place in places]
            with cgutils.for_range(builder, depth) as loop:
                here = builder.add(builder.load(tile.place(steps, loop.index)), first)
                states = {q: tile.load(numbers, here, q) for q in tile.lane_groups}
                for r in range(rows):
                    factor = tile.splat(weight, builder.add(starts[r], loop.index))
                    for q in tile.lane_groups:
                        tile.add_product(tile.sums[r, 0, q], factor, states[q])
            for (r, _, q), slot in tile.sums.items():
                tile.store(builder.load(slot), out, builder.add(builder.mul(places[r], written), first), q)
            return context.get_dummy_value()

        return signature, generate

    return product


def inside_product(rows: int, vectors: int) -> Any:
    """Compiled f(weight, row, steps, inside, vector, numbers, first, starts, out, begins): an image meets its kernels.

    out[begins[row + r] + first + j] = starts[row + r] + Σ weight[row + r, d] · numbers[steps[d] + first + j] for `rows`
    r and the lanes j of so many registers; a term counts where a bit says that it lies inside the image. The bits
    are (places of the kernel, registers), of which `vector` is the first; d runs over the places of each channel.
    weight is a matrix, what is not named so far vectors; all C-contiguous, numbers of one dtype.
    """

    @intrinsic
    def product(
        _typing: Any, weight: Any, row: Any, steps: Any, inside: Any, vector: Any, numbers: Any, first: Any,
        starts: Any, out: Any, begins: Any,
    ) -> Any:  # fmt: skip
        if any(array.layout != "C" for array in (weight, steps, inside, numbers, starts, out, begins)):
            raise numba.TypingError("inside_product: expected C-contiguous arrays")
        index = types.intp
        signature = types.void(weight, index, steps, inside, index, numbers, index, starts, out, begins)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, row, _, _, vector, _, first, _, _, _ = args
            arrays = [context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 2, 3, 5, 7, 8, 9)]
            weight, steps, inside, numbers, starts, out, begins = arrays
            _, depth = cgutils.unpack_tuple(builder, weight.shape)
            places, registers = cgutils.unpack_tuple(builder, inside.shape)
            dtype = sig.args[0].dtype
            tile = Tile(context, builder, dtype, rows, 1, vectors * REGISTER_BITS // dtype.bitwidth)
            lines = [builder.add(row, ir.Constant(_I64, r)) for r in range(rows)]
            for (r, _, _), slot in tile.sums.items():
                builder.store(tile.splat(starts, lines[r]), slot)
            weights = [builder.mul(line, depth) for line in lines]
            channels = builder.sdiv(depth, places)

            def ask_for_registers(array: Any, begin: Any, write: bool) -> None:
                for q in tile.lane_groups:
                    ask_for(builder, array, builder.add(begin, ir.Constant(_I64, q)), _AHEAD, write=write)

            for line in lines:
                ask_for_registers(out, builder.add(builder.load(tile.place(begins, line)), first), True)
            with cgutils.for_range(builder, channels) as channel:
                begin = builder.load(tile.place(steps, builder.mul(channel.index, places)))
                ask_for_registers(numbers, builder.add(begin, first), False)
                with cgutils.for_range(builder, places) as place:
                    d = builder.add(builder.mul(channel.index, places), place.index)
                    here = builder.add(builder.load(tile.place(steps, d)), first)
                    bits = builder.add(builder.mul(place.index, registers), vector)
                    states = {}
                    for i, q in enumerate(tile.lane_groups):
                        some = builder.load(tile.place(inside, builder.add(bits, ir.Constant(_I64, i))))
                        states[q] = tile.load_where(some, numbers, here, q)
                    for r in range(rows):
                        factor = tile.splat(weight, builder.add(weights[r], d))
                        for q in tile.lane_groups:
                            tile.add_product(tile.sums[r, 0, q], factor, states[q])
            for (r, _, q), slot in tile.sums.items():
                begin = builder.add(builder.load(tile.place(begins, lines[r])), first)
                tile.store(builder.load(slot), out, begin, q)
            return context.get_dummy_value()

        return signature, generate

    return product
