"""Hidden neurons that only linear layers know of, so that some of them can go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.reorganization.graph import trace
from crystallite.upgrading.partition import own_neurons
from crystallite.validation.batches import Batch, equal_up_to_rounding, run
from crystallite.validation.outputs import tensors

__all__ = ["Hidden", "hidden_neurons"]


@dataclass(frozen=True)
class Hidden:
    """Neurons between linear layers: those that write them (two, if one is a gate) and the one that reads them."""

    writers: tuple[str, ...]
    reader: str
    size: int


def hidden_neurons(model: nn.Module, names: Collection[str], batch: Batch) -> list[Hidden]:
    """The hidden neurons of some layers that each act on their own, by their reader in the order of the model.

    Found in the traced graph, and then tried: where the reader does not listen, what the writers say must not matter.
    So neurons under a softmax or a norm are left alone. Raises `Untraceable` where the graph cannot be had.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> hidden_neurons(net, {"0", "2", "4"}, Batch(0, 2, (torch.ones(2, 2),)))
    [Hidden(writers=('0',), reader='2', size=8)]
    """
    example: Any = dict(batch.named) if batch.named else batch.positional
    spaces = trace(model, example)
    found = []
    for space in sorted(own_neurons(model, spaces, (nn.Linear,))):
        writers = tuple(layer.name for layer in spaces.layers if layer.rows == ((space,),))
        readers = [layer.name for layer in spaces.layers if layer.columns == ((space,),)]
        carriers = {layer.name for layer in spaces.layers for part in layer.rows + layer.columns if space in part}
        if not writers or len(readers) != 1 or carriers != {*writers, *readers} or not carriers <= set(names):
            continue
        hidden = Hidden(writers, readers[0], spaces.spaces[space].size)
        if hidden.reader not in writers and _on_their_own(model, hidden, batch):
            found.append(hidden)
    return found


@torch.no_grad()
def _on_their_own(model: nn.Module, hidden: Hidden, batch: Batch) -> bool:
    """Whether it makes no difference what every other neuron says if its reader has no weight for it."""
    reader: Any = model.get_submodule(hidden.reader)
    writers: list[Any] = [model.get_submodule(name) for name in hidden.writers]
    changed: list[Tensor] = [reader.weight, *(p for writer in writers for p in writer.parameters())]
    before = [p.clone() for p in changed]
    try:
        reader.weight[:, ::2] = 0
        once = tensors(run(model, batch))
        for parameter in changed[1:]:
            parameter[::2] = 0
        again = tensors(run(model, batch))
        return all(equal_up_to_rounding(again[path], value) for path, value in once.items())
    finally:
        for parameter, value in zip(changed, before, strict=True):
            parameter.copy_(value)


def first_samples(batch: Batch, count: int) -> Batch:
    """The batch cut to a few samples."""

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.shape[:1] == (batch.size,) else value

    named = {name: cut(value) for name, value in batch.named.items()}
    return replace(batch, size=min(count, batch.size), positional=tuple(map(cut, batch.positional)), named=named)
