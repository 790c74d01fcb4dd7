"""`BatchCosts`: what a batch costs beside what its numbers cost, learnt from the batches themselves."""

from __future__ import annotations

__all__ = ["BatchCosts"]

_KEPT = 0.98  # of what is known, after each batch: about the last fifty count
_LEAST = 8  # batches, of different sizes, before anything is said


class BatchCosts:
    """A line through sizes and seconds of the last batches.

    >>> costs = BatchCosts()
    >>> for size in range(10, 100, 10):
    ...     costs.add(size, 0.005 + 0.0002 * size)
    >>> round(costs.fixed(10))
    25
    """

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._sizes = self._seconds = self._squares = self._products = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Take in a batch of so many numbers, filling included."""
        self._count += 1
        self._weight = _KEPT * self._weight + 1
        self._sizes = _KEPT * self._sizes + size
        self._seconds = _KEPT * self._seconds + seconds
        self._squares = _KEPT * self._squares + size * size
        self._products = _KEPT * self._products + size * seconds

    def fixed(self, otherwise: float) -> float:
        """What any batch costs, in numbers that would cost the same, at most as many as a usual batch has.

        otherwise: what is taken where too few batches were seen, or all of one size.
        """
        if self._count < _LEAST:
            return otherwise
        size, seconds = self._sizes / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - size * size
        if spread < (0.1 * size) ** 2:
            return otherwise
        slope = (self._products / self._weight - size * seconds) / spread  # seconds for a number more
        if slope <= 0:
            return size
        return min(max(seconds / slope - size, 0.0), size)
