"""In which units weights are compared with a bound.

A hidden neuron of a ReLU network may be scaled by a > 0 and its readers by 1/a without any change of function, which
moves weights across every bound. So before anything is tested, every such neuron is brought into balanced units: its
incoming and outgoing weights, in units of the standard deviations of their layers' nulls, have equal root mean square,
up to a factor below 2. Scales are powers of two, so that no bit of the model's function changes. From there on nothing
is rescaled: weights are tested as they are trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.annealing.nulls import Null
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.partitioning.weights import parameter

__all__ = ["balance_"]

_SWEEPS = 4  # neurons of consecutive layers depend on each other


@torch.no_grad()
def balance_(model: nn.Module, groups: Iterable[NeuronGroup], nulls: Mapping[str, Null], run: Any) -> list[str]:
    """Bring hidden neurons into balanced units, in place; returns the layers that read those which could be.

    nulls: by parameter name. run(): the model's output on some inputs; units are changed only where it stays the same
    to the last bit, which holds for ReLU and its like and not for GELU.
    """
    expected, free = run(), []
    for group in groups:
        if group.passed or group.heads or any(len(labels) != group.size for labels in group.carried.values()):
            continue
        double = torch.full((group.size,), 2.0)
        _rescale_(model, group, double)
        if torch.equal(run(), expected):
            free.append(group)
        _rescale_(model, group, 1 / double)
    for _ in range(_SWEEPS):
        for group in free:
            incoming = _root_mean_square(model, group.writers, 0, nulls)
            outgoing = _root_mean_square(model, group.readers, 1, nulls)
            idle = (incoming == 0) | (outgoing == 0)
            factor = torch.exp2((0.5 * torch.log2(outgoing / incoming)).round())
            _rescale_(model, group, torch.where(idle, torch.ones_like(factor), factor))
    return sorted({name for group in free for name in group.readers})


def _root_mean_square(model: nn.Module, names: Iterable[str], axis: int, nulls: Mapping[str, Null]) -> Tensor:
    """(neurons,) of the weights of some layers for each neuron, along this axis, in units of their nulls."""
    weights = {name: model.get_parameter(name) for name in map(parameter, names)}
    units = [weight.transpose(0, axis).flatten(1) / nulls[name].scale for name, weight in weights.items()]
    return torch.cat(units, 1).square().mean(1).sqrt()


def _rescale_(model: nn.Module, group: NeuronGroup, factor: Tensor) -> None:
    """Multiply what writers say of each neuron, and divide what readers make of it."""
    for name, axis in group.carried:
        tensor = model.get_parameter(name)
        along = factor.to(tensor).view([-1 if i == axis else 1 for i in range(tensor.ndim)])
        tensor.div_(along) if axis else tensor.mul_(along)
