"""The paper's second test: does a neuron act on the others with a direction, or as evenly as a random walk would?

Everything is measured in u_ij = n·w̃_ij = |w_ij| / (mean of column j), n the number of rows, so that the paper's band
[1/n − δ, 1/n + δ] is [1 − d, 1 + d] with d = δ·n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special

from crystallite.annealing import kernels
from crystallite.annealing.columns import Cells, column_sums, relative_histogram
from crystallite.annealing.distributions import Null
from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice

__all__ = [
    "DELTA0",
    "METHODS",
    "TAU",
    "RandomWalk",
    "check_band",
    "random_walk_test",
    "relative_magnitude_cdf",
    "walk_of_sums",
]

METHODS = ("calibrated", "literal")
_ALPHA = {"calibrated": 0.01, "literal": 0.05}  # for all steps together; at each step
DELTA0 = TAU = 1 / 64  # δ₀ and τ in units of 1/n

_FINEST = 1 / 64  # cells of u are at most this wide
_LEAST = 1 / 4096  # δ₀ and τ; K steps look at K cells each
_REACH = 8  # u beyond this is counted together
_GROUPS = 16  # bins of one χ² test
_EFFECT = 0.05  # share of all entries; fewer in the wrong place are not worth stopping for, however significant
_BEYOND = 0.01  # the calibrated band ends where f0 has at most this share left
_EXCESS = 1.5  # times as many entries as f0 puts there must lie below the band, or they are its own
_EXACT = 1 << 20  # entries; the calibrated test samples larger matrices, as its stop is an effect size


@dataclass(frozen=True, eq=False)
class RandomWalk:
    """The bandwidth of directionless noise in a matrix, and what lies above and below it."""

    method: str
    rows: int
    relative_bandwidth: float  # d = δ·n: preference is u > 1 + d
    lower_end: float  # suppression is u < this; 0 where there is none
    column_sums: np.ndarray  # (cols,) Σ_i |w_ij|
    edges: np.ndarray  # of the cells of u
    counts: np.ndarray  # of u in these cells, the last for all beyond

    @property
    def bandwidth(self) -> float:
        """δ, the largest admissible deviation of w̃ above 1/n."""
        return self.relative_bandwidth / max(self.rows, 1)

    @cached_property
    def preference_above(self) -> np.ndarray:
        """(cols,) structural preference ⇔ |w_ij| > this, i.e. w̃_ij > 1/n + δ. 0 for a zero column, which has none."""
        return (1 + self.relative_bandwidth) * self.column_sums / max(self.rows, 1)

    @cached_property
    def suppression_below(self) -> np.ndarray:
        """(cols,) systematic suppression ⇔ |w_ij| < this; 0, so that none is, where the test finds none."""
        return self.lower_end * self.column_sums / max(self.rows, 1)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the entries with structural preference, random-walk noise and systematic suppression.

        Entries of zero columns are noise. From the histogram: exact but for entries within rounding of a band edge,
        and up to sampling on a large matrix under the calibrated test.
        """
        live = int(np.count_nonzero(self.column_sums)) / max(self.column_sums.size, 1)
        per_entry = live / max(int(self.counts.sum()), 1)
        low, high = np.searchsorted(self.edges, [self.lower_end - 1e-9, 1 + self.relative_bandwidth - 1e-9])
        preference = int(self.counts[high:].sum()) * per_entry
        suppression = int(self.counts[:low].sum()) * per_entry if self.lower_end > 0 else 0.0
        return {"preference": preference, "noise": 1 - preference - suppression, "suppression": suppression}


def check_band(method: str | None, alpha: float | None, delta0: float, tau: float) -> None:
    """Refuse a random-walk test that does not exist: a bad method, α outside (0, 1), δ₀ or τ out of reach.

    Raises:
        InvalidOption: Which one, what was expected and what came.
    """
    if method is not None:
        check_choice("random_walk", method, METHODS, "None")
    if alpha is not None and not (isinstance(alpha, (int, float)) and 0 < alpha < 1):
        raise InvalidOption(f"alpha must be a number between 0 and 1, or None for the method's own, got {alpha!r}")
    for name, value in (("delta0", delta0), ("tau", tau)):
        if isinstance(value, bool) or not (isinstance(value, (int, float)) and _LEAST <= value <= 1):
            raise InvalidOption(f"{name} must be a number from 1/4096 to 1 (in units of 1/n), got {value!r}")


