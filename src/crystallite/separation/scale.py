"""In which units weights are compared with a bound.

A hidden neuron of a ReLU network may be scaled by a > 0 and its readers by 1/a without any change of function, which
moves weights across every bound. So before anything is tested, every such neuron is brought into balanced units: its
incoming and outgoing weights, in units of the standard deviations of their layers' nulls, have equal root mean square,
up to a factor below 2. Scales are powers of two, so that no bit of the model's function changes. From there on nothing
is rescaled: weights are tested as they are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.annealing.nulls import Null
from crystallite.graph.trace import Spaces
from crystallite.partitioning.partition import own_neurons
from crystallite.partitioning.weights import parameter

__all__ = ["balance_"]

_Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SWEEPS = 4  # neurons of consecutive layers depend on each other


@torch.no_grad()
def balance_(model: nn.Module, spaces: Spaces, nulls: Mapping[str, Null], run: Any) -> list[str]:
    """Bring hidden neurons into balanced units, in place; returns the layers that read those which could be.

    nulls: by parameter name. run(): the model's output on some inputs; units are changed only where it stays the same
    to the last bit, which holds for ReLU and its like and not for GELU.
    """
    known = {layer.name: layer for layer in spaces.layers if isinstance(model.get_submodule(layer.name), _KINDS)}
    groups = []
    for space in sorted(own_neurons(model, spaces, _KINDS)):
        writers = [_layer(model, name) for name, layer in known.items() if layer.rows == ((space,),)]
        readers = [name for name, layer in known.items() if layer.columns == ((space,),)]
        if writers and readers:
            groups.append((writers, readers, space))
    scale = {id(_layer(model, n)): nulls[parameter(n)].scale for n in known if parameter(n) in nulls}
    expected, free = run(), []
    for writers, readers, space in groups:
        layers = [_layer(model, name) for name in readers]
        trial = torch.full((spaces.spaces[space].size,), 2.0, device=layers[0].weight.device)
        _rescale_(writers, layers, trial)
        if torch.equal(run(), expected):
            free.append((writers, layers, readers))
        _rescale_(writers, layers, 1 / trial)
    for _ in range(_SWEEPS):
        for writers, layers, _ in free:
            incoming = torch.cat([w.weight.flatten(1) / scale[id(w)] for w in writers], 1).square().mean(1).sqrt()
            outgoing = torch.cat([r.weight.transpose(0, 1).flatten(1) / scale[id(r)] for r in layers], 1)
            outgoing = outgoing.square().mean(1).sqrt()
            idle = (incoming == 0) | (outgoing == 0)
            factor = torch.exp2((0.5 * torch.log2(outgoing / incoming)).round())
            _rescale_(writers, layers, torch.where(idle, torch.ones_like(factor), factor))
    return sorted({name for _, _, readers in free for name in readers})


def _rescale_(writers: list[_Layer], readers: list[_Layer], factor: Tensor) -> None:
    for writer in writers:
        writer.weight.mul_(_along(factor, 0, writer.weight))
        if writer.bias is not None:
            writer.bias.mul_(factor.to(writer.bias.dtype))
    for reader in readers:
        reader.weight.div_(_along(factor, 1, reader.weight))


def _along(factor: Tensor, axis: int, weight: Tensor) -> Tensor:
    return factor.to(weight.dtype).view([-1 if i == axis else 1 for i in range(weight.ndim)])


def _layer(model: nn.Module, name: str) -> _Layer:
    layer = model.get_submodule(name)
    assert isinstance(layer, _KINDS)
    return layer
