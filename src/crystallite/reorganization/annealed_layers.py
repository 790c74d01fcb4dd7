"""A layer annealed, its structure, and the block operator that takes its place where that is worth it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import AnnealingOptions, anneal_matrix
from crystallite.annealing.initial import named_weights
from crystallite.models.layers import Unit, is_transformers_conv1d, plain_layer
from crystallite.operators.conv import BlockConv, Convolution, channel_structure, kernel_fits
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.cost_model import CostModel
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.weights.names import is_fused_qkv

__all__ = ["anneal_", "block_operator", "blocks_are_faster", "structure_of"]


def anneal_(unit: Unit, initial: Mapping[str, nulls.Null], null: nulls.Null | str, options: AnnealingOptions) -> None:
    """Set the weights that annealing does not keep to zero, gate by gate and in place.

    initial: what each parameter of the model was drawn from, by name (`nulls.for_module`).
    """
    prefix, masks = f"{unit.name}." if unit.name else "", dict[str, list[Tensor]]()
    for name, matrix, own in named_weights(unit.module):
        parameter = name.partition("[")[0]  # one gate of a stack goes by the name of the whole
        drawn, chosen = initial.get(prefix + parameter, own), null
        if null == "auto":
            chosen = nulls.choose(matrix, [drawn], prefix + name)  # type: ignore[assignment]
        elif null == "init":
            chosen = drawn
        masks.setdefault(parameter, []).append(anneal_matrix(matrix, chosen, options, prefix + name).mask)
    for parameter, parts in masks.items():
        weight, mask = unit.module.get_parameter(parameter), torch.cat(parts)
        turned = mask.T if is_transformers_conv1d(unit.module) else mask
        with torch.no_grad():
            weight.masked_fill_(~turned.reshape(weight.shape), 0)


def structure_of(unit: Unit) -> BipartiteStructure | None:
    """Blocks of outputs and inputs of a linear layer or a convolution, None for other kinds."""
    if unit.kind == "linear":
        return decompose(unit.matrix, name=f"{unit.name}.weight")
    module = plain_layer(unit.module)
    return channel_structure(module, f"{unit.name}.weight") if isinstance(module, Convolution) else None


def blocks_are_faster(unit: Unit, structure: BipartiteStructure, cost_model: CostModel, kind: str = "") -> bool:
    """Whether the unit's blocks alone, in this structure, are worth it; `kind`: what they would be instead."""
    per_pair = unit.module.weight[0, 0].numel() if isinstance(unit.module, Convolution) else 1  # kernel positions
    macs, blocks = structure.macs * per_pair, structure.n_blocks
    if isinstance(unit.module, Convolution):
        channels = min(structure.shape) / max(blocks, 1)
        compiled = kernel_fits(unit.module, channels)
        return cost_model.convolution_is_faster(unit.macs, macs, channels, blocks, compiled)
    return cost_model.is_faster(kind or unit.kind, unit.macs, macs, blocks)


def block_operator(unit: Unit, structure: BipartiteStructure | None, cost_model: CostModel) -> nn.Module | None:
    """What replaces the unit, or None if it is better left dense."""
    module = plain_layer(unit.module)
    if isinstance(module, nn.RNNBase):
        recurrent = BlockRecurrent.from_dense(module)
        fewer = recurrent.macs < recurrent.dense_macs
        return recurrent if (recurrent.is_faster if cost_model.only_if_faster else fewer) else None
    assert structure is not None
    if isinstance(module, Convolution):
        return BlockConv.from_dense(module, structure) if blocks_are_faster(unit, structure, cost_model) else None
    rows, _ = structure.shape
    blocks = _blocks_of_thirds(unit.matrix) if is_fused_qkv(f"{unit.name}.weight") and rows % 3 == 0 else []
    thirds_macs = sum(len(r) * len(c) for r, c in blocks)
    thirds_pay = cost_model.is_faster("linear", unit.macs, thirds_macs, len(blocks))
    if blocks and thirds_macs < structure.macs and thirds_pay:
        return BlockLinear.from_blocks(unit.matrix, unit.bias, blocks)
    return (
        BlockLinear.from_dense(unit.matrix, unit.bias, structure)
        if blocks_are_faster(unit, structure, cost_model)
        else None
    )


def _blocks_of_thirds(matrix: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """The blocks of query, key and value apart: they share columns, so together they may be one block."""
    height = matrix.shape[0] // 3
    parts = [decompose(part, name="query, key or value") for part in matrix.split(height)]
    return [(rows + i * height, cols) for i, part in enumerate(parts) for rows, cols in part.blocks]
