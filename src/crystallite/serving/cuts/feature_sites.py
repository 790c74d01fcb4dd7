"""Where linear layers, chains, feed-forward pairs and convolutions can be cut: one site for each layer, or for all."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.operators.blocks import block_lines, chosen_blocks
from crystallite.operators.chain import BlockChain
from crystallite.operators.chain_layer import ChainLayer
from crystallite.operators.conv import BlockConv
from crystallite.operators.feed_forward import BlockFeedForward, Stacks
from crystallite.operators.linear import BlockLinear
from crystallite.serving.cuts.site import Cost, FeatureSite, nbytes

__all__ = ["chain_run", "chain_sites", "conv_site", "feed_forward_sites"]


def chain_sites(chain: BlockChain) -> list[list[FeatureSite]]:
    """Whole subnetworks from end to end, which are the natural unit, or else layer by layer."""
    layers = [chain_run(chain, i, i + 1) for i in range(len(chain.layers))]
    return [layers] if len(layers) == 1 else [[_subnetworks(chain)], layers]


def chain_run(chain: BlockChain, first: int, stop: int) -> FeatureSite:
    """The blocks of one layer with the function that follows it; several layers, or one without blocks, as one."""
    layer, after = _layer(chain, first), _activation(chain, stop - 1)
    name = f"layers.{first}" if stop == first + 1 else f"layers.{first}-{stop - 1}"
    if stop > first + 1 or not layer.n_blocks:
        layers = [_layer(chain, i) for i in range(first, stop)]
        cost = Cost(sum(each.macs for each in layers), sum(nbytes(each) for each in layers))
        part = partial(_run_part, layers, list(chain.activations)[first : stop - 1], after)
        reads, writes = np.arange(layers[0].in_features), np.arange(layers[-1].out_features)
        return FeatureSite(name, (cost,), part, (reads,), (writes,), _idle(layers[-1], None))
    columns = _columns(layer.columns, block_lines(layer.weights, 1))
    rows = block_lines(layer.weights, 0)
    biased = 0 if layer.bias is None else layer.bias.element_size()
    return FeatureSite(
        "" if len(chain.layers) == 1 else name,
        _costs(layer.weights, biased),
        partial(_layer_part, layer.weights, layer.bias, after),
        tuple(columns),
        tuple(rows),
        _idle(layer, after),
    )


def feed_forward_sites(pair: BlockFeedForward) -> list[FeatureSite]:
    """Subnetworks of a pair; of the other forms each layer of all channels, the function between them in the first."""
    inputs = tuple(_columns(pair.inputs, block_lines(pair.first.weights, 1)))
    outputs = tuple(block_lines(pair.second.weights, 0))
    reading = _costs(pair.first.weights, _biased(pair.first))
    if pair.gate is not None:
        reading = _added(reading, _costs(pair.gate.weights, _biased(pair.gate)))
    writing = _costs(pair.second.weights, 0)
    nothing = pair.second.weights[0].detach().new_zeros
    if pair.form == "pair":
        both = _added(reading, writing)
        return [FeatureSite("", both, pair.part, inputs, outputs, nothing(pair.second.rows))]
    hidden = tuple(block_lines(pair.first.weights, 0))
    read = tuple(_columns(pair.shuffle, block_lines(pair.second.weights, 1)))
    first, second = partial(_reading_part, pair), partial(_layer_part, pair.second.weights, None, None)
    return [
        FeatureSite("first", reading, first, inputs, hidden, nothing(pair.first.rows)),
        FeatureSite("second", writing, second, read, outputs, nothing(pair.second.rows)),
    ]


def conv_site(conv: BlockConv) -> FeatureSite:
    """The blocks of channels of a convolution."""
    kernels = conv.kernels()
    channels = [kernel.new_empty(1, *kernel.shape[:2], device="meta") for kernel in kernels]
    reads, writes = _columns(conv.inputs, block_lines(channels, 1)), block_lines(channels, 0)
    order = np.arange(conv.out_channels) if conv.outputs is None else torch.argsort(conv.outputs, stable=True).numpy()
    bias = None if conv.bias is None else conv.bias.detach()[torch.from_numpy(order)]

    def part(blocks: Sequence[int]) -> nn.Module:
        rows = torch.from_numpy(np.concatenate([writes[block] for block in blocks]))
        return conv.part(blocks, None if bias is None else bias[rows])

    idle = conv.empty.new_zeros(conv.out_channels) if bias is None else bias
    biased = 0 if bias is None else bias.element_size()
    costs = tuple(Cost(kernel.numel(), kernel.nbytes + len(kernel) * biased) for kernel in kernels)
    return FeatureSite("", costs, part, tuple(reads), tuple(writes), idle)


# costs and tables


def _costs(stacks: Iterable[Tensor], biased: int) -> tuple[Cost, ...]:
    """Of each block; biased: bytes of the bias of a row."""
    return tuple(
        Cost(height * width, height * width * stack.element_size() + height * biased)
        for stack in stacks
        for _, height, width in [stack.shape] * len(stack)
    )


def _added(*costs: tuple[Cost, ...]) -> tuple[Cost, ...]:
    return tuple(Cost.sum(both) for both in zip(*costs, strict=True))


def _biased(stacks: Stacks) -> int:
    return stacks.biases[0].element_size() if len(stacks.biases) else 0


def _columns(table: Tensor | None, places: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list(places) if table is None else [table.numpy()[place] for place in places]


def _idle(layer: ChainLayer, activation: nn.Module | None) -> Tensor:
    """What the rows of a layer hold that no block writes."""
    idle = layer.empty.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
    with torch.no_grad():
        return idle if activation is None else activation(idle)


# parts


def _layer_part(
    stacks: Iterable[Tensor], bias: Tensor | None, activation: nn.Module | None, blocks: Sequence[int]
) -> nn.Module:
    """Some blocks of a layer, and the function that follows; those that read nothing must come last."""
    rows = [block_lines(stacks, 0)[block] for block in blocks]
    made = [stack for stack in chosen_blocks(stacks, blocks) if stack.shape[2]]
    own = None if bias is None else bias.detach()[torch.from_numpy(np.concatenate(rows))]
    reads = sum(len(stack) * stack.shape[2] for stack in made)
    dtype = next(iter(stacks)).dtype
    layer = BlockLinear(reads, sum(map(len, rows)), made, None, None, own, dtype)
    return layer if activation is None else nn.Sequential(layer, copy.deepcopy(activation))


class _Gated(nn.Module):
    """y = f(gate(x)) · up(x): some blocks of the layers that a gated pair reads with."""

    def __init__(self, gate: nn.Module, up: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.activation = gate, up, activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(self.gate(x)) * self.up(x)
        return y


def _reading_part(pair: BlockFeedForward, blocks: Sequence[int]) -> nn.Module:
    """Some blocks of the first layer of a pair, up to what the second one reads."""
    if pair.gate is None:
        return _layer_part(pair.first.weights, pair.first.bias(), pair.activation, blocks)
    gate, up = (_layer_part(layer.weights, layer.bias(), None, blocks) for layer in (pair.gate, pair.first))
    return _Gated(gate, up, copy.deepcopy(pair.activation))


def _run_part(
    layers: Sequence[ChainLayer], between: Sequence[nn.Module], after: nn.Module | None, _blocks: Sequence[int]
) -> nn.Module:
    """Layers of a chain as a chain."""
    chain = BlockChain(copy.deepcopy(list(layers)), copy.deepcopy(list(between)), None)
    return chain if after is None else nn.Sequential(chain, copy.deepcopy(after))


def _layer(chain: BlockChain, number: int) -> ChainLayer:
    layer = chain.layers[number]
    assert isinstance(layer, ChainLayer)
    return layer


def _activation(chain: BlockChain, number: int) -> nn.Module | None:
    """The function that follows a layer."""
    return chain.activations[number] if number < len(chain.activations) else None


# whole subnetworks


def _subnetworks(chain: BlockChain) -> FeatureSite:
    """Networks that share no neuron from the first layer to the last."""
    members, size = chain.members(), chain.empty.element_size()
    biased = [_layer(chain, i).bias is not None for i in range(len(chain.layers))]
    costs = []
    for neurons, macs in zip(members, chain.subnetwork_macs(), strict=True):
        biases = sum(len(own) for own, has in zip(neurons[1:], biased, strict=True) if has)
        costs.append(Cost(macs, (macs + biases) * size))
    nowhere, constants = chain.idle_outputs()
    idle = constants.new_zeros(chain.out_features).index_copy(0, nowhere, constants)
    reads, writes = (tuple(neurons[side] for neurons in members) for side in (0, -1))
    return FeatureSite("", tuple(costs), partial(_side_by_side, chain), reads, writes, idle)


def _side_by_side(chain: BlockChain, blocks: Sequence[int]) -> BlockChain:
    """Networks of equal depth as one chain, whose blocks they are; of one network the blocks inside it."""
    parts = [network for network, _, _ in chain.subnetworks(blocks)]
    # not children(), which leaves out an activation's second place
    inside = [[module for module in part._modules.values() if module is not None] for part in parts]
    stages = [[module for module in modules if isinstance(module, nn.Linear)] for modules in inside]
    activations = [copy.deepcopy(module) for module in inside[0] if not isinstance(module, nn.Linear)]
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
