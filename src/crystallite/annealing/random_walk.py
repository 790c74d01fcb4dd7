"""The paper's second test: does a neuron act on the others with a direction, or as evenly as a random walk would?

Everything is measured in u_ij = n·w̃_ij = |w_ij| / (mean of column j), n the number of rows, so that the paper's band
[1/n − δ, 1/n + δ] is [1 − d, 1 + d] with d = δ·n.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from crystallite.annealing import kernels
from crystallite.annealing.columns import column_sums, relative_histogram
from crystallite.annealing.distributions import Null
from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.errors import InvalidOption

__all__ = ["METHODS", "RandomWalk", "random_walk_test", "relative_magnitude_cdf"]

METHODS = ("calibrated", "literal")

_CELLS = 64  # cells of u per unit: δ₀ = τ = 1/(64·n)
_REACH = 8  # u beyond this is counted together
_GROUPS = 16  # bins of one χ² test
_ALPHA = 0.05  # of the literal test, at each step
_FAMILY_ALPHA = 0.01  # of the calibrated test, for all its steps together
_EFFECT = 0.05  # share of all entries; fewer in the wrong place are not worth stopping for, however significant
_BEYOND = 0.01  # the calibrated band ends where f0 has at most this share left
_EXACT = 1 << 20  # entries; the calibrated test samples larger matrices, as its stop is an effect size


@dataclass(frozen=True, eq=False)
class RandomWalk:
    """The bandwidth of directionless noise in a matrix, and what lies above and below it."""

    method: str
    rows: int
    relative_bandwidth: float  # d = δ·n
    column_sums: np.ndarray  # (cols,) Σ_i |w_ij|
    counts: np.ndarray  # u in cells of 1/64, the last cell for all beyond

    @property
    def bandwidth(self) -> float:
        """δ, the largest admissible deviation of w̃ from 1/n."""
        return self.relative_bandwidth / max(self.rows, 1)

    @cached_property
    def preference_above(self) -> np.ndarray:
        """(cols,) structural preference ⇔ |w_ij| > this, i.e. w̃_ij > 1/n + δ. 0 for a zero column, which has none."""
        return (1 + self.relative_bandwidth) * self.column_sums / max(self.rows, 1)

    @cached_property
    def suppression_below(self) -> np.ndarray:
        """(cols,) systematic suppression ⇔ |w_ij| < this; not positive, so that none is, once d ≥ 1."""
        return (1 - self.relative_bandwidth) * self.column_sums / max(self.rows, 1)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the entries with structural preference, random-walk noise and systematic suppression.

        Entries of zero columns are noise. From the histogram: exact but for entries within rounding of a band edge,
        and up to sampling on a large matrix under the calibrated test.
        """
        live = int(np.count_nonzero(self.column_sums)) / max(self.column_sums.size, 1)
        per_entry = live / max(int(self.counts.sum()), 1)
        steps = round(self.relative_bandwidth * _CELLS)
        preference = int(self.counts[_CELLS + steps :].sum()) * per_entry
        suppression = int(self.counts[: max(_CELLS - steps, 0)].sum()) * per_entry
        return {"preference": preference, "noise": 1 - preference - suppression, "suppression": suppression}


