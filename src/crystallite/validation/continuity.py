"""Whether results change gradually with the significance level (paper, section 5, validation stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["LEAST_LEVELS", "Jump", "find_jumps"]

LEAST_LEVELS = 4  # with fewer, every step is most of the change
_LARGE_STEP = 0.5  # a step is a jump if it makes this share of a quantity's whole change, …
_LARGE_CHANGE = 0.1  # … and more than this: of the original's metric, of 1 for shares and deviations


class Point(Protocol):
    """What is looked at, of the points of a sweep."""

    @property
    def name(self) -> str: ...
    @property
    def rule(self) -> str: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def metric(self) -> float | None: ...
    @property
    def agreement(self) -> float | None: ...
    @property
    def mean_deviation(self) -> float: ...
    @property
    def macs_share(self) -> float: ...
    @property
    def largest_share(self) -> float: ...
    @property
    def dormant_share(self) -> float: ...


@dataclass(frozen=True)
class Jump:
    """Two neighbouring levels between which most of the whole change of a quantity happens."""

    quantity: str
    rule: str
    alpha: float | None
    levels: tuple[str, str]  # the milder one first
    values: tuple[float, float]
    share: float  # of the whole change

    def touches(self, point: Point) -> bool:
        """Whether the point is one of the two levels."""
        return (self.rule, self.alpha) == (point.rule, point.alpha) and point.name in self.levels

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f", α {self.alpha:.3g}"
        change = f"{self.values[0]:.3g} → {self.values[1]:.3g} between levels {self.levels[0]} and {self.levels[1]}"
        return f"Jump: {self.quantity} {change} ({self.rule}{alpha}), {self.share:.0%} of its whole change in one step."


def find_jumps(points: Sequence[Point], original: float | None) -> list[Jump]:
    """Jumps of outputs and of structure along points of one rule, from the mildest level to the strictest.

    Args:
        points: In the order of their levels. Fewer than four say nothing about continuity.
        original: The original's metric, the scale of its changes.
    """
    quantities: dict[str, tuple[list[float | None], float]] = {
        "the metric": ([p.metric for p in points], abs(original or 0.0)),
        "agreement": ([p.agreement for p in points], 1.0),
        "mean deviation": ([p.mean_deviation for p in points], 1.0),
        "multiply-adds of the blocks": ([p.macs_share for p in points], 1.0),
        "largest block": ([p.largest_share for p in points], 1.0),
        "dormant neurons": ([p.dormant_share for p in points], 1.0),
    }
    found = []
    for quantity, (values, scale) in quantities.items():
        numbers = np.array([np.nan if v is None else v for v in values], float)
        if len(numbers) < LEAST_LEVELS or not np.isfinite(numbers).all():
            continue
        whole, steps = np.ptp(numbers), np.abs(np.diff(numbers))
        large = (steps > _LARGE_STEP * whole) & (steps > _LARGE_CHANGE * scale)
        for i in np.flatnonzero(large).tolist():
            a, b = points[i], points[i + 1]
            levels, pair = (a.name, b.name), (float(numbers[i]), float(numbers[i + 1]))
            found.append(Jump(quantity, a.rule, a.alpha, levels, pair, float(steps[i] / whole)))
    return found
