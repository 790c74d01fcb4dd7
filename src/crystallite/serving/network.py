"""`Network`: a model cut along a plan, as steps of the transform tier and pieces of the inference tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from crystallite.operators.chain import BlockChain
from crystallite.operators.chain_layer import ChainLayer
from crystallite.reorganization.subnetworks import Subnetworks

__all__ = ["Call", "Fan", "Local", "Network", "Step", "fused"]


@dataclass(frozen=True)
class Local:
    """Modules without weights, run in the transform tier."""

    module: nn.Module


@dataclass(frozen=True)
class Call:
    """One piece that takes everything and returns everything."""

    piece: str


@dataclass(frozen=True)
class Fan:
    """Pieces that each take some features and return some, and the tables that deal them out and put them together."""

    pieces: tuple[str, ...]
    networks: Subnetworks

    def deal(self, x: Tensor) -> list[Tensor]:
        """What each piece gets to read."""
        return [x.index_select(-1, reads) for reads in self.networks.inputs]


Step = Local | Call | Fan


@dataclass(frozen=True)
class Network:
    """The steps, and the module behind the name of each piece."""

    steps: tuple[Step, ...]
    modules: Mapping[str, nn.Module]

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """All steps here and now: what the tiers compute together."""
        for step in self.steps:
            if isinstance(step, Local):
                x = step.module(x)
            elif isinstance(step, Call):
                x = self.modules[step.piece](x)
            else:
                dealt = zip(step.pieces, step.deal(x), strict=True)
                x = step.networks.join([self.modules[piece](part) for piece, part in dealt])
        return x


def fused(networks: Subnetworks, groups: Sequence[Sequence[int]]) -> Subnetworks:
    """The same networks with fewer parts: each group of them as one."""
    parts = list(networks.parts)
    return Subnetworks(
        [_side_by_side([parts[i] for i in group]) for group in groups],
        [torch.cat([networks.inputs[i] for i in group]) for group in groups],
        [torch.cat([networks.outputs[i] for i in group]) for group in groups],
        networks.idle,
        networks.before,
        networks.after,
    )


def _side_by_side(parts: Sequence[nn.Module]) -> BlockChain:
    """Networks of equal depth as one chain, whose blocks they are; of one network the blocks inside it."""
    # not children(), which leaves out an activation's second place
    inside: list[list[nn.Module]] = [list(part._modules.values()) for part in parts]  # type: ignore[arg-type]
    stages = [[module for module in modules if isinstance(module, nn.Linear)] for modules in inside]
    activations = [module for module in inside[0] if not isinstance(module, nn.Linear)]
    if len(parts) == 1:
        return BlockChain.from_dense(stages[0], activations)
    return BlockChain([_joined(layers) for layers in zip(*stages, strict=True)], activations, None)


def _joined(layers: Sequence[nn.Linear]) -> ChainLayer:
    """Layers that read and write lines one after the other."""
    weights = [layer.weight.detach() for layer in layers]
    stacks = [torch.stack(list(run)) for _, run in groupby(weights, key=lambda weight: weight.shape)]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    inputs, outputs = (sum(getattr(layer, side) for layer in layers) for side in ("in_features", "out_features"))
    return ChainLayer(inputs, outputs, stacks, None, None, torch.cat(biases) if biases else None)
