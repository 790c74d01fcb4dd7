"""Corrections for testing many weights at once, as magnitude thresholds: never a p-value per entry.

p(w) = P_f0(|w0| ≥ |w|) falls as |w| grows, so each correction rejects exactly the entries above some magnitude. What it
needs from the matrix is only how many entries lie above a few magnitudes, which a histogram answers.
"""

from __future__ import annotations

from collections.abc import Callable

from crystallite.annealing.distributions import Null
from crystallite.annealing.histogram import MagnitudeHistogram

__all__ = ["benjamini_hochberg_level", "bonferroni_level", "holm_level"]


def bonferroni_level(level: float, tests: int) -> float:
    """level / m: the chance of even one false edge among m is at most `level`.

    >>> bonferroni_level(0.01, 1000)
    1e-05
    """
    return level / max(tests, 1)


def holm_level(null: Null, level: float, histogram: MagnitudeHistogram) -> float:
    """The level at which Holm's step-down procedure stops: α/(m − k), k = its number of rejections.

    Holm rejects p₍ᵢ₎ while p₍ᵢ₎ ≤ α/(m − i + 1). With k entries rejected so far the next ones face α/(m − k), so k is
    the smallest solution of k = #{p ≤ α/(m − k)}, reached by iterating from k = 0. Same guarantee as Bonferroni,
    never fewer edges. O(rows · cols) for a few passes; a handful of iterations.
    """
    tests = histogram.total

    def at(rejected: int) -> float:
        return level / max(tests - rejected, 1)

    return at(_fixed_point(0, lambda rejected: histogram.count_at_least(null.threshold(at(rejected)))))


def benjamini_hochberg_level(null: Null, level: float, histogram: MagnitudeHistogram) -> float:
    """The level at which Benjamini and Hochberg's step-up procedure stops: α·k/m, k = its number of rejections.

    k is the largest solution of k = #{p ≤ α·k/m}, reached by iterating from k = m; first with counts rounded up to
    histogram bins, which can only stop too early, then exactly. At most a share α of the kept edges is
    false on average. With no rejection the level is α/m, which keeps nothing.
    """
    tests = histogram.total

    def at(rejected: int) -> float:
        return level * max(rejected, 1) / max(tests, 1)

    rough = _fixed_point(tests, lambda rejected: histogram.count_at_most_above(null.threshold(at(rejected))))
    return at(_fixed_point(rough, lambda rejected: histogram.count_at_least(null.threshold(at(rejected)))))


def _fixed_point(start: int, step: Callable[[int], int]) -> int:
    """Iterate a monotone map until it stands still."""
    current, following = start, step(start)
    while following != current:
        current, following = following, step(following)
    return current
