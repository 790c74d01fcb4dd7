"""Null distributions f0: what chance alone would have put into a weight matrix.

Every null is a frozen value with the same methods. The test statistic is the magnitude |w|, as in the paper
(P_f0(|w| ≥ c) = x), also where f0 is not centred at 0: one number c is then the whole test, which is what lets
components be found while a matrix streams by.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from scipy import special

from crystallite.core.errors import InvalidOption

__all__ = ["Normal", "Null", "Orthogonal", "TruncatedNormal", "Uniform", "positive"]

_FLOAT32_GRID = 2.0**-23  # a float32 uniform generator draws from 2²⁴ values; the two extremes share this much
_NEGLIGIBLE = 1e-13  # tail mass left out of numerical moments


class Null(ABC):
    """A distribution of one weight under "no structural effect".

    `cdf`, `density` and `tail` take scalars or arrays; `threshold` takes one level.
    """

    @property
    @abstractmethod
    def scale(self) -> float:
        """The standard deviation."""

    @property
    def name(self) -> str:
        """How tables and reports call this null."""
        return repr(self)

    @abstractmethod
    def cdf(self, x: Any) -> Any:
        """P(w ≤ x)."""

    @abstractmethod
    def density(self, x: Any) -> Any:
        """f0(x)."""

    @abstractmethod
    def tail(self, c: Any) -> Any:
        """P(|w| ≥ c), the p-value of a weight of magnitude c."""

    @abstractmethod
    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Independent draws, float64."""

    @abstractmethod
    def shrunk(self, factor: float) -> Self:
        """The null after weight decay: every value times factor = Π(1 − lr·weight_decay) over the steps taken."""

    def threshold(self, level: float) -> float:
        """The smallest float64 c with tail(c) ≤ level: tail(|w|) ≤ level ⇔ |w| ≥ c, to the last bit.

        A search over the 63-bit patterns of positive numbers, 64 at a time: exact for whatever `tail` computes.

        >>> round(Normal(1.0).threshold(0.05), 12)
        1.95996398454
        """
        if not (isinstance(level, (int, float, np.number)) and 0 < level < 1):
            raise InvalidOption(f"level must be a number between 0 and 1, got {level!r}")
        low, high = 0, 0x7FF << 52  # patterns of 0 and of infinity, where every tail is 0
        while low < high:
            step = max(1, (high - low) // 64)
            with np.errstate(over="ignore"):  # numbers far beyond every scale are among those tried
                passed = self.tail(np.arange(low, high, step, dtype=np.uint64).view(np.float64)) <= level
            first = int(np.argmax(passed)) if passed.any() else passed.size
            high = min(high, low + first * step)
            low = min(high, low + max(0, (first - 1) * step + 1))
        return float(np.array(low, np.uint64).view(np.float64))

    def magnitude_moments(self) -> tuple[float, float]:
        """Mean and variance of |w|: E|w| = ∫ tail(c) dc and E w² = ∫ 2c·tail(c) dc, by the trapezoid rule."""
        c = np.linspace(0.0, self.threshold(_NEGLIGIBLE), 4097)
        tail = self.tail(c)
        mean = float(np.trapezoid(tail, c))
        return mean, float(np.trapezoid(2 * c * tail, c)) - mean**2


@dataclass(frozen=True)
class Uniform(Null):
    """U(−bound, bound), PyTorch's default for Linear, Conv and recurrent weights with bound = 1/√fan_in.

    Inside the support `tail` never falls below 2⁻²³: generators draw float32 uniforms from 2²⁴ values, ±bound among
    them, so on a large matrix a magnitude of exactly `bound` is no evidence. Beyond the bound it is 0.

    >>> f0 = Uniform(0.5)
    >>> round(float(f0.tail(0.495)), 6), round(f0.threshold(0.01), 6), float(f0.tail(0.51))
    (0.01, 0.495, 0.0)
    """

    bound: float

    def __post_init__(self) -> None:
        positive("bound", self.bound)

    @property
    def scale(self) -> float:
        return self.bound / math.sqrt(3)

    def cdf(self, x: Any) -> Any:
        return np.clip((np.asarray(x) / self.bound + 1) / 2, 0.0, 1.0)[()]

    def density(self, x: Any) -> Any:
        return np.where(np.abs(x) <= self.bound, 0.5 / self.bound, 0.0)[()]

    def tail(self, c: Any) -> Any:
        relative = np.asarray(c) / self.bound
        inside = np.clip(1 - relative, _FLOAT32_GRID, 1.0)
        return np.where(relative <= 1 + _FLOAT32_GRID, inside, 0.0)[()]

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-self.bound, self.bound, shape)

    def shrunk(self, factor: float) -> Self:
        return type(self)(self.bound * positive("factor", factor))

    def __repr__(self) -> str:
        return f"Uniform(±{self.bound:.4g})"


