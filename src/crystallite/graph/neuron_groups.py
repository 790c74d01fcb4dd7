"""`find_neuron_groups`: which neurons, channels and heads belong together, who writes them and who reads them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.graph.trace import Axis, Spaces, trace

__all__ = ["CONVOLUTIONS", "NeuronGroup", "find_neuron_groups", "neuron_groups", "rotate_heads_", "without"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm  # has numbers of its own for each channel, so channels stay apart


@dataclass(frozen=True)
class NeuronGroup:
    """Neurons that layers hand to layers and nothing else knows of: hidden neurons, channels, or parts of attention.

    Of an attention, a group is either all its heads as wholes (`heads` = `size`, each of several numbers), or the
    numbers that its heads hand on (`heads` < `size`), which each head can rotate among themselves.
    """

    size: int
    writers: tuple[str, ...]  # in the order in which they run; several where one is a gate, or a residual stream grows
    readers: tuple[str, ...]
    heads: int = 0  # 0: no attention lies between the layers
    width: int = 1  # inputs of each reader for a neuron, next to each other: places of a kernel or image; 0: not so
    norms: tuple[str, ...] = ()  # batch norms between the layers
    # (parameter or buffer, axis) → for each index along the axis the neuron it belongs to, −1: none of these
    carried: Mapping[tuple[str, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def between(cls, model: nn.Module, writers: Sequence[str], reader: str, head_size: int = 0) -> NeuronGroup:
        """The neurons that some linear layers write and one reads, where nothing else knows of them.

        head_size: outputs of a writer for each attention head, which are a neuron of the group together; 0: no heads.

        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> NeuronGroup.between(net, ["0"], "2").size, NeuronGroup.between(net, ["0"], "2", head_size=3).size
        (6, 2)
        """
        each, carried = head_size or 1, dict[tuple[str, int], Tensor]()
        for writer in writers:
            for name, parameter in model.get_submodule(writer).named_parameters(recurse=False):
                carried[f"{writer}.{name}", 0] = torch.arange(len(parameter)) // each
        inputs = model.get_submodule(reader).get_parameter("weight").shape[1]
        outputs = {len(labels) for labels in carried.values()}
        if outputs != {inputs} or inputs % each:
            heads = f", in heads of {head_size}" if head_size else ""
            raise InvalidOption(
                f"{reader}: expected one input for each output of {', '.join(writers)}{heads}, "
                f"got {inputs} inputs and {sorted(outputs)} outputs"
            )
        carried[f"{reader}.weight", 1] = torch.arange(inputs) // each
        size = inputs // each
        return cls(size, tuple(writers), (reader,), size if head_size else 0, each, (), carried)

    @property
    def layers(self) -> tuple[str, ...]:
        """Writers and readers."""
        return tuple(dict.fromkeys((*self.writers, *self.readers)))

    @property
    def inside_heads(self) -> bool:
        """Whether the neurons are the numbers of attention heads."""
        return 0 < self.heads < self.size

    @property
    def reader(self) -> str:
        """The one layer that reads the neurons."""
        (reader,) = self.readers
        return reader

    @property
    def is_aligned(self) -> bool:
        """Whether writers have one output for each neuron and readers `width` inputs, in order, and none for others."""
        weights = {f"{reader}.weight" for reader in self.readers}
        written = (labels for (name, _), labels in self.carried.items() if name not in weights)
        apart = len(self.layers) == len(self.writers) + len(self.readers)
        return apart and self.width > 0 and all(torch.equal(each, torch.arange(self.size)) for each in written)


def neuron_groups(model: nn.Module, spaces: Spaces) -> dict[Axis, NeuronGroup]:
    """The groups of a traced model, each under the axis that consists of its neurons alone, in the order of the model.

    They are neurons whose order is free, in tensors of layers and batch norms only; only numbers of heads may be in
    layers of any kind. Whether they can be removed or rotated is for the trials (`trials.py`) to say.
    """
    found = dict[Axis, NeuronGroup]()
    for number, space in enumerate(spaces.spaces):
        group = None if space.fixed else _group(model, spaces, number)
        if group is not None:
            found[((*space.within, number),)] = group
    return found


def _group(model: nn.Module, spaces: Spaces, number: int) -> NeuronGroup | None:
    within, size = spaces.spaces[number].within, spaces.neurons(number)
    places = {place: axis for place, axis in spaces.places.items() if any(number in part for part in axis)}
    writers, readers = (
        tuple(layer.name for layer in spaces.layers if any(number in part for part in getattr(layer, side)))
        for side in ("rows", "columns")
    )
    owners = {name.rpartition(".")[0]: model.get_submodule(name.rpartition(".")[0]) for name, _ in places}
    others = {name: module for name, module in owners.items() if name not in (*writers, *readers)}
    norms = tuple(sorted(name for name, module in others.items() if isinstance(module, _BATCH_NORM)))
    if not writers or not readers or len(norms) < len(others):
        return None
    carried = {place: spaces.labels(axis, number) for place, axis in places.items()}
    if within:  # numbers of heads
        exact = all(axis == ((*within, number),) for axis in places.values())
        convolved = any(isinstance(module, CONVOLUTIONS) for module in owners.values())
        if len(within) > 1 or len(writers) + len(readers) > 2 or norms or convolved or not exact:
            return None
        return NeuronGroup(size, writers, readers, size // spaces.spaces[number].size, carried=carried)
    if not all(isinstance(owners.get(name), (nn.Linear, *CONVOLUTIONS)) for name in (*writers, *readers)):
        return None
    written = [labels for (_, axis), labels in carried.items() if axis == 0]
    in_heads = any(len(labels) > size and bool((labels >= 0).all()) for labels in written)
    widths = {_width(model, reader, size, carried.get((f"{reader}.weight", 1))) for reader in readers}
    width = widths.pop() if len(widths) == 1 else 0
    return NeuronGroup(size, writers, readers, size if in_heads else 0, width, norms, carried)


def _width(model: nn.Module, reader: str, size: int, labels: Tensor | None) -> int:
    """Inputs of a layer for each neuron, places of its kernel counted; 0 where they are not next to each other."""
    if labels is None or not torch.equal(labels, torch.arange(size).repeat_interleave(len(labels) // size)):
        return 0
    return model.get_submodule(reader).get_parameter("weight")[0].numel() // size


def find_neuron_groups(model: nn.Module, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The neurons between some layers of a model in evaluation mode, in the order of the model; numbers of heads last.

    Raises `Untraceable` where the model's graph cannot be had.

    >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).eval()
    >>> (group,) = find_neuron_groups(net, {"0", "4"}, Batch(0, 2, (torch.zeros(2, 1, 4, 4),)))
    >>> group
    NeuronGroup(size=6, writers=('0',), readers=('4',), heads=0, width=4, norms=('1',))
    >>> sorted({name for name, _ in group.carried})
    ['0.bias', '0.weight', '1.bias', '1.running_mean', '1.running_var', '1.weight', '4.weight']
    """
    example: Any = dict(batch.named) if batch.named else batch.positional
    found = neuron_groups(model, trace(model, example, ("evaluation",))).values()
    return sorted((group for group in found if {*group.layers} <= {*names}), key=lambda group: group.inside_heads)


