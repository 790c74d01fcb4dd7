"""Sums over samples from which least squares follows: no activations are kept, only their products."""

from __future__ import annotations

import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption

__all__ = ["Moments"]

_SUMS = ("x", "t", "xx", "xt", "tt")
_ROWS = 2048  # that wait until their products are taken: large products are quicker, and float64 is added to rarely


class Moments:
    """Sums over samples of what layers read (x) and should write (t), which is all that least squares needs.

    Products of some thousand rows are taken in the dtype of the activations and summed in float64, around the first
    batch's mean, so that large constant activations cost no digits. O(inputs² + inputs · outputs) for any number of
    samples.
    """

    def __init__(self, name: str, around: Moments | None = None) -> None:
        """around: other moments whose origin these shall have."""
        self.name, self.samples = name, 0
        self.origin: tuple[Tensor, Tensor] | None = None if around is None else around.origin
        self.x = self.t = self.xx = self.xt = self.tt = torch.zeros((), dtype=torch.float64)
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, t: Tensor) -> None:
        """Take in some rows: x (rows, inputs), t (rows, outputs)."""
        if not len(x):  # none of a batch reached an expert
            return
        if not (x.isfinite().all() and t.isfinite().all()):
            raise InvalidOption(
                f"{self.name}: its activations on the data hold NaN or infinity; check the data, or the "
                "dtype of the model"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, t = x.to(dtype), t.to(dtype)
        if self.origin is None:
            self.origin = x.mean(0), t.mean(0)
        self.samples += len(x)
        self._waiting.append((x - self.origin[0], t - self.origin[1]))
        if sum(len(part) for part, _ in self._waiting) >= _ROWS:
            self._sum()

    def _sum(self) -> None:
        """Take the products of what waits."""
        if not self._waiting:
            return
        x, t = (torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        for name, value in zip(_SUMS, (x.sum(0), t.sum(0), x.T @ x, x.T @ t, (t * t).sum(0)), strict=True):
            setattr(self, name, getattr(self, name).to(x.device) + value)

    def part(self, name: str, outputs: slice) -> Moments:
        """The same for some of the outputs."""
        assert self.origin is not None
        self._sum()
        found = Moments(name)
        found.samples, found.origin = self.samples, (self.origin[0], self.origin[1][outputs])
        found.x, found.xx = self.x, self.xx
        found.t, found.xt, found.tt = self.t[outputs], self.xt[:, outputs], self.tt[outputs]
        return found

    def around(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ xxᵀ, Σ xtᵀ and Σ t² of deviations from a point."""
        assert self.origin is not None
        self._sum()
        dx, dt = x - self.origin[0].double(), t - self.origin[1].double()
        moved = self.samples * dx - self.x
        xx = torch.addr(self.xx, dx, moved).addr_(self.x, dx, alpha=-1)
        xt = torch.addr(self.xt, moved, dt).addr_(dx, self.t, alpha=-1)
        return xx, xt, self.tt - 2 * dt * self.t + self.samples * dt**2

    @property
    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """(inputs, inputs) of what is read, (inputs, outputs) with what is written, (outputs,) variances of that."""
        xx, xt, tt = (total / self.samples for total in self.around(*self.means))
        return xx, xt, tt.clamp_min(0)

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        assert self.origin is not None
        self._sum()
        return self.origin[0].double() + self.x / self.samples, self.origin[1].double() + self.t / self.samples