@dataclass(frozen=True)
class Normal(Null):
    """N(mean, std²). The tail is two-sided about 0, also for mean ≠ 0: P(w ≤ −c) + P(w ≥ c).

    >>> round(float(Normal(0.02).tail(0.04)), 6)
    0.0455
    """

    std: float
    mean: float = 0.0

    def __post_init__(self) -> None:
        positive("std", self.std)
        _finite("mean", self.mean)

    @property
    def scale(self) -> float:
        return self.std

    def cdf(self, x: Any) -> Any:
        return special.ndtr((x - self.mean) / self.std)

    def density(self, x: Any) -> Any:
        return np.exp(-0.5 * ((np.asarray(x) - self.mean) / self.std) ** 2) / (self.std * math.sqrt(2 * math.pi))

    def tail(self, c: Any) -> Any:
        c = np.asarray(c)
        return special.ndtr((-c - self.mean) / self.std) + special.ndtr((self.mean - c) / self.std)

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        return rng.normal(self.mean, self.std, shape)

    def shrunk(self, factor: float) -> Self:
        return type(self)(self.std * positive("factor", factor), self.mean * factor)

    def __repr__(self) -> str:
        return f"Normal({self.std:.4g}{_off_centre(self.mean)})"


@dataclass(frozen=True)
class TruncatedNormal(Null):
    """N(mean, std²) conditioned on [low, high], absolute cut-offs as in `torch.nn.init.trunc_normal_`.

    The cut-offs default to mean ± 2·std (JAX, TensorFlow). PyTorch's defaults are −2 and 2 whatever std is: for
    std = .02 those never bind and the null is `Normal(.02)`.

    >>> float(TruncatedNormal(1.0).tail(2.0)), round(TruncatedNormal(1.0).scale, 4)
    (0.0, 0.8796)
    """

    std: float
    mean: float = 0.0
    low: float = field(default=math.nan)
    high: float = field(default=math.nan)

    def __post_init__(self) -> None:
        positive("std", self.std)
        _finite("mean", self.mean)
        for name, side in (("low", -2), ("high", 2)):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, self.mean + side * self.std)
        if not self.low < self.high:
            raise InvalidOption(f"low must be below high, got low={self.low!r}, high={self.high!r}")
        if not self._mass > 0:
            raise InvalidOption(f"[{self.low}, {self.high}] holds no mass of N({self.mean}, {self.std}²)")

    @property
    def scale(self) -> float:
        a, b = self._standard(self.low), self._standard(self.high)
        pa, pb = (math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) if math.isfinite(z) else 0.0 for z in (a, b))
        za, zb = (z * p if p else 0.0 for z, p in ((a, pa), (b, pb)))
        return self.std * math.sqrt(1 + (za - zb) / self._mass - ((pa - pb) / self._mass) ** 2)

    def cdf(self, x: Any) -> Any:
        clipped = np.clip(x, self.low, self.high)
        return self._between(self.low, clipped) / self._mass

    def density(self, x: Any) -> Any:
        inside = (np.asarray(x) >= self.low) & (np.asarray(x) <= self.high)
        return np.where(inside, Normal(self.std, self.mean).density(x) / self._mass, 0.0)[()]

    def tail(self, c: Any) -> Any:
        below = np.clip(-np.asarray(c), self.low, self.high)
        above = np.clip(c, self.low, self.high)
        return (self._between(self.low, below) + self._between(above, self.high)) / self._mass

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        low, high = special.ndtr(self._standard(self.low)), special.ndtr(self._standard(self.high))
        return self.mean + self.std * special.ndtri(rng.uniform(low, high, shape))

    def shrunk(self, factor: float) -> Self:
        positive("factor", factor)
        return type(self)(self.std * factor, self.mean * factor, self.low * factor, self.high * factor)

    @property
    def _mass(self) -> float:
        return float(self._between(self.low, self.high))

    def _standard(self, x: Any) -> Any:
        return (x - self.mean) / self.std

    def _between(self, a: Any, b: Any) -> Any:
        """P(a ≤ N ≤ b) for a ≤ b, computed on the side where neither cdf is near 1 and digits survive."""
        a, b = self._standard(np.asarray(a)), self._standard(np.asarray(b))
        flip = a > 0
        return special.ndtr(np.where(flip, -a, b)) - special.ndtr(np.where(flip, -b, a))

    def __repr__(self) -> str:
        return f"TruncatedNormal({self.std:.4g}{_off_centre(self.mean)}, [{self.low:.4g}, {self.high:.4g}])"


