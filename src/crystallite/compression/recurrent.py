"""Recurrent stacks as the linear layers inside them: the products with inputs and with states, each for all gates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.models.layers import Unit
from crystallite.models.swap import put_everywhere_
from crystallite.operators.low_rank_recurrent import LowRankRecurrent, LowRankRecurrentLayer
from crystallite.operators.recurrent_layer import Steps

__all__ = ["ExpandedLayer", "collapse_recurrent", "expand_recurrent", "inner_units", "reads_own_states", "step_by_step"]


class ExpandedLayer(LowRankRecurrentLayer):
    """A recurrent layer that can be watched: whoever has hooks on its products sees them for all steps at once.

    Step by step they are products of single steps, through which gradients flow.
    """

    stepped = False

    def forward(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.stepped:
            return self._step_by_step(data, steps, states, backward)
        if _watched(self.input):
            self.input(data)
        output, final = self.run_native(data, steps, states, backward)
        if _watched(self.recurrent):
            self.recurrent(_states_before(output, states[0], steps, backward))
        return output, final

    def _step_by_step(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        given, parts, now = self.input(data), {}, states
        times = list(enumerate(zip(steps.counts.tolist(), steps.starts.tolist(), strict=True)))
        for time, (count, start) in reversed(times) if backward else times:
            before = tuple(state[:count] for state in now)
            after = _next(self.mode, given[start : start + count], self.recurrent(before[0]), before)
            parts[time] = after[0]
            now = tuple(torch.cat([new, old[count:]]) for new, old in zip(after, now, strict=True))
        return torch.cat([parts[time] for time, _ in times]), now


def _next(mode: str, given: Tensor, own: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """States after a step, from what the gates get from inputs and from states."""
    if mode == "GRU":
        (r, z, n), (own_r, own_z, own_n) = given.chunk(3, 1), own.chunk(3, 1)
        keep, new = torch.sigmoid(z + own_z), torch.tanh(n + torch.sigmoid(r + own_r) * own_n)
        return (new + keep * (states[0] - new),)
    if mode == "LSTM":
        i, f, g, o = (given + own).chunk(4, 1)
        cell = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell
    total = given + own
    return (torch.relu(total) if mode == "RNN_RELU" else torch.tanh(total),)


def _watched(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _states_before(output: Tensor, first: Tensor, steps: Steps, backward: bool) -> Tensor:
    """(rows, hidden): the state that each row of the output was made from."""
    counts, starts = steps.counts, steps.starts
    time = np.repeat(np.arange(len(counts)), counts)
    sequence = np.arange(len(time)) - starts[time]
    before = time + (1 if backward else -1)
    there = before.clip(0, len(counts) - 1)
    known = (before == there) & (sequence < counts[there])
    place = np.where(known, starts[there] + sequence, len(time) + sequence)  # else the initial state
    return torch.cat([output, first]).index_select(0, torch.from_numpy(place).to(output.device))


def expand_recurrent(
    model: nn.Module, names: Iterable[str], layer: type[LowRankRecurrentLayer] | None = None
) -> nn.Module:
    """The model, in place, with recurrent modules whose products are layers of their own."""
    for name in names:
        module: Any = model.get_submodule(name)
        made = LowRankRecurrent.from_dense(module, layer)
        model = put_everywhere_(model, name, made)
    return model


def collapse_recurrent(model: nn.Module, name: str) -> nn.Module:
    """The model, in place, with PyTorch's own module where no product of the recurrent one has become smaller."""
    module: Any = model.get_submodule(name)
    if any(any(part.ranks) for part in module.parts()):
        return model
    return put_everywhere_(model, name, module.to_dense())


def inner_units(unit: Unit, expanded: nn.Module) -> list[Unit]:
    """The products of a recurrent unit of an expanded model, as linear units; any other unit as it is."""
    if unit.kind != "recurrent":
        return [unit]
    network: Any = expanded.get_submodule(unit.name)
    prefix = f"{unit.name}." if unit.name else ""
    return [
        Unit(f"{prefix}layers.{i}.{kind}", getattr(part, kind), "linear")
        for i, part in enumerate(network.layers)
        for kind in ("input", "recurrent")
    ]


def reads_own_states(model: nn.Module, name: str) -> bool:
    """Whether a layer is the product of a recurrent one with the states that it writes itself."""
    parent, _, place = name.rpartition(".")
    return place == "recurrent" and isinstance(model.get_submodule(parent), LowRankRecurrentLayer)


@contextmanager
def step_by_step(model: nn.Module) -> Iterator[None]:
    """Recurrent layers that go through time one product after the other."""
    layers = [module for module in model.modules() if isinstance(module, ExpandedLayer)]
    try:
        for layer in layers:
            layer.stepped = True
        yield
    finally:
        for layer in layers:
            layer.stepped = False
