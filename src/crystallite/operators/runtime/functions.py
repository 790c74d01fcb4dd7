"""Functions of one number as LLVM instructions without branches, so that loops over them run by the vector."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from crystallite.core.compiling import intrinsic, ir, types

__all__ = ["erf", "sigmoid", "tanh"]

_FUSED = ["contract"]  # a product and a sum may become one instruction
# erf x = x·p(x²)/q(x²) for |x| ≤ 4, highest power first; beyond, float32 knows only 1
_ERF_P = (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
    -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02,
)  # fmt: skip
_ERF_Q = (
    -1.45660718464996e-05,
    -2.13374055278905e-04,
    -1.68282697438203e-03,
    -7.37332916720468e-03,
    -1.42647390514189e-02,
)


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

    def polynomial(self, x: Any, coefficients: Sequence[float]) -> Any:
        """By Horner's rule, the highest power first."""
        value = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            value = self.multiply_add(value, x, self.constant(coefficient))
        return value

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


@intrinsic
def erf(_typing: Any, x: Any) -> Any:
    """The error function, in the precision of x."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if sig.args[0].bitwidth == 64:
            exact = types.float64(types.float64)
            return context.get_function(math.erf, exact)(builder, args)
        real = _Real(context, builder, sig.args[0])
        bounded = real.bounded(args[0], 4.0)
        square = builder.fmul(bounded, bounded)
        above = builder.fmul(bounded, real.polynomial(square, _ERF_P))
        value = builder.fdiv(above, real.polynomial(square, _ERF_Q))
        for bound, limit in ((">=", 1.0), ("<=", -1.0)):  # exactly, so that 1 + erf x vanishes
            value = builder.select(
                builder.fcmp_ordered(bound, args[0], real.constant(4 * limit)), real.constant(limit), value
            )
        return value

    return x(x), generate
