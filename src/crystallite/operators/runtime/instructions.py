"""Things numba does not make of Python: sums kept in registers, lines copied and transposed.

All are written as LLVM instructions, which LLVM lowers to whatever the processor has: AVX, NEON, …
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from crystallite.core.compiling import REGISTER_BITS, cgutils, intrinsic, ir, numba, types
from crystallite.operators.runtime.tile import PANEL, Tile

__all__ = [
    "PANEL",
    "copy_line",
    "copy_numbers",
    "dot_rows",
    "line_product",
    "tile_product",
    "transpose_tile",
]

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SHORT = 256  # bits of the registers of kernels whose rows are often shorter than a wider one


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
            raise numba.TypingError("tile_product: expected C-contiguous arrays")
        index = types.intp
        signature = types.void(start, left, index, index, weight, index, out, index)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, _, row, first, _, panel, _, column = args
            arrays = [context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 1, 4, 6)]
            shapes = [cgutils.unpack_tuple(builder, array.shape) for array in arrays]
            start_array, left_array, weight_array, out_array = arrays
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
            tile = Tile(context, builder, sig.args[1].dtype, rows, panels, bits=_SHORT)
            for (r, p, q), slot in tile.sums.items():
                builder.store(tile.load(start_array, builder.add(starts[r], columns[p]), q), slot)
            with cgutils.for_range(builder, depth) as loop:
                lines = [builder.add(start, builder.mul(loop.index, width)) for start in weight_panels]
                weights = {
                    (p, q): tile.load(weight_array, line, q) for p, line in enumerate(lines) for q in tile.lane_groups
                }
                states = [tile.splat(left_array, builder.add(start, loop.index)) for start in left_rows]
                for (r, p, q), slot in tile.sums.items():
                    tile.add_product(slot, states[r], weights[p, q])
            for (r, p, q), slot in tile.sums.items():
                tile.store(builder.load(slot), out_array, builder.add(out_rows[r], columns[p]), q)
            return context.get_dummy_value()

        return signature, generate

    return product


def line_product(rows: int, panels: int) -> Any:
    """Compiled f(weight, row, bias, relu, lines, panel, first, out, place): rows of out = σ(weight @ lines + bias).

    lines and out are (panels, features, numbers of a cache line): a panel is as many samples as fit into a line, and a
    line is one feature of these samples. So many panels are computed, from `panel` on. Columns of `weight` meet the
    lines from `first` on; its rows from `row` on become the lines of out from `place` on. bias starts there too, or is
    empty. relu: σ is the ReLU, else nothing.
    """

    @intrinsic
    def product(
        _typing: Any, weight: Any, row: Any, bias: Any, relu: Any, lines: Any, panel: Any, first: Any, out: Any,
        place: Any,
    ) -> Any:  # fmt: skip
        if any(array.layout != "C" for array in (weight, bias, lines, out)):
            raise numba.TypingError("line_product: expected C-contiguous arrays")
        index = types.intp
        signature = types.void(weight, index, bias, types.boolean, lines, index, index, out, index)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, row, _, relu, _, panel, first, _, place = args
            arrays = [context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 2, 4, 7)]
            weight, bias, lines, out = arrays
            shapes = [cgutils.unpack_tuple(builder, array.shape) for array in arrays]
            (_, depth), (biases,), (_, features, _), (_, written, _) = shapes
            numbers = 512 // sig.args[0].dtype.bitwidth
            tile = Tile(context, builder, sig.args[0].dtype, rows, panels, numbers)
            width = ir.Constant(_I64, numbers)

            def shifted(start: Any, by: int) -> Any:
                return builder.add(start, ir.Constant(_I64, by))

            def line(p: int, height: Any, feature: Any) -> Any:
                return builder.mul(builder.add(builder.mul(shifted(panel, p), height), feature), width)

            starts = [builder.mul(shifted(row, r), depth) for r in range(rows)]
            begins = [line(p, features, first) for p in range(panels)]
            zero = ir.Constant(tile.vector, [0.0] * tile.lanes)
            for slot in tile.sums.values():
                builder.store(zero, slot)
            with builder.if_then(builder.icmp_signed(">", biases, ir.Constant(_I64, 0))):
                for (r, _, _), slot in tile.sums.items():
                    builder.store(tile.splat(bias, shifted(place, r)), slot)
            with cgutils.for_range(builder, depth) as loop:
                here = [builder.add(begin, builder.mul(loop.index, width)) for begin in begins]
                states = {(p, q): tile.load(lines, here[p], q) for p in range(panels) for q in tile.lane_groups}
                for r in range(rows):
                    factor = tile.splat(weight, builder.add(starts[r], loop.index))
                    for p, q in states:
                        tile.add_product(tile.sums[r, p, q], factor, states[p, q])
            for (r, p, q), slot in tile.sums.items():
                value = builder.load(slot)
                negative = builder.and_(  # NaN stays
                    builder.fcmp_ordered("<", value, zero),
                    builder.select(
                        relu,
                        ir.Constant(ir.VectorType(ir.IntType(1), tile.lanes), [1] * tile.lanes),
                        ir.Constant(ir.VectorType(ir.IntType(1), tile.lanes), [0] * tile.lanes),
                    ),
                )
                value = builder.select(negative, zero, value)
                tile.store(value, out, line(p, written, shifted(place, r)), q)
            return context.get_dummy_value()

        return signature, generate

    return product


def dot_rows(rows: int, ways: int) -> Any:
    """Compiled f(weight, row, x, first, out, place): out[place + i] = weight[row + i] · x[first:], for `rows` i.

    weight is a matrix, x and out are vectors, all C-contiguous and of one dtype; the weight may be of 16 bits. ways:
    vectors of each row at a time; rows × ways sums hide the latency of a sum.
    """

    @intrinsic
    def dots(_typing: Any, weight: Any, row: Any, x: Any, first: Any, out: Any, place: Any) -> Any:
        if any(array.layout != "C" for array in (weight, x, out)):
            raise numba.TypingError("dot_rows: expected C-contiguous arrays")
        signature = types.void(weight, types.intp, x, types.intp, out, types.intp)

        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            _, row, _, first, _, place = args
            weight, x, out = (context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 2, 4))
            _, depth = cgutils.unpack_tuple(builder, weight.shape)
            stored, dtype = sig.args[0].dtype, sig.args[2].dtype
            tile = Tile(context, builder, dtype, rows, 1, ways * _SHORT // dtype.bitwidth, _SHORT)
            zero = ir.Constant(tile.vector, [0.0] * tile.lanes)
            for slot in tile.sums.values():
                builder.store(zero, slot)
            starts = [builder.mul(builder.add(row, ir.Constant(_I64, r)), depth) for r in range(rows)]
            lanes, one, zero_index = ir.Constant(_I64, tile.lanes), ir.Constant(_I64, 1), ir.Constant(_I64, 0)
            step = ir.Constant(_I64, ways * tile.lanes)
            by_step = builder.mul(builder.sdiv(depth, step), step)
            whole = builder.mul(builder.sdiv(depth, lanes), lanes)
            with cgutils.for_range_slice(builder, zero_index, by_step, step) as (k, _):
                states = {q: tile.load(x, builder.add(first, k), q) for q in tile.lane_groups}
                for (r, _, q), slot in tile.sums.items():
                    tile.add_product(slot, tile.load_wide(stored, weight, builder.add(starts[r], k), q), states[q])
            with cgutils.for_range_slice(builder, by_step, whole, lanes) as (k, _):
                state = tile.load(x, builder.add(first, k), 0)
                for r in range(rows):
                    tile.add_product(
                        tile.sums[r, 0, 0], tile.load_wide(stored, weight, builder.add(starts[r], k), 0), state
                    )
            long_enough = builder.icmp_signed(">=", depth, lanes)
            with builder.if_then(builder.and_(long_enough, builder.icmp_signed(">", depth, whole))):
                k = builder.sub(depth, lanes)  # the last ones; those of them that are done do not count again
                order = ir.Constant(ir.VectorType(_I64, tile.lanes), list(range(tile.lanes)))
                fresh = builder.icmp_signed(">=", builder.add(tile.all_lanes(k), order), tile.all_lanes(whole))
                state = tile.load(x, builder.add(first, k), 0)
                for r in range(rows):
                    product = builder.fmul(tile.load_wide(stored, weight, builder.add(starts[r], k), 0), state)
                    slot = tile.sums[r, 0, 0]
                    builder.store(builder.fadd(builder.load(slot), builder.select(fresh, product, zero)), slot)
            totals = tile.lane_sums([[builder.load(tile.sums[r, 0, q]) for q in tile.lane_groups] for r in range(rows)])
            for r, total in enumerate(totals):
                builder.store(total, tile.place(out, builder.add(place, ir.Constant(_I64, r))))
            with builder.if_then(builder.not_(long_enough)):
                for r in range(rows):
                    slot = tile.place(out, builder.add(place, ir.Constant(_I64, r)))
                    with cgutils.for_range_slice(builder, whole, depth, one) as (k, _):
                        left = tile.number(stored, weight, builder.add(starts[r], k))
                        tile.add_product(slot, left, builder.load(tile.place(x, builder.add(first, k))))
            return context.get_dummy_value()

        return signature, generate

    return dots


@intrinsic
def copy_line(_typing: Any, source: Any, line: Any, add: Any, target: Any, place: Any) -> Any:
    """target[place] = source[line] + add, each a cache line of numbers; C-contiguous and of one dtype."""
    if any(array.layout != "C" for array in (source, target)):
        raise numba.TypingError("copy_line: expected C-contiguous arrays")
    signature = types.void(source, types.intp, source.dtype, target, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        source, target = (context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 3))
        width = 512 // sig.args[0].dtype.bitwidth
        tile = Tile(context, builder, sig.args[0].dtype, 0, 0, width)
        begin, into = (builder.mul(args[i], ir.Constant(_I64, width)) for i in (1, 4))
        add = tile.repeated(args[2])
        for q in tile.lane_groups:
            tile.store(builder.fadd(tile.load(source, begin, q), add), target, into, q)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copy_numbers(_typing: Any, source: Any, start: Any, count: Any, add: Any, target: Any, into: Any) -> Any:
    """target[into + i] = source[start + i] + add for i up to `count`; vectors of one dtype that do not overlap.

    The source may be of 16 bits.
    """
    if any(array.layout != "C" for array in (source, target)):
        raise numba.TypingError("copy_numbers: expected C-contiguous arrays")
    signature = types.void(source, types.intp, types.intp, target.dtype, target, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, start, count, add, _, into = args
        source, target = (context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 4))
        stored = sig.args[0].dtype
        dtype = sig.args[4].dtype
        tiles = [
            Tile(context, builder, dtype, 0, 0, bits=bits) for bits in sorted({REGISTER_BITS, 256, 128}, reverse=True)
        ]
        zero, one = ir.Constant(_I64, 0), ir.Constant(_I64, 1)

        def copy(some: Any, i: Any) -> None:
            numbers = some.load_wide(stored, source, builder.add(start, i), 0)
            some.store(builder.fadd(numbers, some.repeated(add)), target, builder.add(into, i), 0)

        def copy_all(left: list[Any]) -> None:
            """By the longest register that is not longer than all."""
            if not left:
                with cgutils.for_range_slice(builder, zero, count, one) as (i, _):
                    number = tiles[0].number(stored, source, builder.add(start, i))
                    builder.store(builder.fadd(number, add), tiles[0].place(target, builder.add(into, i)))
                return
            some, lanes = left[0], ir.Constant(_I64, left[0].lanes)
            with builder.if_else(builder.icmp_signed(">=", count, lanes)) as (enough, short):
                with enough:
                    whole = builder.mul(builder.sdiv(count, lanes), lanes)
                    with cgutils.for_range_slice(builder, zero, whole, lanes) as (i, _):
                        copy(some, i)
                    with builder.if_then(builder.icmp_signed(">", count, whole)):
                        copy(some, builder.sub(count, lanes))  # the last ones; some of them are done already
                with short:
                    copy_all(left[1:])

        copy_all(tiles)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def transpose_tile(_typing: Any, source: Any, start: Any, stride: Any, target: Any, into: Any, step: Any) -> Any:
    """target[into + step·j + i] = source[start + stride·i + j] for i and j up to the numbers of a vector register.

    Both are vectors, C-contiguous and of one dtype.
    """
    if any(array.layout != "C" for array in (source, target)):
        raise numba.TypingError("transpose_tile: expected C-contiguous arrays")
    signature = types.void(source, types.intp, types.intp, target, types.intp, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _, start, stride, _, into, step = args
        source, target = (context.make_array(sig.args[i])(context, builder, args[i]) for i in (0, 3))
        tile = Tile(context, builder, sig.args[0].dtype, 0, 0)
        lanes = tile.lanes
        low = [lane // 2 + lane % 2 * lanes for lane in range(lanes)]  # one number from each in turn, from the first on
        masks = [ir.Constant(ir.VectorType(_I32, lanes), [lane + h for lane in low]) for h in (0, lanes // 2)]

        def place(begin: Any, by: Any, i: int) -> Any:
            return builder.add(begin, builder.mul(by, ir.Constant(_I64, i)))

        rows = [tile.load(source, place(start, stride, i), 0) for i in range(lanes)]
        for _ in range(lanes.bit_length() - 1):  # perfect shuffles: log₂ of them turn rows into columns
            pairs = zip(rows[: lanes // 2], rows[lanes // 2 :], strict=True)
            rows = [builder.shuffle_vector(a, b, mask) for a, b in pairs for mask in masks]
        for j, row in enumerate(rows):
            tile.store(row, target, place(into, step, j), 0)
        return context.get_dummy_value()

    return signature, generate
