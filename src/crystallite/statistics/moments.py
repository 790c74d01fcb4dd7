"""Sums over samples from which least squares follows: no activations are kept, only their products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption

__all__ = ["Moments"]

_PARTS = 4  # of the inputs, whose products are taken one after the other
_LEAST = 64  # inputs in a part
_ROWS = 1024  # that wait until their products are taken: large products are quicker, and float64 is added to rarely


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
        self.x = self.t = self.xx = self.xt = self.tt = torch.zeros((), dtype=torch.float64)  # of xx, the upper half
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, t: Tensor) -> None:
        """Take in some rows: x (rows, inputs), t (rows, outputs)."""
        if not len(x):  # none of a batch reached an expert
            return
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        x, t = x.to(dtype), t.to(dtype)
        if self.origin is None:
            self.origin = x.mean(0), t.mean(0)
            self._check_finite(*self.origin)
        self.samples += len(x)
        self._waiting.append((x - self.origin[0], t - self.origin[1]))
        if sum(len(part) for part, _ in self._waiting) >= _ROWS:
            self._sum()

    def _sum(self) -> None:
        """Take the products of what waits."""
        if not self._waiting:
            return
        x, t = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._waiting, strict=True))
        self._waiting.clear()
        inputs, outputs = x.shape[1], t.shape[1]
        if not self.xx.ndim:
            empty = partial(torch.zeros, dtype=torch.float64, device=x.device)
            self.x, self.xx, self.xt = empty(inputs), empty(inputs, inputs), empty(inputs, outputs)
            self.t, self.tt = empty(outputs), empty(outputs)
        sums = x.sum(0), t.sum(0)
        self._check_finite(*sums)
        for total, value in zip((self.x, self.t, self.xt, self.tt), (*sums, x.T @ t, (t * t).sum(0)), strict=True):
            total += value
        step = max(-(-inputs // _PARTS), _LEAST)
        for start in range(0, inputs, step):  # above the diagonal only: below it is the same
            self.xx[start : start + step, start:] += x[:, start : start + step].T @ x[:, start:]

    @classmethod
    def total(cls, parts: Sequence[Moments]) -> Moments:
        """Of all rows together; the origin is that of the first."""
        parts = [part for part in parts if part.samples] or parts[:1]
        found = cls(parts[0].name, around=parts[0])
        if len(parts) == 1 or found.origin is None:
            return parts[0]
        x, t = (value.double() for value in found.origin)
        for part in parts:
            assert part.origin is not None
            moved = [here.double() - there for here, there in zip(part.origin, (x, t), strict=True)]
            xx, xt, tt = part.around(x, t)
            sums = (xx, xt, tt, part.x + part.samples * moved[0], part.t + part.samples * moved[1])
            if not found.samples:
                found.xx, found.xt, found.tt, found.x, found.t = sums
            else:
                for value, more in zip((found.xx, found.xt, found.tt, found.x, found.t), sums, strict=True):
                    value += more
            found.samples += part.samples
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Without rows: what is sent to another process is small."""
        self._sum()
        return vars(self)

    def _check_finite(self, *sums: Tensor) -> None:
        if not all(bool(total.isfinite().all()) for total in sums):
            raise InvalidOption(
                f"{self.name}: its activations on the data hold NaN or infinity; check the data, or the "
                "dtype of the model"
            )

    @property
    def _squares(self) -> Tensor:
        """Σ xxᵀ around the origin, both halves; the sums themselves, no copy."""
        self._sum()
        found = self.xx
        step = max(-(-len(found) // _PARTS), _LEAST)
        for start in range(0, len(found), step):  # in parts: the matrix may be large
            stop = start + step
            half = found[start:stop, start:stop].triu()
            found[start:stop, start:stop] = half + half.triu(1).T
            found[stop:, start:stop] = found[start:stop, stop:].T
        return found

    def part(self, name: str, outputs: slice) -> Moments:
        """The same for some of the outputs."""
        assert self.origin is not None
        self._sum()
        found = Moments(name)
        found.samples, found.origin = self.samples, (self.origin[0], self.origin[1][outputs])
        found.x, found.xx = self.x, self.xx
        found.t, found.xt, found.tt = self.t[outputs], self.xt[:, outputs], self.tt[outputs]
        return found

    def around(self, x: Tensor, t: Tensor, spend: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Σ xxᵀ, Σ xtᵀ and Σ t² of deviations from a point.

        spend: the first two take the place of these moments' own, which are gone: no copy of what may be large.
        """
        assert self.origin is not None
        self._sum()
        dx, dt = x - self.origin[0].double(), t - self.origin[1].double()
        moved = self.samples * dx - self.x
        xx, xt = self._squares, self.xt
        if spend:
            self.xx = self.xt = torch.zeros((), dtype=torch.float64)
            xx, xt = xx.addr_(dx, moved), xt.addr_(moved, dt)
        else:
            xx, xt = torch.addr(xx, dx, moved), torch.addr(xt, moved, dt)
        xx.addr_(self.x, dx, alpha=-1)
        xt.addr_(dx, self.t, alpha=-1)
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
