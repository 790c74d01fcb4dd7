"""What a fit works on: the dense model, its layers, the data, and moments of what the layers see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from crystallite.compression.experts import Routes, routing
from crystallite.core.errors import InvalidOption
from crystallite.data.calibration import Calibration
from crystallite.data.positions import real_rows
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.models.layers import Unit
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.moments import Moments
from crystallite.statistics.observer import Carry, ForwardPlan, Seen, observe
from crystallite.statistics.regression import Regression

__all__ = ["LayerGroupMoments", "Session"]

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
    call_counts: Mapping[str, float] = field(default_factory=dict)  # of each layer's weight
    counted: str = ""  # what these are of, in words
    uncut: AbstractSet[str] = frozenset()  # layers that are not cut into independent blocks: recurrent ones
    output_factors: dict[str, Tensor] = field(default_factory=dict)  # see `influence`
    kernels: Mapping[str, float] = field(default_factory=dict)  # module between layers → what each of its neurons costs
    routes: dict[int, Routes] = field(default_factory=dict)  # by batch: where the dense model's experts are sent what
    mixed: set[str] = field(default_factory=set)  # layers of the dense model whose outputs were mixed inside heads

    @property
    def wanted(self) -> int:
        return max(_ROWS, 10 * max(matrix_of(unit.module).shape[1] for unit in self.units.values()))

    def between(self, group: NeuronGroup) -> float:
        """What a neuron costs between its layers."""
        return sum(self.kernels.get(name, 0.0) for name in group.passed)

    def start(self) -> list[Carry]:
        """The carry of the first segment, for each batch: nothing."""
        return [()] * len(self.data.all)

    def advance(self, model: nn.Module, segment: int, carry: list[Carry]) -> list[Carry]:
        """The carry of the next segment, for each batch."""
        if segment == len(self.plan.boundaries):
            return carry
        return [following for _, following in self.seen(model, segment, carry, ())]

    def seen(
        self, model: nn.Module, segment: int, carry: list[Carry], names: Sequence[str], until: str | None = None
    ) -> Iterator[tuple[dict[str, Seen], Carry]]:
        """What layers of a segment see, batch by batch, and the carry of the next one unless the run ends before.

        While layers of another model are looked at, its experts are sent what those of the dense model were.
        """
        samples = sum(batch.size for batch in self.data.fitted)
        replay = model is not self.dense and bool(names or until)
        for number, (batch, value) in enumerate(zip(self.data.all, carry, strict=True)):
            rows = partial(real_rows, batch, most=math.ceil(self.wanted * batch.size / samples), seed=self.seed)
            routes = self.routes.setdefault(number, {}) if replay or model is self.dense else {}
            with routing(model, batch, routes, replay=replay):
                found = observe(model, batch, self.plan, segment, value, names, rows, until)
            yield found

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
            part.add(x, torch.cat([self._whitened(name, targets[name]) for name in self.names], 1))

    def _whitened(self, name: str, outputs: Tensor) -> Tensor:
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
