"""Nulls that are measured rather than known, how well any null fits, and which one to believe."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from crystallite.annealing.distributions import Normal, Null, positive
from crystallite.annealing.histogram import magnitude_histogram, non_finite
from crystallite.core.arrays import Magnitudes, magnitudes
from crystallite.core.errors import InvalidMatrix

__all__ = ["Empirical", "Fit", "FromInit", "choose", "fit", "sample_entries"]

_SAMPLE = 1 << 16
_COMPARED = 1 << 14
_RUN = 16  # neighbours taken together: one cache line of float32 per memory access
_GOLDEN = (math.sqrt(5) - 1) / 2
_EXACT = 1 << 20  # up to here `FromInit` keeps every magnitude, beyond a histogram of them
_LEFT_BULK = 0.2  # the limits of `choose`, explained there
_SLACK = 0.02
_CHANCE = 1.63  # /√n: the KS distance that n entries of the null itself exceed once in a hundred times


def sample_entries(w: Any, name: str = "matrix") -> np.ndarray:
    """At most 65,536 entries of a matrix as float64, always the same ones, spread evenly over it.

    Runs of 16 neighbours start at multiples of the golden ratio (mod 1), which neither cluster nor fall in step with
    the rows. A smaller matrix is taken whole. Raises `InvalidMatrix` if one of the entries is not finite.
    """
    matrix = w if isinstance(w, Magnitudes) else magnitudes(w, name)
    size = matrix.bits.size
    if size <= _SAMPLE:
        bits = matrix.bits.reshape(-1)
    else:
        starts = ((np.arange(_SAMPLE // _RUN) * _GOLDEN) % 1.0 * (size - _RUN)).astype(np.int64)
        if matrix.bits.flags.c_contiguous:
            bits = sliding_window_view(matrix.bits.reshape(-1), _RUN)[starts].reshape(-1)
        else:
            bits = matrix.bits[np.divmod((starts[:, None] + np.arange(_RUN)).reshape(-1), matrix.shape[1])]
    if matrix.mask > 0xFFFF:
        values = np.ascontiguousarray(bits).view(f"f{bits.itemsize}").astype(np.float64)
    else:
        values = np.where(bits > matrix.mask, -1.0, 1.0) * matrix.values(bits)  # above the mask is the sign bit
    if not np.all(np.isfinite(values)):
        raise non_finite(matrix, name)
    return values


@dataclass(frozen=True)
class Fit:
    """How a null describes a sample: KS distance, and the share of entries it can have produced (Storey's π₀)."""

    null: Null
    ks: float  # sup |F̂(w) − F0(w)|
    null_share: float  # π₀ = 2·P̂(|w| ≤ m), m the null's median magnitude; at most 1
    bulk_misfit: float  # sup over c ≤ m of |P̂(|w| ≤ c) − π₀·P0(|w| ≤ c)|
    slack: float = _SLACK  # the distance up to which the null counts as right

    @property
    def explains_bulk(self) -> bool:
        """Whether the small magnitudes look like this null, however many large ones training added."""
        left = 1 - self.null_share
        return left <= _LEFT_BULK and self.bulk_misfit <= self.slack and self.ks <= left + self.slack


def fit(null: Null, w: Any, name: str = "matrix") -> Fit:
    """How well a null describes a matrix (or an array of sampled entries). Exact zeros are left out.

    An exact zero is an edge that somebody removed already; no continuous null makes one. At most 16,384 entries are
    compared (chance alone makes a KS of ~.01 there): a millisecond, whatever the size of the matrix.

    >>> fit(Normal(1.0), np.random.default_rng(0).normal(size=(300, 300))).ks < 0.01
    True
    """
    return _fit(null, *_sorted(_sample_of(w, name)))


def choose(w: Any, candidates: Iterable[Null], name: str = "matrix") -> Fit:
    """The null to test this matrix against: the best initialisation that explains its bulk, else `Empirical`.

    Training moves some weights and leaves noise in the others, so f0 need not fit the whole matrix: it is enough
    that the central part still looks like it, P̂(|w| ≤ c) = π₀·P0(|w| ≤ c) for c below the null's median magnitude
    m. A candidate is believed if

    - that equation holds within 0.02 and π₀ ≥ 0.8: at most a fifth of the weights left the bulk (π₀ = 2·P̂(|w| ≤ m)
      is Storey's estimate of the share of true nulls), and
    - its KS distance is at most 1 − π₀ + 0.02, as weights that left can account for no more.

    Among those believed the smallest KS wins, unless it is above 0.02 while a Gaussian with the bulk's own location and
    scale fits the *whole* matrix within 0.02: then every weight moved and none tells how it began. This is
    what finished transformers look like. (0.02 cannot tell a normal from one 8 % wider: with such a null a test at
    1 % keeps 1.7 % of the noise. Pass the null you know when that matters. Of fewer than 6,600 entries chance makes
    more, so 1.63/√n takes the place of 0.02 there: a null is wrongly rejected about once in a hundred times.)

    In that case, or if no candidate is believed, `Empirical`. If the bulk has no width either (more than half of the
    entries equal), the candidate with the smallest KS.

    >>> w = np.random.default_rng(0).uniform(-0.1, 0.1, (100, 100))
    >>> from crystallite.annealing.distributions import Uniform
    >>> choose(w, [Uniform(0.1), Normal(0.02)]).null, choose(w * 7, [Uniform(0.1)]).null
    (Uniform(±0.1), Empirical(0.5225))
    """
    sample = _sample_of(w, name)
    ordered, by_magnitude = _sorted(sample)
    drawn = list(candidates)
    plausible = [null for null in drawn if _share_fits(null, by_magnitude)]  # the others cannot be believed
    fits = sorted((_fit(null, ordered, by_magnitude) for null in plausible), key=lambda f: f.ks)
    best = next((f for f in fits if f.explains_bulk), None)
    if best is not None and best.ks <= best.slack:
        return best
    try:
        own = _fit(Empirical.fit(sample, name), ordered, by_magnitude)
    except InvalidMatrix:
        if not drawn:
            raise
        return best or min((_fit(null, ordered, by_magnitude) for null in drawn), key=lambda f: f.ks)
    return own if best is None or own.ks <= own.slack else best


@dataclass(frozen=True, repr=False)
class Empirical(Normal):
    """The Gaussian bulk of a trained matrix of unknown origin: median and MAD/.6745, which large weights cannot move.

    >>> w = np.random.default_rng(0).normal(0, 0.04, (400, 400))
    >>> w[:, :20] += 0.5
    >>> Empirical.fit(w)
    Empirical(0.04262, mean 0.00243)
    """

    @classmethod
    def fit(cls, w: Any, name: str = "matrix") -> Self:
        """Location and scale of the non-zero entries, from at most 65,536 of them. `InvalidMatrix` if all are equal."""
        values = _sample_of(w, name)
        values = values[values != 0]
        median = float(np.median(values)) if values.size else 0.0
        deviation = float(np.median(np.abs(values - median))) if values.size else 0.0
        if deviation == 0.0:
            raise InvalidMatrix(f"{name}: more than half of its non-zero entries are equal, so its bulk has no width")
        # A location within two standard errors of 0 is 0: the median of N samples of N(0, σ) has error 1.2533·σ/√N.
        std = deviation / 0.6744897501960817
        centred = abs(median) <= 2 * 1.2533 * std / math.sqrt(values.size)
        return cls(std, 0.0 if centred else median)

    def __repr__(self) -> str:
        return super().__repr__().replace("Normal", "Empirical")


@dataclass(frozen=True, eq=False)
class FromInit(Null):
    """The magnitudes of the actual initial checkpoint: tail(c) = #{|w0| ≥ c} / #w0, signs taken as symmetric.

    A weight that training never moved still holds |w0| (times the decay), so beyond max|w0| the tail is 0, not merely
    small. Up to 2²⁰ entries every magnitude is kept; beyond, a histogram with 256 bins per power of two
    (float32), linear inside a bin.

    >>> f0 = FromInit(np.array([[1.0, -2.0], [3.0, -4.0]]))
    >>> float(f0.tail(3.0)), f0.threshold(0.5), float(f0.tail(4.1))
    (0.5, 3.0, 0.0)
    """

    edges: np.ndarray  # magnitudes, ascending
    share: np.ndarray  # tail at each edge; the last is 0

    def __init__(self, w0: Any, name: str = "w0") -> None:
        matrix = magnitudes(w0, name)
        if matrix.bits.size == 0:
            raise InvalidMatrix(f"{name}: expected at least one entry, got shape {matrix.shape}")
        if matrix.bits.size <= _EXACT:
            edges, count = np.unique(np.abs(_all_entries(matrix, name)), return_counts=True)
            reached = np.cumsum(count[::-1])[::-1]
            largest = edges[-1]
        else:
            histogram = magnitude_histogram(matrix, name)
            edges, reached = histogram.edges
            largest = histogram.largest
        if largest == 0.0:
            raise InvalidMatrix(f"{name}: every entry is zero, which is no initialisation to test against")
        object.__setattr__(self, "edges", np.append(edges, np.nextafter(largest, np.inf)))
        object.__setattr__(self, "share", np.append(reached / matrix.bits.size, 0.0))

    @property
    def scale(self) -> float:
        mean, variance = self.magnitude_moments()
        return math.sqrt(variance + mean**2)

    def cdf(self, x: Any) -> Any:
        half = self.tail(np.abs(x)) / 2
        return np.where(np.asarray(x) < 0, half, 1 - half)[()]

    def density(self, x: Any) -> Any:
        """The slope of the cdf over 1/64 of the largest magnitude: a histogram, since data have no density."""
        step = self.edges[-1] / 128
        return (self.cdf(np.asarray(x) + step) - self.cdf(np.asarray(x) - step)) / (2 * step)

    def tail(self, c: Any) -> Any:
        return np.interp(c, self.edges, self.share, left=1.0, right=0.0)[()]

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        magnitude = np.interp(rng.random(shape), self.share[::-1], self.edges[::-1])
        return magnitude * rng.choice([-1.0, 1.0], shape)

    def shrunk(self, factor: float) -> Self:
        result = object.__new__(type(self))
        object.__setattr__(result, "edges", self.edges * positive("factor", factor))
        object.__setattr__(result, "share", self.share)
        return result

    def __repr__(self) -> str:
        return f"FromInit(|w0| ≤ {self.edges[-1]:.4g})"


def _all_entries(matrix: Magnitudes, name: str) -> np.ndarray:
    values = matrix.values(matrix.block(0, matrix.shape[0]))
    if not np.all(np.isfinite(values)):
        raise non_finite(matrix, name)
    return values


def _sample_of(w: Any, name: str) -> np.ndarray:
    """`w` itself if it is a sample already (one-dimensional), else one of it."""
    return w if isinstance(w, np.ndarray) and w.ndim == 1 else sample_entries(w, name)


def _sorted(sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Some of the non-zero entries in order, and their magnitudes in order."""
    ordered = np.sort(sample[:: -(-sample.size // _COMPARED) or 1])
    ordered = ordered[ordered != 0]
    return ordered, np.sort(np.abs(ordered))


def _share_fits(null: Null, by_magnitude: np.ndarray) -> bool:
    """Whether about half of the entries, or up to a fifth fewer, lie below the null's median magnitude."""
    size = by_magnitude.size
    if size == 0:
        return True
    share = 2 * int(np.searchsorted(by_magnitude, null.threshold(0.5), "right")) / size
    return 1 - _LEFT_BULK <= share <= 1 + 2 * max(_SLACK, _CHANCE / math.sqrt(size))


def _fit(null: Null, ordered: np.ndarray, by_magnitude: np.ndarray) -> Fit:
    size = ordered.size
    if size == 0:
        return Fit(null, 1.0, 0.0, 1.0)
    cdf = null.cdf(ordered)
    rank = np.arange(size + 1) / size
    ks = float(max(np.max(rank[1:] - cdf), np.max(cdf - rank[:-1])))
    inside = int(np.searchsorted(by_magnitude, null.threshold(0.5), "right"))
    null_share = min(1.0, 2 * inside / size)
    expected = null_share * (1 - null.tail(by_magnitude[:inside]))
    misfit = float(np.max(np.abs(rank[1 : inside + 1] - expected), initial=0.0))
    # A share above 1 is misfit as well: the null is wider than the data.
    slack = max(_SLACK, _CHANCE / math.sqrt(size))
    return Fit(null, ks, null_share, max(misfit, inside / size - 0.5), slack)
