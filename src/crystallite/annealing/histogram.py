"""How many entries of a matrix have which magnitude, from one pass and at any resolution that is asked for later.

Own code because `numpy.histogram` needs its bins before the matrix is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from crystallite.annealing import kernels
from crystallite.annealing.distributions import Null
from crystallite.core.arrays import Magnitudes
from crystallite.core.errors import InvalidMatrix
from crystallite.core.parallel import over_rows, thread_count
from crystallite.structure.components import kernel_arguments
from crystallite.structure.kernels import count_survivors

__all__ = ["MagnitudeHistogram", "count_at_least", "magnitude_histogram", "non_finite"]

_BIN_BITS = 16  # 65,536 bins: lossless for 16-bit formats, 256 bins per power of two for float32


@dataclass(frozen=True, eq=False)
class MagnitudeHistogram:
    """Counts of the magnitude patterns of a matrix by their high bits.

    Counts at bin edges are exact; a count inside a bin looks at that bin's entries once more, and remembers them.

    >>> from crystallite.core.arrays import magnitudes
    >>> h = magnitude_histogram(magnitudes(np.array([[0.5, -1.0], [0.25, 0.0]], np.float32)))
    >>> h.count_at_least(0.5), h.count_at_least(0.50001), h.largest
    (2, 1, 1.0)
    """

    magnitudes: Magnitudes
    shift: int
    counts: np.ndarray  # (bins,)
    _resolved: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def total(self) -> int:
        return int(self.magnitudes.bits.size)

    @cached_property
    def above(self) -> np.ndarray:
        """above[b] = entries in bins ≥ b; one longer than `counts`."""
        return np.append(np.cumsum(self.counts[::-1])[::-1], 0)

    @cached_property
    def edges(self) -> np.ndarray:
        """The smallest magnitude of each non-empty bin, and how many entries reach it: (edges, counts), ascending."""
        bins = np.flatnonzero(self.counts)
        return np.stack([self.magnitudes.values(bins << self.shift), self.above[bins].astype(np.float64)])

    def count_at_least(self, c: float) -> int:
        """Exactly #{|w| ≥ c}. The first call for a bin costs one more pass over the matrix."""
        pattern = self.magnitudes.pattern(c)
        chosen = pattern >> self.shift
        if chosen >= self.counts.size:
            return 0
        inside = pattern - (chosen << self.shift)
        if inside == 0 or self.counts[chosen] == 0:
            return int(self.above[chosen])
        entries = self._entries(chosen)
        return int(self.above[chosen + 1]) + entries.size - int(np.searchsorted(entries, self._storage(pattern)))

    def count_at_most_above(self, c: float) -> int:
        """#{|w| ≥ c} rounded up to the edge of c's bin: an upper bound without another look at the matrix."""
        return int(self.above[min(self.magnitudes.pattern(c) >> self.shift, self.counts.size)])

    @property
    def largest(self) -> float:
        """The largest magnitude; 0 for an empty matrix."""
        bins = np.flatnonzero(self.counts)
        return self.magnitudes.value(int(self._entries(int(bins[-1]))[-1])) if bins.size else 0.0

    def ks(self, null: Null) -> float:
        """The Kolmogorov–Smirnov distance sup |P̂(|w| ≥ c) − tail(c)| over all bin edges c."""
        used = np.flatnonzero(self.counts)
        if used.size == 0:
            return 0.0
        bins = np.union1d(used, np.minimum(used + 1, (self.magnitudes.infinity - 1) >> self.shift))
        edges = self.magnitudes.values(bins << self.shift)
        return float(np.max(np.abs(self.above[bins] / self.total - null.tail(edges))))

    def _entries(self, chosen: int) -> np.ndarray:
        """The sorted patterns of one bin."""
        if chosen not in self._resolved:
            found: dict[int, np.ndarray] = {}

            def collect(thread: int, first_row: int, block: np.ndarray) -> None:
                out = np.empty(min(block.size, int(self.counts[chosen])), self.magnitudes.storage)
                arguments = (self._storage(n) for n in (self.magnitudes.mask, self.shift, chosen))
                found[first_row] = out[: kernels.collect_bin(block, *arguments, out)]

            over_rows(self.magnitudes, collect)
            self._resolved[chosen] = np.sort(np.concatenate([*found.values()]))
        return self._resolved[chosen]

    def _storage(self, number: int) -> np.unsignedinteger:
        return self.magnitudes.storage(number)


def magnitude_histogram(magnitudes: Magnitudes, name: str = "matrix") -> MagnitudeHistogram:
    """Count the magnitudes of a floating-point matrix in one pass; `InvalidMatrix` if some are not finite.

    O(rows · cols) reads; 512 kB per thread.
    """
    bits = magnitudes.mask.bit_length()
    shift = max(0, bits - _BIN_BITS)
    counts = np.zeros((thread_count(magnitudes), 1 << (bits - shift)), np.int64)
    arguments = magnitudes.storage(magnitudes.mask), magnitudes.storage(shift)

    def count(thread: int, first_row: int, block: np.ndarray) -> None:
        kernels.bin_patterns(block, *arguments, counts[thread])

    over_rows(magnitudes, count)
    merged = counts.sum(0)
    if merged[magnitudes.infinity >> shift :].any():  # infinity is a bin edge in every format
        raise non_finite(magnitudes, name)
    return MagnitudeHistogram(magnitudes, shift, merged)


def count_at_least(magnitudes: Magnitudes, patterns: int | np.ndarray, name: str = "matrix") -> int:
    """#{pattern(w_ij) ≥ patterns_j}, for one pattern or one per column of the caller's matrix, in one pass."""
    if magnitudes.transposed and isinstance(patterns, np.ndarray):  # thresholds follow columns, the memory follows rows
        magnitudes = Magnitudes(magnitudes.bits.T, magnitudes.format)
    mask, limit, infinity = kernel_arguments(magnitudes, patterns)
    kept = np.zeros(thread_count(magnitudes), np.int64)

    def count(thread: int, first_row: int, block: np.ndarray) -> None:
        found, bad = count_survivors(block, first_row, mask, limit, infinity)
        kept[thread] += found
        if bad >= 0:
            raise non_finite(magnitudes, name)

    over_rows(magnitudes, count)
    return int(kept.sum())


def non_finite(magnitudes: Magnitudes, name: str) -> InvalidMatrix:
    """The error for a matrix with NaN or infinite entries: how many, and where the first is."""
    count, first = 0, None
    for start in range(0, magnitudes.shape[0], step := min(magnitudes.rows_per_block, 256)):
        patterns = magnitudes.block(start, start + step) & magnitudes.storage(magnitudes.mask)
        bad = np.argwhere(patterns >= magnitudes.storage(magnitudes.infinity))
        count += len(bad)
        if first is None and len(bad):
            row, col = int(bad[0, 0]) + start, int(bad[0, 1])
            first = (col, row) if magnitudes.transposed else (row, col)
    return InvalidMatrix(f"{name}: expected finite numbers, got {count} NaN or infinite entries, the first at {first}")