def random_walk_test(w: Any, null: Null | None = None, method: str = "calibrated", name: str = "matrix") -> RandomWalk:
    """Find the bandwidth δ of random-walk noise by growing it in steps until the band no longer looks like noise.

    Both methods take δ_k = δ₀ + kτ with δ₀ = τ = 1/(64n) and compare the u inside [1 − d, 1 + d] with what noise puts
    there by Pearson's χ² in up to 16 bins; the last accepted δ counts.

    "literal" is the paper's text: noise is equiprobable, α = .05 at every step, d ≤ 1. That is the right shape for
    uniform f0 only, and with enough entries every other matrix is rejected at once (see docs/annealing.md).

    "calibrated" takes what noise puts there from f0 (which it needs; only the shape matters, scale cancels):
    the law of |w| over its column's mean for n independent draws. It stops when the difference is significant at
    .01/K, K the number of steps, *and* large: total variation times the band's share of the matrix > .05, i.e.
    more than 5 % of all entries lie where noise would not put them. (Without that weight, a few columns with
    preference, whose own noise sinks below 1, would end the band at once and make preference of everybody's noise.)
    It stops at the latest where f0 itself has no more than 1 % left above the band, so about 1 % of pure noise
    counts as preference, for any f0 and n ≥ 16. For an f0 with tails the band may reach past 2/n; its lower end is
    then 0 and nothing counts as suppressed.

    A zero column has no direction: it is noise. A matrix with one row leaves no choice of direction: all noise.

    Two passes: column sums, one histogram. The histogram of the calibrated test reads at most ~2²⁰ entries.

    >>> from crystallite.annealing.distributions import Uniform
    >>> noise = np.random.default_rng(0).uniform(-1, 1, (256, 256))
    >>> noise[7, :5] = 40.0
    >>> walk = random_walk_test(noise, Uniform(1.0))
    >>> walk.relative_bandwidth, bool(np.all(noise[7, :5] > walk.preference_above[:5]))
    (1.015625, True)
    """
    if method not in METHODS:
        raise InvalidOption(f"random_walk must be one of {', '.join(METHODS)} or None, got {method!r}")
    if method == "calibrated" and null is None:
        raise InvalidOption('the calibrated random-walk test needs a null; pass one or use method="literal"')
    matrix = w if isinstance(w, Magnitudes) else magnitudes(w, name)
    rows = matrix.shape[1] if matrix.transposed else matrix.shape[0]
    sums = column_sums(matrix, name)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scales = _CELLS * rows / sums
    scales[~np.isfinite(scales)] = 0.0  # zero columns, and those so small that their mean has no reciprocal
    sample = _EXACT if method == "calibrated" else None
    counts = relative_histogram(matrix, scales, _CELLS * _REACH + 1, sample)
    if rows < 2:
        steps = _CELLS
    elif null is not None and method == "calibrated":
        cdf = relative_magnitude_cdf(null, rows, np.arange(_CELLS * _REACH + 1) / _CELLS)
        reach = int(np.searchsorted(cdf, 1 - _BEYOND)) - _CELLS
        limit = int(np.clip(reach, 1, _CELLS * (_REACH - 1)))
        steps = _last_accepted(counts, np.diff(cdf), limit, _FAMILY_ALPHA / limit, _EFFECT)
    else:
        steps = _last_accepted(counts, np.ones(_CELLS * _REACH), _CELLS, _ALPHA, 0.0)
    return RandomWalk(
        method, rows, max(steps, 1) / _CELLS, sums, counts
    )  # never narrower than δ₀: rounding is no direction


def relative_magnitude_cdf(null: Null, rows: int, u: np.ndarray) -> np.ndarray:
    """P(|w_ij| / mean of column j ≤ u) when the `rows` entries of a column are independent draws of f0.

    With S the sum of the *other* magnitudes, u_ij ≤ u ⇔ |w_ij| ≤ u·S/(n − u): the entry is part of its own mean, which
    matters at n = 16. S is taken as gamma distributed with the exact mean and variance, at 64 quantiles.

    >>> from crystallite.annealing.distributions import Uniform
    >>> relative_magnitude_cdf(Uniform(1.0), 10**6, np.array([0.0, 1.0, 1.9])).round(3).tolist()
    [0.0, 0.5, 0.95]
    """
    mean, variance = null.magnitude_moments()
    others = rows - 1
    dispersion = max(variance / mean**2, 1e-9)  # > 0 also for magnitudes that are all equal
    quantiles = (np.arange(64) + 0.5) / 64
    rest = special.gammaincinv(others / dispersion, quantiles) * mean * dispersion  # (64,)
    inside = u < rows
    bound = np.divide(u, rows - u, out=np.zeros_like(u), where=inside)
    grid = np.linspace(0.0, null.threshold(1e-13), 4097)  # some tails are too slow to take for every (u, quantile)
    tail = np.interp(bound[:, None] * rest, grid, null.tail(grid), right=0.0)
    return np.where(inside, 1 - np.mean(tail, axis=1), 1.0)


def _last_accepted(counts: np.ndarray, masses: np.ndarray, limit: int, alpha: float, effect: float) -> int:
    """How many steps the band grows before the counts inside it differ from the expected masses; 0 if at once."""
    everything = max(int(counts.sum()), 1)
    for step in range(1, limit + 1):
        low, high = max(_CELLS - step, 0), _CELLS + step
        statistic, freedom, misplaced = kernels.band_misfit(counts, masses, low, high, _GROUPS)
        if freedom and misplaced > effect * everything and special.chdtrc(freedom, statistic) < alpha:
            return step - 1
    return limit
