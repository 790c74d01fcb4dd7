"""A budget divided over the parts of all layers: what adds least damage for what it saves goes first."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crystallite.core.errors import InvalidOption

__all__ = ["SizeCurve", "share_out"]


@dataclass(frozen=True)
class SizeCurve:
    """What it adds to the error that parts which shall have one size are smaller, and how large they are then."""

    sizes: tuple[int, ...]  # neurons, largest first
    errors: tuple[float, ...]
    weights: tuple[float, ...]  # that belong to the neurons that are left

    @classmethod
    def sum(cls, curves: Sequence[SizeCurve]) -> SizeCurve:
        """One curve for parts that shall be equal."""
        (sizes,) = {curve.sizes for curve in curves}
        errors, weights = (
            tuple(map(sum, zip(*(getattr(curve, side) for curve in curves), strict=True)))
            for side in ("errors", "weights")
        )
        return cls(sizes, errors, weights)

    def finer(self, step: int) -> SizeCurve:
        """The same with all multiples of a step between the smallest and the largest size, on straight lines.

        >>> SizeCurve((6, 2), (0.0, 1.0), (60.0, 20.0)).finer(4)
        SizeCurve(sizes=(6, 4, 2), errors=(0.0, 0.5, 1.0), weights=(60.0, 40.0, 20.0))
        """
        sizes = sorted({*self.sizes, *range(-(-self.sizes[-1] // step) * step, self.sizes[0], step)}, reverse=True)
        errors, weights = (
            tuple(np.interp(sizes, self.sizes[::-1], side[::-1]).tolist()) for side in (self.errors, self.weights)
        )
        return SizeCurve(tuple(sizes), errors, weights)


def share_out(curves: Mapping[str, SizeCurve], total: float, limit: float) -> dict[str, int]:
    """The size of each part, so that what is left of `total` is at most `limit`.

    Greedy along the lower convex hull of every curve, which is the best there is up to the last step; the last one is
    then as small as the limit allows.

    >>> flat, steep = (SizeCurve((4, 2, 1), errors, (4, 2, 1)) for errors in ((0.0, 1.0, 2.0), (0.0, 9.0, 20.0)))
    >>> share_out({"a": flat, "b": steep}, 8.0, 5.0)
    {'a': 1, 'b': 4}
    """
    at, left = dict.fromkeys(curves, 0), total
    waiting: list[tuple[float, str, int]] = []

    def push(name: str) -> None:
        curve, here = curves[name], at[name]
        steps = [
            (max(curve.errors[i] - curve.errors[here], 0.0) / (curve.weights[here] - curve.weights[i]), i)
            for i in range(here + 1, len(curve.sizes))
            if curve.weights[i] < curve.weights[here]
        ]
        if steps:
            slope, place = min(steps, key=lambda step: (step[0], step[1]))
            heapq.heappush(waiting, (slope, name, place))

    for name in curves:
        push(name)
    while left > limit:
        if not waiting:
            raise InvalidOption(f"the smallest that can be reached here is {left / total:.3f} of it")
        _, name, place = heapq.heappop(waiting)
        curve, here = curves[name], at[name]
        enough = [i for i in range(here + 1, place) if left - curve.weights[here] + curve.weights[i] <= limit]
        place = enough[0] if enough else place
        left -= curve.weights[here] - curve.weights[place]
        at[name] = place
        push(name)
    return {name: curves[name].sizes[place] for name, place in at.items()}
