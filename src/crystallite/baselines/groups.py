"""Neurons, channels and attention heads that can be taken out, with every stored number that belongs to them."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.baselines.layers import CONVOLUTIONS
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import same_structure, tensors
from crystallite.graph.trace import Axis, Spaces, trace
from crystallite.partitioning.partition import own_neurons

__all__ = ["Group", "find_groups", "without"]

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True, eq=False)
class Group:
    """Neurons between layers, and where they are stored.

    carried: (parameter or buffer, axis) → for each index along the axis the neuron it belongs to, −1: none of these.
    """

    size: int
    carried: dict[tuple[str, int], Tensor]

    @classmethod
    def between(
        cls, model: nn.Module, writers: Sequence[str], reader: str, width: int = 1, spread: int = 1
    ) -> Group:  # fmt: skip
        """The neurons that some layers write and one reads, where nothing else knows of them.

        width: outputs of a writer that go together, as those of an attention head; spread: inputs of the reader for
        each of them, as the places of a channel behind `Flatten`.

        >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> Group.between(net, ["0"], "2").size, Group.between(net, ["0"], "2", width=3).size
        (6, 2)
        """
        carried, outputs = dict[tuple[str, int], Tensor](), set[int]()
        for writer in writers:
            for name, parameter in model.get_submodule(writer).named_parameters(recurse=False):
                carried[f"{writer}.{name}", 0] = torch.arange(len(parameter)) // width
                outputs.add(len(parameter))
        inputs = model.get_submodule(reader).get_parameter("weight").shape[1]
        carried[f"{reader}.weight", 1] = torch.arange(inputs) // (width * spread)
        if len(outputs) != 1 or inputs != spread * max(outputs) or max(outputs) % width:
            raise InvalidOption(
                f"{reader}: expected {spread} inputs for each output of {', '.join(writers)}, in groups of {width}, "
                f"got {inputs} inputs and {sorted(outputs)} outputs"
            )
        return cls(max(outputs) // width, carried)

    @property
    def heads(self) -> dict[str, int]:
        """For layers that write several numbers for each neuron: how many neurons."""
        return {
            name.removesuffix(".weight"): self.size
            for (name, axis), labels in self.carried.items()
            if axis == 0 and name.endswith(".weight") and len(labels) > self.size
        }


def find_groups(model: nn.Module, names: Collection[str], batch: Batch) -> list[Group]:
    """The neurons of some layers that can be taken out without changing what the model takes and returns.

    Hidden neurons, channels (with their batch norms) and attention heads, found in the traced graph and then tried:
    with half of them gone, the model must still run. Raises `Untraceable` where the graph cannot be had.

    >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).eval()
    >>> (group,) = find_groups(net, {"0", "4"}, Batch(0, 2, (torch.zeros(2, 1, 4, 4),)))
    >>> group.size, sorted({name for name, _ in group.carried})
    (6, ['0.bias', '0.weight', '1.bias', '1.running_mean', '1.running_var', '1.weight', '4.weight'])
    """
    example: Any = dict(batch.named) if batch.named else batch.positional
    spaces = trace(model, example)
    free = own_neurons(model, spaces, (nn.Linear, *CONVOLUTIONS, _BATCH_NORM))
    found = []
    for space in sorted(free):
        group = _group(model, spaces, space, names)
        if group is not None and _can_go(model, group, batch):
            found.append(group)
    return found


def _group(model: nn.Module, spaces: Spaces, space: int, names: Collection[str]) -> Group | None:
    sizes = [each.size for each in spaces.spaces]
    carried = {
        place: _labels(axis, space, sizes)
        for place, axis in spaces.places.items()
        if any(space in part for part in axis)
    }
    layers = {name.rpartition(".")[0]: axis for name, axis in carried if name.endswith(".weight")}
    sides = {axis for owner, axis in layers.items() if not isinstance(model.get_submodule(owner), _BATCH_NORM)}
    mine = {owner for owner in layers if not isinstance(model.get_submodule(owner), _BATCH_NORM)}
    if sides != {0, 1} or not mine <= set(names) or any(name in spaces.unused for name, _ in carried):
        return None
    return Group(sizes[space], carried)


def _labels(axis: Axis, space: int, sizes: list[int]) -> Tensor:
    """(length of the axis,) which neuron of a space each index belongs to, −1 where none."""
    parts = []
    for part in axis:
        if space not in part:
            parts.append(torch.full((math.prod(sizes[each] for each in part),), -1))
            continue
        place = part.index(space)
        outer, inner = (math.prod(sizes[each] for each in some) for some in (part[:place], part[place + 1 :]))
        parts.append(torch.arange(sizes[space]).repeat_interleave(inner).repeat(outer))
    return torch.cat(parts)


def _can_go(model: nn.Module, group: Group, batch: Batch) -> bool:
    try:
        half = without(model, [(group, torch.arange((group.size + 1) // 2))])
        same_structure(tensors(batch.run(model)), tensors(batch.run(half)))
    except (CrystalliteError, ValueError):  # a shape that the model's code fixes
        return False
    return True


@torch.no_grad()
def without(model: nn.Module, kept: Sequence[tuple[Group, Tensor]]) -> nn.Module:
    """A copy of the model with only these neurons of each group.

    >>> net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> without(net, [(Group.between(net, ["0"], "2"), torch.tensor([0, 4]))])[2]
    Linear(in_features=2, out_features=3, bias=True)
    """
    small = copy.deepcopy(model)
    for group, neurons in kept:
        for (name, axis), labels in group.carried.items():
            path, _, last = name.rpartition(".")
            owner = small.get_submodule(path)
            index = (torch.isin(labels, neurons) | (labels < 0)).nonzero()[:, 0]
            old = getattr(owner, last)
            new = old.index_select(axis, index.to(old.device))
            setattr(owner, last, nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new)
            _say_size(owner)
    return small


def _say_size(module: Any) -> None:
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, CONVOLUTIONS):
        module.out_channels, module.in_channels = module.weight.shape[:2]
    elif isinstance(module, _BATCH_NORM) and module.weight is not None:
        module.num_features = len(module.weight)