def random_walk_test(
    w: Any,
    null: Null | None = None,
    method: str = "calibrated",
    name: str = "matrix",
    *,
    alpha: float | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
) -> RandomWalk:
    """The bandwidth δ of random-walk noise, found by growing it in steps until the band no longer looks like noise.

    Both methods take δ_k = δ₀ + kτ and compare the u inside [1 − d, 1 + d] with what noise puts there by Pearson's χ²
    in up to 16 bins; the last accepted δ counts, and never less than δ₀.

    "literal" is the paper's text: noise is equiprobable, α = .05 at every step, d ≤ 1; suppressed is what lies below
    the band. That is the right shape for uniform f0 only, and with enough entries every other matrix is rejected at
    once (see docs/annealing.md).

    "calibrated" takes what noise puts there from f0 (which it needs; only the shape matters, scale cancels):
    the law of |w| over its column's mean for n independent draws. It stops when the difference is significant at
    α/K, K the number of steps, *and* large: total variation times the band's share of the matrix > .05, i.e.
    more than 5 % of all entries lie where noise would not put them. (Without that weight, a few columns with
    preference, whose own noise sinks below 1, would end the band at once and make preference of everybody's noise.)
    It stops at the latest where f0 itself has no more than 1 % left above the band, so about 1 % of pure noise
    counts as preference, for any f0 and n ≥ 16.

    Its lower end is a test of its own, since for an f0 with tails 1 − d is below 0: the highest 1 − δ_k with half as
    many entries again below it as f0 puts there, significantly (one-sided, α/K). There is none on pure noise.

    A zero column has no direction: it is noise. A matrix with one row leaves no choice of direction: all noise.

    Two passes: column sums, one histogram. The histogram of the calibrated test reads at most ~2²⁰ entries.

    Args:
        w: Floating-point matrix, rows = outputs, columns = inputs.
        null: f0; the calibrated test needs it.
        method: "calibrated" or "literal".
        name: What errors call the matrix.
        alpha: Significance level; None is .01 for all steps together (calibrated) or .05 at each (literal).
        delta0: δ₀ in units of 1/n, so that one number serves matrices of every height.
        tau: τ in units of 1/n.

    Returns:
        The bandwidth, the limits of the three classes for each column, and the histogram behind them.

    Raises:
        InvalidOption: An option is out of range.
        InvalidMatrix: The matrix has entries that are not finite.

    Examples:
        >>> from crystallite.annealing.distributions import Uniform
        >>> noise = np.random.default_rng(0).uniform(-1, 1, (256, 256))
        >>> noise[7, :5] = 40.0
        >>> walk = random_walk_test(noise, Uniform(1.0))
        >>> walk.relative_bandwidth, bool(np.all(noise[7, :5] > walk.preference_above[:5]))
        (1.015625, True)
    """
    if method is None:
        raise InvalidOption(f"random_walk must be one of {', '.join(METHODS)}, got None")
    check_band(method, alpha, delta0, tau)
    if method == "calibrated" and null is None:
        raise InvalidOption('the calibrated random-walk test needs a null; pass one or use method="literal"')
    matrix = w if isinstance(w, Magnitudes) else magnitudes(w, name)
    return walk_of_sums(matrix, column_sums(matrix, name), null, method, alpha, delta0, tau)


