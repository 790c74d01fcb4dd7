"""A decoder in memory, compressed layer by layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from torch import nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.run import DecoderOptions, as_tokens, fit_decoder
from crystallite.compression.decoders.stack import Stack, find_stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import evaluating
from crystallite.data.calibration import Calibration
from crystallite.models.record import record as record_of
from crystallite.models.record import set_record_
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


def compress_decoder(model: nn.Module, data: Calibration, options: DecoderOptions, progress: bool) -> nn.Module | None:
    """A copy of a decoder whose layers are smaller.

    None where the model is none, has experts, or (with form="any") cannot become so small without a low rank.
    """
    with evaluating(model):
        stack = find_stack(model, as_tokens(data.fitted[0]).first(1))
        if stack is None:
            return None
        result = copy.deepcopy(model)
        layers = _Memory(stack, Stack(result, stack.name).layers)
        try:
            record, shared = fit_decoder(stack, layers, data, options, Workspace(), progress)
        except InvalidOption:
            if options.form == "any":
                return None
            raise
    set_record_(result, record)
    for before, now in shared:
        say_size_(result, before, now)
    return result


def small_layers(result: nn.Module) -> list[str]:
    """Layers of the result that were fitted."""
    return [c.name for c in record_of(result).changes if c.error is not None]
