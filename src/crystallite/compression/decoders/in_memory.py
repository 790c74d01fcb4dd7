"""A decoder in memory, compressed layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from crystallite.compression.decoders.layer_fit import FittedLayer
from crystallite.compression.decoders.run import DecoderOptions, OutOfReach, as_tokens, fit_decoder
from crystallite.compression.decoders.stack import Stack, find_stack
from crystallite.compression.decoders.token_tables import Tables, put_tables_
from crystallite.compression.decoders.workspace import Workspace
from crystallite.data.batch import evaluating
from crystallite.data.calibration import Calibration
from crystallite.models.record import set_record_
from crystallite.models.transformers_folder import say_size_

__all__ = ["compress_decoder"]


@dataclass
class _Memory:
    """Layers of a model, and of the copies that become smaller."""

    stack: Stack
    results: list[nn.ModuleList]
    done: dict[tuple[int, int], FittedLayer] = field(default_factory=dict)
    found_tables: list[tuple[Tables, Mapping[str, Tensor]]] = field(default_factory=list)

    def read(self, number: int) -> nn.Module:
        return self.stack.layers[number]

    def smaller(self, result: int, number: int) -> nn.Module:
        return self.results[result][number]

    def write(self, result: int, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        self.results[result][number], self.done[result, number] = layer, fitted

    def written(self, result: int, number: int) -> FittedLayer | None:
        return self.done.get((result, number))

    def write_tables(self, tables: Tables, factors: Mapping[str, Tensor]) -> None:
        self.found_tables.append((tables, factors))

    def tables(self) -> tuple[Tables, Mapping[str, Tensor]] | None:
        return self.found_tables[0] if self.found_tables else None


def compress_decoder(
    model: nn.Module, data: Calibration, options: DecoderOptions, progress: bool
) -> list[nn.Module] | str:
    """Copies of a decoder whose layers are smaller, one for each budget; or why there are none.

    That is "" where the model is no such decoder. With form="any" it may have to become smaller than it can without a
    low rank, which is known before work begins.
    """
    with evaluating(model):
        stack = find_stack(model, as_tokens(data.fitted[0]).first(1))
        if stack is None:
            return ""
        as_they_are = {id(layer): layer for layer in stack.layers}  # until others take their places
        results = [copy.deepcopy(model, dict(as_they_are)) for _ in options.budgets]
        layers = _Memory(stack, [Stack(result, stack.name).layers for result in results])
        try:
            found = fit_decoder(stack, layers, data, options, Workspace(), progress)
        except OutOfReach as error:
            if options.form == "any":
                return str(error)
            raise
    for result, (record, shared) in zip(results, found, strict=True):
        for made in layers.found_tables:
            put_tables_(result, *made)
        set_record_(result, record)
        for before, now in shared:
            say_size_(result, before, now)
    return results