def walk_of_sums(
    matrix: Magnitudes, sums: np.ndarray, null: Null | None, method: str, alpha: float | None, delta0: float, tau: float
) -> RandomWalk:
    """`random_walk_test` with checked options, of a matrix whose column sums are known."""
    rows = matrix.shape[1] if matrix.transposed else matrix.shape[0]
    steps = _Steps(delta0, tau)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scales = rows / (sums * steps.width)
    scales[~np.isfinite(scales)] = 0.0  # zero columns, and those so small that their mean has no reciprocal
    counts = relative_histogram(matrix, scales, steps.cells, _EXACT if method == "calibrated" else None)
    level = _ALPHA[method] if alpha is None else float(alpha)
    lower_end = 0.0
    if rows < 2:
        bandwidth = 1.0
    elif null is not None and method == "calibrated":
        cdf = relative_magnitude_cdf(null, rows, np.maximum(steps.edges, 0.0))
        limit = steps.first_beyond(cdf)
        accepted = _last_accepted(counts, np.diff(cdf), steps, limit, level / limit, _EFFECT)
        bandwidth = steps.bandwidth(max(accepted, 1))
        lower_end = _lower_end(counts, cdf, steps, level)
    else:
        limit = steps.first_from(1.0)
        accepted = _last_accepted(counts, np.diff(np.maximum(steps.edges, 0.0)), steps, limit, level, 0.0)
        bandwidth = steps.bandwidth(max(accepted, 1))
        lower_end = max(1 - bandwidth, 0.0)
    return RandomWalk(method, rows, bandwidth, lower_end, sums, steps.edges, counts)


class _Steps:
    """Bands 1 ± (δ₀ + kτ), and cells of u of which every band is made."""

    def __init__(self, delta0: float, tau: float) -> None:
        self.delta0, self.tau = float(delta0), float(tau)
        self.per_step = math.ceil(tau / _FINEST - 1e-9)
        self.width = tau / self.per_step
        self.below = math.ceil((1 - delta0) / self.width - 1e-9)  # cells below the first band
        self.core = math.ceil(2 * delta0 / self.width - 1e-9)  # in it; the last may be narrower
        above = math.floor((_REACH - 1 - delta0) / self.width + 1e-9)
        start = 1 - delta0 - self.below * self.width
        inside = start + self.width * np.arange(self.below + self.core)
        self.edges = np.concatenate([inside, 1 + delta0 + self.width * np.arange(above + 1)])
        split = (1 + delta0) / self.width
        self.cells = Cells(start / self.width, split, self.below + self.core, len(self.edges))
        self.most = above // self.per_step + 1

    def bandwidth(self, step: int) -> float:
        """d of the band at a step, counted from 1."""
        return self.delta0 + (step - 1) * self.tau

    def band(self, step: int) -> tuple[int, int]:
        """First cell of the band at a step, and the one after its last."""
        wider = (step - 1) * self.per_step
        return max(self.below - wider, 0), self.below + self.core + wider

    def first_beyond(self, cdf: np.ndarray) -> int:
        """The first step whose band leaves at most a share of 1 % above it."""
        upper = cdf[self.below + self.core :: self.per_step]
        return min(int(np.searchsorted(upper, 1 - _BEYOND)) + 1, self.most)

    def first_from(self, bandwidth: float) -> int:
        """The last step with at most this bandwidth."""
        return max(min(math.floor((bandwidth - self.delta0) / self.tau + 1e-9) + 1, self.most), 1)


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


def _last_accepted(
    counts: np.ndarray, masses: np.ndarray, steps: _Steps, limit: int, alpha: float, effect: float
) -> int:
    """How many steps the band grows before the counts inside it differ from the expected masses; 0 if at once."""
    everything = max(int(counts.sum()), 1)
    for step in range(1, limit + 1):
        statistic, freedom, misplaced = kernels.band_misfit(counts, masses, *steps.band(step), _GROUPS)
        if freedom and misplaced > effect * everything and special.chdtrc(freedom, statistic) < alpha:
            return step - 1
    return limit


def _lower_end(counts: np.ndarray, cdf: np.ndarray, steps: _Steps, alpha: float) -> float:
    """The highest lower end of a band with clearly more entries below it than f0 puts there; 0 if there is none."""
    everything, below = int(counts.sum()), np.cumsum(counts)
    cells = np.arange(steps.below, 0, -steps.per_step)  # how many lie below the band of each step
    for cell in cells.tolist():
        observed, share = int(below[cell - 1]), float(cdf[cell])
        if observed < max(_EXCESS * share * everything, 1):
            continue
        if special.betainc(observed, everything - observed + 1, share) < alpha / len(cells):  # P(at least so many)
            return float(steps.edges[cell])
    return 0.0
