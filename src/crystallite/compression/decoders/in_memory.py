"""A decoder in memory, compressed layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.run import DecoderFit, as_tokens, in_chunks, record_of
from crystallite.compression.decoders.stack import Stack, find_stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import matching
from crystallite.data.batch import evaluating
from crystallite.data.calibration import Calibration
from crystallite.models.experts import units_and_experts
from crystallite.models.layers import find_units
from crystallite.models.record import record, set_record_
from crystallite.models.transformers_folder import say_size_

__all__ = ["compress_decoder", "small_layers"]


@dataclass
class _Memory:
    """Layers of a model, and of the copy that becomes smaller."""

    stack: Stack
    result: nn.ModuleList
    done: dict[int, FittedLayer] = field(default_factory=dict)

    def read(self, number: int) -> nn.Module:
        return self.stack.layers[number]

    def write(self, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        self.result[number], self.done[number] = layer, fitted

    def written(self, number: int) -> FittedLayer | None:
        return self.done.get(number)


def compress_decoder(
    model: nn.Module, data: Calibration, budget: float, objective: str, form: str, ridge: float, seed: int,
    targets: str | Sequence[str], ignore: str | Sequence[str], progress: bool,
) -> nn.Module | None:  # fmt: skip
    """A copy of a decoder whose layers are smaller; None where the model is none, or nothing may go from its layers."""
    fitted, held_out = (in_chunks([as_tokens(b) for b in some]) for some in (data.fitted, data.held_out))
    with evaluating(model):
        stack = find_stack(model, fitted[0].first(1))
        if stack is None or units_and_experts(model, ["*"], []) != find_units(model, ["*"], []):
            return None
    units = find_units(model, ["*"], [])
    asked = {*matching([unit.name for unit in units], targets, ignore)}
    kept = {
        n: [name for name, _ in layer.named_modules() if name and f"{stack.layer_name(n)}.{name}" not in asked]
        for n, layer in enumerate(stack.layers)
    }
    result = copy.deepcopy(model)
    layers = _Memory(stack, Stack(result, stack.name).layers)
    fit = DecoderFit(stack, layers, (*fitted, *held_out), len(held_out), form, ridge, seed, Workspace(), kept, progress)
    numbers = sum(p.numel() for p in model.parameters())
    total = numbers if objective == "parameters" else sum(unit.macs for unit in units)
    with evaluating(model):
        probes = fit.probe()
        try:
            plan = fit.plan(probes, total, budget * total)
        except InvalidOption as error:
            if form == "any":
                return None  # layers of low rank may do it
            raise InvalidOption(f'budget {budget:g} cannot be reached with form="{form}": {error}') from None
        done = dict(fit.fit(probes, plan))
        set_record_(result, record_of(fit, units, done, budget, objective, asked.__contains__))
    if form == "uniform":
        (sizes,) = {tuple(sorted(size.items())) for size in plan.sizes}
        groups = {key: group.size for parts in fit.found_parts for key, group in parts.groups.items()}
        for key, size in sizes:
            say_size_(result, groups[key], size)
    return result


def small_layers(result: nn.Module) -> list[str]:
    """Layers of the result that were fitted."""
    return [c.name for c in record(result).changes if c.error is not None]