@dataclass(frozen=True)
class Orthogonal(Null):
    """One entry of gain · (a rows × cols matrix with orthonormal rows or columns, uniform among those).

    Such an entry is a coordinate t of a uniform unit vector in Rⁿ, n = max(rows, cols): t² ~ Beta(1/2, (n − 1)/2).
    It tends to N(0, gain²/n). `sample` draws entries independently; the matrix has dependent ones.

    >>> round(float(Orthogonal(3, 3).tail(0.5)), 12)  # Archimedes: a coordinate on the sphere in R³ is uniform
    0.5
    """

    rows: int
    cols: int
    gain: float = 1.0

    def __post_init__(self) -> None:
        positive("gain", self.gain)
        if min(self.rows, self.cols) < 1 or self.dimension < 2:
            raise InvalidOption(f"an orthogonal null needs at least 2 rows or columns, got {self.rows}×{self.cols}")

    @property
    def dimension(self) -> int:
        return max(self.rows, self.cols)

    @property
    def scale(self) -> float:
        return self.gain / math.sqrt(self.dimension)

    def cdf(self, x: Any) -> Any:
        half = self.tail(np.abs(x)) / 2
        return np.where(np.asarray(x) < 0, half, 1 - half)[()]

    def density(self, x: Any) -> Any:
        n = self.dimension
        squared = np.square(np.asarray(x) / self.gain)
        with np.errstate(divide="ignore"):  # n = 2: infinite at ±gain
            shape = np.power(np.clip(1 - squared, 0.0, None), (n - 3) / 2)
        return np.where(squared <= 1, shape / (self.gain * special.beta(0.5, (n - 1) / 2)), 0.0)[()]

    def tail(self, c: Any) -> Any:
        relative = np.minimum(np.asarray(c) / self.gain, 1.0)  # before squaring: no overflow for any c
        return special.betaincc(0.5, (self.dimension - 1) / 2, np.square(relative))

    def sample(self, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        first = rng.standard_normal(shape)
        return self.gain * first / np.sqrt(first**2 + rng.chisquare(self.dimension - 1, shape))

    def shrunk(self, factor: float) -> Self:
        return type(self)(self.rows, self.cols, self.gain * positive("factor", factor))

    def __repr__(self) -> str:
        return f"Orthogonal({self.rows}×{self.cols}, gain {self.gain:.4g})"


def positive(name: str, value: float) -> float:
    """The value, if it is a finite number > 0."""
    if not (isinstance(value, (int, float, np.number)) and math.isfinite(value) and value > 0):
        raise InvalidOption(f"{name} must be a finite number > 0, got {value!r}")
    return float(value)


def _finite(name: str, value: float) -> None:
    if not (isinstance(value, (int, float, np.number)) and math.isfinite(value)):
        raise InvalidOption(f"{name} must be a finite number, got {value!r}")


def _off_centre(mean: float) -> str:
    return f", mean {mean:.4g}" if mean else ""
