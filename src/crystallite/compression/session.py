"""What a fit works on: the dense model, its layers, the data, and moments of what the layers see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration, real_rows
from crystallite.data.outputs import tensors
from crystallite.models.layers import Unit
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.observer import ForwardPlan, Seen, observe
from crystallite.statistics.regression import Moments, Regression

__all__ = ["LayerGroupMoments", "Session", "output_error"]

_ROWS = 16_384  # that are fitted on, or ten times the inputs of the widest layer


@dataclass(frozen=True)
class Session:
    """The dense model in evaluation mode, the layers that may change, and what they are fitted on."""

    dense: nn.Module
    units: dict[str, Unit]
    data: Calibration
    plan: ForwardPlan
    ridge: float
    seed: int
    call_counts: Mapping[str, int] = field(default_factory=dict)  # of each layer's weight in a call, in proportion
    uncut: AbstractSet[str] = frozenset()  # layers that are not cut into independent blocks: recurrent ones
    output_factors: dict[str, Tensor] = field(default_factory=dict)  # see `influence`

    @property
    def wanted(self) -> int:
        return max(_ROWS, 10 * max(matrix_of(unit.module).shape[1] for unit in self.units.values()))

    def start(self) -> list[Any]:
        """What is handed to the first stretch, for each batch: nothing."""
        return [None] * len(self.data.all)

    def advance(self, model: nn.Module, segment: int, carry: list[Any]) -> list[Any]:
        """What a stretch hands to the next one, for each batch."""
        if segment == len(self.plan.boundaries):
            return carry
        return [returned for _, returned in self.seen(model, segment, carry, ())]

    def seen(
        self, model: nn.Module, segment: int, carry: list[Any], names: Sequence[str], until: str | None = None
    ) -> Iterator[tuple[dict[str, Seen], Any]]:
        """What layers of a stretch see, batch by batch, and what it hands to the next one unless it ends before."""
        samples = sum(batch.size for batch in self.data.fitted)
        for batch, value in zip(self.data.all, carry, strict=True):
            rows = partial(real_rows, batch, most=math.ceil(self.wanted * batch.size / samples), seed=self.seed)
            yield observe(model, batch, self.plan, segment, value, names, rows, until)

    def regression(self, name: str, fitted: Moments, held_out: Moments) -> Regression:
        """The best dense weight of a layer for its moments."""
        unit, output_factor = self.units[name], self.output_factors.get(name)
        own, bias = matrix_of(unit.module).double(), None if unit.bias is None else unit.bias.detach().double()
        if output_factor is not None:
            own, bias = output_factor.T @ own, None if bias is None else output_factor.T @ bias
        if not fitted.samples or not held_out.samples:
            raise InvalidOption(f"{name}: no sample of the calibration data reaches it; pass more")
        if not len(fitted.t):  # no targets: what the layer writes itself
            found = Regression.of_layer(fitted, held_out, own, bias, self.ridge)
        else:
            found = Regression.solve(fitted, held_out, own, bias is not None, self.ridge)
        return replace(found, output_factor=output_factor)
        return replace(
            Regression.solve(fitted, held_out, own, bias is not None, self.ridge), output_factor=output_factor
        )

    def check_samples(self, name: str, inputs: int, samples: int) -> None:
        """Refuse to fit more numbers than there are samples for."""
        if samples < inputs:
            raise InvalidOption(
                f"{name}: expected at least {inputs} positions of calibration data, as it reads {inputs} inputs, got "
                f"{samples}; pass more data, or name the layer in ignore="
            )


class LayerGroupMoments:
    """Moments of layers that read the same tensor: its products with itself are taken once for all of them."""

    def __init__(self, session: Session, names: Sequence[str]) -> None:
        self.session, self.names = session, tuple(names)
        self.fitted, self.held_out = Moments(names[0]), Moments(names[0])

    def add(self, number: int, seen: dict[str, Seen], targets: dict[str, Tensor] | None = None) -> None:
        """Take in batch number `number`: what the layers read, and what they should write; None: what they do write."""
        x = seen[self.names[0]].inputs
        part = self.fitted if number < len(self.session.data.fitted) else self.held_out
        if part is self.held_out and part.origin is None:
            part.origin = self.fitted.origin
        if targets is None:
            part.add(x, x[:, :0])
        else:
            part.add(x, torch.cat([self._turned(name, targets[name]) for name in self.names], 1))

    def _turned(self, name: str, outputs: Tensor) -> Tensor:
        output_factor = self.session.output_factors.get(name)
        return outputs if output_factor is None else outputs @ output_factor.to(outputs)

    def regressions(self) -> dict[str, Regression]:
        """For each layer."""
        found, start = {}, 0
        for name in self.names:
            end = start + len(matrix_of(self.session.units[name].module))
            own = [moments.part(name, slice(start, end)) for moments in (self.fitted, self.held_out)]
            found[name], start = self.session.regression(name, own[0], own[1]), end
        return found


def output_error(found: Any, expected: Any, batch: Batch) -> float:
    """Σ (found − expected)² of a model's outputs as a share of their variance, on average over its output tensors.

    >>> output_error(torch.tensor([[1.0], [4.0]]), torch.tensor([[1.0], [3.0]]), Batch(0, 2))
    0.5
    """
    shares = []
    ours = tensors(found)
    for path, value in tensors(expected).items():
        if value.is_floating_point():
            rows = real_rows(batch, value.shape[:-1], value.numel(), 0).to(value.device)
            a, b = (v.reshape(-1, v.shape[-1] if v.ndim else 1)[rows].double() for v in (ours[path], value))
            variance = ((b - b.mean(0)) ** 2).sum() or (b**2).sum()  # of a single row there is none
            shares.append(float(((a - b) ** 2).sum() / variance.clamp_min(torch.finfo(torch.float64).tiny)))
    return sum(shares) / max(len(shares), 1)
