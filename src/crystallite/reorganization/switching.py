"""Blocks switched off one at a time: their weights count as zero for a while, and come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.experts import Experts, holds_stacks
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.operators.recurrent_layer import BlockRecurrentLayer
from crystallite.reorganization.subnetworks import Subnetworks

__all__ = ["BlockSwitch", "block_switches"]


@dataclass(frozen=True, eq=False)
class BlockSwitch:
    """One block of a layer, or one expert, and the weights that are its own."""

    layer: str
    block: int
    weights: tuple[Tensor, ...]  # views of the model's parameters

    @property
    def size(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model without this block: it emits what its biases say."""
        kept = [weight.detach().clone() for weight in self.weights]
        with torch.no_grad():
            for weight in self.weights:
                weight.zero_()
            try:
                yield
            finally:
                for weight, value in zip(self.weights, kept, strict=True):
                    weight.copy_(value)


def block_switches(model: nn.Module) -> list[BlockSwitch]:
    """A switch for every block and every expert of a model; of an operator with one block alone, none.

    A chain that falls into subnetworks has one for each of them, from its inputs to its outputs; others have one for
    each block of each layer. Blocks of a feed-forward pair, gates included, go together where they are one subnetwork.

    >>> from crystallite import reorganize
    >>> layer = nn.Linear(4, 4)
    >>> _ = nn.init.eye_(layer.weight)
    >>> [(s.block, s.size) for s in block_switches(reorganize(layer, level=None, only_if_faster=False))]
    [(0, 1), (1, 1), (2, 1), (3, 1)]
    """
    found: list[BlockSwitch] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue  # what a larger operator has already
        parts = _blocks_of(module)
        if parts is None:
            continue
        inside += [] if isinstance(module, Experts) else [name]
        labelled = parts if isinstance(parts, dict) else {name: parts}
        for layer, blocks in labelled.items():
            full = f"{name}.{layer}" if layer != name and name else layer
            if len(blocks) > 1:
                found += [BlockSwitch(full, i, tuple(weights)) for i, weights in enumerate(blocks)]
    return found


_Blocks = list[list[Tensor]]


def _blocks_of(module: Any) -> _Blocks | dict[str, _Blocks] | None:
    """The weights of each block, by the name of a layer inside where there are several; None for other modules."""
    if isinstance(module, BlockLinear):
        return _stacked([module.weights])
    if isinstance(module, BlockConv):
        return [[kernel] for part in module._convolutions for kernel in part.weight.chunk(part.groups)]
    if isinstance(module, BlockChain):
        return _of_chain(module)
    if isinstance(module, BlockFeedForward):
        readers = [module.first.weights, *([] if module.gate is None else [module.gate.weights])]
        if module.form == "pair":
            return _stacked([*readers, module.second.weights])
        return {"first": _stacked(readers), "second": _stacked([module.second.weights])}
    if isinstance(module, BlockRecurrent):
        return {f"layers.{i}": _of_recurrent(layer) for i, layer in enumerate(module._layers())}
    if isinstance(module, Experts):
        return [list(expert.parameters()) for expert in module.experts]
    if holds_stacks(module):
        stacks = list(module.parameters(recurse=False))
        return [[stack[i] for stack in stacks] for i in range(len(stacks[0]))]
    if isinstance(module, Subnetworks):
        return [[p for name, p in part.named_parameters() if name.endswith("weight")] for part in module.parts]
    return None


def _stacked(runs: Sequence[Iterable[Tensor]]) -> _Blocks:
    """Block by block from stacks (blocks, rows, columns), those of several matrices together."""
    found = []
    for stacks in zip(*runs, strict=True):
        for block in zip(*stacks, strict=True):
            if any(weight.numel() for weight in block):
                found.append(list(block))
    return found


def _of_chain(chain: BlockChain) -> _Blocks | dict[str, _Blocks]:
    layers = [_stacked([layer.weights]) for layer in chain._layers()]
    together = chain.blocks_by_subnetwork()
    if len(together) > 1:
        return [[weight for i, block in members for weight in layers[i][block]] for members in together]
    return {f"layers.{i}": blocks for i, blocks in enumerate(layers)}


def _of_recurrent(layer: BlockRecurrentLayer) -> _Blocks:
    form, found = layer.form, []
    for number, block in enumerate(form.blocks):
        weights = []
        rows = slice(form.gates * block.first, form.gates * (block.first + block.size))
        for reads, weight in zip(form.inputs, layer.input_weights, strict=True):
            if reads.first <= block.first < reads.first + reads.size:
                start = form.gates * reads.first
                weights.append(weight[rows.start - start : rows.stop - start])
        for stack, weight in zip(form.stacks, layer.recurrent_weights, strict=True):
            if number in stack:
                weights.append(weight[stack.index(number)])
        if number in form.hearing:
            weights.append(layer.communication_weights[form.hearing.index(number)])
        found.append(weights)
    return found
