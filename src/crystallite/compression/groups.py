"""NeuronGroup neurons, and channels, that only layers around them know of, so that some of them can go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding, tensors
from crystallite.graph.trace import Layer, Spaces, trace
from crystallite.partitioning.partition import own_neurons
from crystallite.statistics.layer_io import matrix_of

__all__ = ["NeuronGroup", "find_neuron_groups", "rotate_heads_"]

# modules that may hold numbers of a neuron: in a batch norm each has its own
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class NeuronGroup:
    """Neurons, or channels, between layers: those that write them (two, if one is a gate) and the one that reads them.

    heads: of an attention between the layers, whose sizes must then stay as they are outwards; 0: none.
    width: inputs of the reader for each neuron, next to each other: places of its kernel, or of an image.
    norms: batch norms between the layers.
    """

    writers: tuple[str, ...]
    reader: str
    size: int
    heads: int = 0
    width: int = 1
    norms: tuple[str, ...] = ()


def find_neuron_groups(model: nn.Module, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The hidden neurons of some layers that each act on their own, by their reader in the order of the model.

    Found in the traced graph, and then tried: where the reader does not listen, what the writers say must not matter.
    So neurons under a softmax or a norm are left alone. The numbers that attention heads hand on from a value layer to
    an output layer are neurons too. Raises `Untraceable` where the graph cannot be had.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> find_neuron_groups(net, {"0", "2", "4"}, Batch(0, 2, (torch.ones(2, 2),)))
    [NeuronGroup(writers=('0',), reader='2', size=8, heads=0, width=1, norms=())]
    """
    example: Any = dict(batch.named) if batch.named else batch.positional
    spaces = trace(model, example)
    found = []
    for space in sorted(own_neurons(model, spaces, _KINDS)):
        writers = tuple(layer.name for layer in spaces.layers if layer.rows == ((space,),))
        readers = [layer.name for layer in spaces.layers if _reads(layer, space, spaces)]
        carriers = {layer.name for layer in spaces.layers for part in layer.rows + layer.columns if space in part}
        if not writers or len(readers) != 1 or carriers != {*writers, *readers} or not carriers <= set(names):
            continue
        tensors_of = {tensor.rpartition(".")[0] for (tensor, _), axis in spaces.places.items() if axis == ((space,),)}
        norms = tuple(sorted(tensors_of - carriers))
        size, reader = spaces.spaces[space].size, model.get_submodule(readers[0])
        hidden = NeuronGroup(writers, readers[0], size, 0, matrix_of(reader).shape[1] // size, norms)
        if hidden.reader not in writers and _on_their_own(model, hidden, batch):
            found.append(hidden)
    return found + _head_numbers(model, spaces, names, batch)


def _reads(layer: Layer, space: int, spaces: Spaces) -> bool:
    """Whether a layer reads these neurons and no others, each of them at some places maybe."""
    if len(layer.columns) != 1 or layer.columns[0][:1] != (space,):
        return False
    return all(spaces.spaces[place].fixed for place in layer.columns[0][1:])


@torch.no_grad()
def _on_their_own(model: nn.Module, hidden: NeuronGroup, batch: Batch) -> bool:
    """Whether it makes no difference what every other neuron says if its reader has no weight for it."""
    reader: Any = model.get_submodule(hidden.reader)
    writers: list[Any] = [model.get_submodule(name) for name in hidden.writers]
    changed: list[Tensor] = [reader.weight, *(p for writer in writers for p in writer.parameters())]
    before = [p.clone() for p in changed]
    try:
        reader.weight.view(len(reader.weight), hidden.size, -1)[:, ::2] = 0
        once = tensors(batch.run(model))
        for parameter in changed[1:]:
            parameter[::2] = 0
        again = tensors(batch.run(model))
        return all(equal_up_to_rounding(again[path], value) for path, value in once.items())
    finally:
        for parameter, value in zip(changed, before, strict=True):
            parameter.copy_(value)


def _head_numbers(model: nn.Module, spaces: Spaces, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """For each attention, the numbers of its heads that one linear layer writes and another one reads.

    Found in the traced graph, and then tried: it must make no difference if both layers turn each head's numbers into
    others and back, as it does where attention only averages over them.
    """
    found = []
    for reader in spaces.layers:
        axis = reader.columns
        if len(axis) != 1 or len(axis[0]) != 2 or reader.name not in names:
            continue
        heads, inner = axis[0]
        writers = [layer.name for layer in spaces.layers if layer.rows == axis]
        carriers = {layer.name for layer in spaces.layers for part in layer.rows + layer.columns if inner in part}
        space = spaces.spaces[inner]
        if space.within != (heads,) or space.fixed or len(writers) != 1 or carriers != {reader.name, writers[0]}:
            continue
        count = spaces.spaces[heads].size
        hidden = NeuronGroup((writers[0],), reader.name, count * space.size, count)
        if writers[0] in names and _can_turn(model, hidden, batch):
            found.append(hidden)
    return found


@torch.no_grad()
def _can_turn(model: nn.Module, hidden: NeuronGroup, batch: Batch) -> bool:
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(hidden.heads, *[hidden.size // hidden.heads] * 2, generator=rng, dtype=torch.float64)
    turn = torch.linalg.qr(drawn).Q
    before = tensors(batch.run(model))
    layers: list[Any] = [model.get_submodule(name) for name in (*hidden.writers, hidden.reader)]
    kept = [[p.clone() for p in layer.parameters()] for layer in layers]
    try:
        rotate_heads_(model, hidden, turn, turn.mT)
        after = tensors(batch.run(model))
        return all(equal_up_to_rounding(after[path], value) for path, value in before.items())
    finally:
        for layer, values in zip(layers, kept, strict=True):
            for parameter, value in zip(layer.parameters(), values, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def rotate_heads_(model: nn.Module, hidden: NeuronGroup, forward: Tensor, back: Tensor) -> None:
    """Let the writer hand on other numbers of each head, and the reader take them back: (heads, width, width) each."""
    writer: Any = model.get_submodule(hidden.writers[0])
    reader: Any = model.get_submodule(hidden.reader)
    written, read = (m.weight if isinstance(m, nn.Linear) else m.weight.T for m in (writer, reader))
    forward, back = forward.to(written.device), back.to(written.device)
    written.copy_((forward @ written.double().unflatten(0, forward.shape[:2])).flatten(0, 1))
    if writer.bias is not None:
        writer.bias.copy_((forward @ writer.bias.double().view(*forward.shape[:2], 1)).flatten())
    read.copy_(torch.einsum("ohw,hwv->ohv", read.double().unflatten(1, back.shape[:2]), back).flatten(1))