@torch.no_grad()
def without(model: nn.Module, kept: Sequence[tuple[NeuronGroup, Tensor]]) -> nn.Module:
    """A copy of the model with only these neurons of each group.

    Groups may overlap, as the heads of grouped queries do: what is not kept in one of them goes.

    >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> without(net, [(NeuronGroup.between(net, ["0"], "2"), torch.tensor([0, 4]))])[2]
    Linear(in_features=2, out_features=3, bias=True)
    """
    stay = dict[tuple[str, int], Tensor]()
    for group, neurons in kept:
        for place, labels in group.carried.items():
            mine = torch.isin(labels, neurons.cpu()) | (labels < 0)
            stay[place] = mine & stay[place] if place in stay else mine
    small = copy.deepcopy(model)
    for (name, axis), mask in stay.items():
        path, _, last = name.rpartition(".")
        owner: Any = small.get_submodule(path)
        old = getattr(owner, last)
        new = old.index_select(axis, mask.nonzero()[:, 0].to(old.device))
        setattr(owner, last, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
        elif isinstance(owner, CONVOLUTIONS):
            owner.out_channels, owner.in_channels = owner.weight.shape[:2]
        elif isinstance(owner, _BATCH_NORM) and owner.weight is not None:
            owner.num_features = len(owner.weight)
    return small


@torch.no_grad()
def rotate_heads_(model: nn.Module, group: NeuronGroup, forward: Tensor, back: Tensor) -> None:
    """Let the writer hand on other numbers of each head, and the reader take them back: (heads, width, width) each."""
    writer, reader = (model.get_submodule(name) for name in group.layers)
    written, read = _matrix(writer), _matrix(reader)
    forward, back = forward.to(written.device), back.to(written.device)
    written.copy_((forward @ written.double().unflatten(0, forward.shape[:2])).flatten(0, 1))
    bias = writer._parameters.get("bias")
    if bias is not None:
        bias.copy_((forward @ bias.double().view(*forward.shape[:2], 1)).flatten())
    read.copy_(torch.einsum("ohw,hwv->ohv", read.double().unflatten(1, back.shape[:2]), back).flatten(1))


def _matrix(layer: nn.Module) -> Tensor:
    """The weight as (outputs, inputs), in place: transformers' `Conv1D` stores it the other way round."""
    weight = layer.get_parameter("weight")
    return weight if isinstance(layer, nn.Linear) else weight.T
