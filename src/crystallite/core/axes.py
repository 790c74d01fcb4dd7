"""Axes of a chart: where a value lies, and the ticks that say so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from crystallite.core.drawing import Box, Label, Line, Shape

__all__ = ["HEIGHT", "WIDTH", "Axis", "error_share", "finite", "frame", "legend", "number", "percent"]

WIDTH, HEIGHT = 360, 220  # of every chart: about as wide as a phone, so that text keeps its size there
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 342, 22, 180


@dataclass(frozen=True)
class Axis:
    """A range of values, even or logarithmic, and the words under it."""

    low: float
    high: float
    title: str
    log: bool = False
    share: bool = False  # ticks as percentages

    @classmethod
    def over(cls, values: Iterable[Any], title: str, *, log: bool = False, share: bool = False) -> Axis:
        """The axis that holds all values, with a little room; logarithmic only over a factor of ten or more.

        >>> Axis.over([0.0, 1.0], "kept", log=True)
        Axis(low=-0.05, high=1.05, title='kept', log=False, share=False)
        """
        found = finite(values)
        log = log and bool(found) and 0 < 10 * min(found) <= max(found)
        low, high = (min(found), max(found)) if found else (0.0, 1.0)
        if log:
            room = max((high / low) ** 0.05, 1.05)
            return cls(low / room, high * room, title, True, share)
        room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, title, False, share)

    def part(self, value: float) -> float:
        """Where a value lies between the ends, in [0, 1]."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def x(self, value: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * min(max(self.part(value), 0.0), 1.0)

    def y(self, value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(max(self.part(value), 0.0), 1.0)

    @property
    def ticks(self) -> list[float]:
        """About five round values.

        >>> Axis(0.0, 1.0, "").ticks
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
        """
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**e for e in range(first, last + 1, max(1, -(-(last - first) // 4)))]
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{i * step:.12g}") for i in range(first, last + 1)]

    def text(self, value: float) -> str:
        return percent(value) if self.share else number(value)


def frame(x: Axis, y: Axis) -> list[Shape]:
    """Rules, ticks and titles of both axes."""
    shapes: list[Shape] = []
    for value in y.ticks:
        shapes.append(Line(((_LEFT, y.y(value)), (_RIGHT, y.y(value))), "rule", 1))
        shapes.append(Label(_LEFT - 5, y.y(value) + 3.5, y.text(value), anchor="end", size=10))
    for value in x.ticks:
        shapes.append(Line(((x.x(value), _BOTTOM), (x.x(value), _BOTTOM + 4)), "muted", 1))
        shapes.append(Label(x.x(value), _BOTTOM + 15, x.text(value), anchor="middle", size=10))
    shapes.append(Line(((_LEFT, _BOTTOM), (_RIGHT, _BOTTOM)), "muted", 1))
    shapes.append(Label((_LEFT + _RIGHT) / 2, _BOTTOM + 32, x.title, anchor="middle"))
    shapes.append(Label(4, 11, y.title, "ink"))
    return shapes


def legend(entries: list[tuple[str, str]], top: float = HEIGHT + 4) -> tuple[list[Shape], int]:
    """(text, colour) one below the other, and the height they take."""
    shapes: list[Shape] = []
    for i, (text, colour) in enumerate(entries):
        shapes.append(Box(_LEFT, top + 16 * i, 10, 10, colour))
        shapes.append(Label(_LEFT + 16, top + 16 * i + 9, text if len(text) <= 52 else "…" + text[-51:]))
    return shapes, 16 * len(entries) + 6


def finite(values: Iterable[Any]) -> list[float]:
    """The numbers among values that may be missing, words or not finite."""
    return [float(v) for v in values if isinstance(v, (int, float, np.number)) and math.isfinite(v)]


def number(value: float) -> str:
    """A number as short as four digits allow.

    >>> [number(v) for v in (0.0, 0.25, 1234567.0, 3.2e-7, 12.0)]
    ['0', '0.25', '1.235M', '3.2e-07', '12']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """A share as a percentage; only all of it is 100%.

    >>> [percent(s) for s in (0.0, 0.0123, 0.5, 0.99967, 0.999999, 1.0)]
    ['0%', '1.23%', '50%', '99.97%', 'over 99.99%', '100%']
    """
    if 0.9995 <= share < 1:
        return f"{100 * share:.4g}%" if share < 0.99995 else "over 99.99%"
    return f"{100 * share:.3g}%"


def error_share(share: float) -> str:
    """A relative error as a percentage, none of which is said to be 0.

    >>> [error_share(s) for s in (0.0, 2e-6, 0.0123)]
    ['below 0.01%', 'below 0.01%', '1.23%']
    """
    return "below 0.01%" if share < 5e-5 else f"{share:.2%}"
