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
from crystallite.reorganization.graph import Spaces
from crystallite.upgrading.partition import own_neurons

__all__ = ["balance_"]

_SWEEPS = 4  # neurons of consecutive layers depend on each other


@torch.no_grad()
def balance_(model: nn.Module, spaces: Spaces, nulls: Mapping[str, Null], run: Any) -> list[str]:
    """Bring hidden neurons into balanced units, in place; returns the layers that read those which could be.

    nulls: by parameter name. run(): the model's output on some inputs; units are changed only where it stays the same
    to the last bit, which holds for ReLU and its like and not for GELU.
    """
    linear = {layer.name: layer for layer in spaces.layers if type(model.get_submodule(layer.name)) is nn.Linear}
    groups = []
    for space in sorted(own_neurons(model, spaces, (nn.Linear,))):
        writers = [_linear(model, name) for name, layer in linear.items() if layer.rows == ((space,),)]
        readers = [name for name, layer in linear.items() if layer.columns == ((space,),)]
        if writers and readers:
            groups.append((writers, readers, space))
    scale = {id(_linear(model, name)): nulls[f"{name}.weight"].scale for name in linear if f"{name}.weight" in nulls}
    expected, free = run(), []
    for writers, readers, space in groups:
        layers = [_linear(model, name) for name in readers]
        trial = torch.full((spaces.spaces[space].size,), 2.0, device=layers[0].weight.device)
        _rescale_(writers, layers, trial)
        if torch.equal(run(), expected):
            free.append((writers, layers, readers))
        _rescale_(writers, layers, 1 / trial)
    for _ in range(_SWEEPS):
        for writers, layers, _ in free:
            incoming = torch.cat([w.weight / scale[id(w)] for w in writers], 1).square().mean(1).sqrt()
            outgoing = torch.cat([r.weight / scale[id(r)] for r in layers], 0).square().mean(0).sqrt()
            idle = (incoming == 0) | (outgoing == 0)
            factor = torch.exp2((0.5 * torch.log2(outgoing / incoming)).round())
            _rescale_(writers, layers, torch.where(idle, torch.ones_like(factor), factor))
    return sorted({name for _, _, readers in free for name in readers})


def _rescale_(writers: list[nn.Linear], readers: list[nn.Linear], factor: Tensor) -> None:
    for writer in writers:
        writer.weight.mul_(factor[:, None].to(writer.weight.dtype))
        if writer.bias is not None:
            writer.bias.mul_(factor.to(writer.bias.dtype))
    for reader in readers:
        reader.weight.div_(factor.to(reader.weight.dtype))


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
