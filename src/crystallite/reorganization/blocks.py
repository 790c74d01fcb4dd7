"""An upgraded model rebuilt from its blocks, those of one chain as one operator."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.graph.sequential_calls import whole_by_definition
from crystallite.models.layers import change, find_units
from crystallite.models.record import ExactOptions, OperatorRecord, Record, record, set_record_
from crystallite.models.swap import put_, replace_
from crystallite.operators.chain import BlockChain
from crystallite.operators.linear import BlockLinear
from crystallite.reorganization.rewrite import reorganize
from crystallite.reorganization.runs import Run, find_runs
from crystallite.structure.decompose import decompose, expand_columns

__all__ = ["clear_idle_", "in_blocks"]


def _whole_runs(model: nn.Module, layers: Sequence[str]) -> list[Run]:
    """Runs that no code of the model's own can call in part."""
    whole = whole_by_definition(model)
    return [run for run in find_runs(model, set(layers)) if run.parent in whole]


@torch.no_grad()
def clear_idle_(model: nn.Module, layers: Sequence[str]) -> None:
    """Free the runs of an `nn.Sequential` of hidden neurons that do nothing, in place; the function stays the same.

    A neuron that reads nothing emits a constant, which goes into the biases of its readers; a neuron that nobody reads
    need not read. Then neurons are dormant on both sides or on none, and a chain of blocks moves nothing inside.
    """
    for run in _whole_runs(model, layers):
        for before, between, after in zip(run.layers, run.activations, run.layers[1:], strict=False):
            constant = ~before.weight.any(1)
            if after.bias is not None:
                emitted = before.weight.new_zeros(before.out_features) if before.bias is None else before.bias
                training, between.training = between.training, False
                after.bias.add_(after.weight[:, constant] @ between(emitted)[constant])
                between.training = training
                after.weight[:, constant] = 0
        for before, after in reversed(list(pairwise(run.layers))):
            before.weight[~after.weight.any(0)] = 0


def in_blocks(
    model: nn.Module, layers: Sequence[str], example: Any, row_labels: Mapping[str, np.ndarray] | None = None
) -> nn.Module:
    """A copy of the model whose layers, block-structured already, are block operators; `reorganization` records it.

    Consecutive layers of an `nn.Sequential` become one `BlockChain`: its subnetworks are what was trained for, even if
    another way to cut the same zeros would save a few multiply-adds more. The other layers go through `reorganize`.

    row_labels: by linear layer, the block of each row, where blocks read copies of the same inputs.
    """
    result, changes, apart = copy.deepcopy(model), {}, dict(row_labels or {})
    units = {unit.name: unit for unit in find_units(result, layers, ())}

    def note(name: str, layer: Any, operator: OperatorRecord) -> None:
        size, share = sum(p.numel() for p in layer.parameters()), units[name].kept_share
        changes[name] = change(units[name], operator, macs=layer.macs, parameters=size, share=share)

    for run in _whole_runs(result, layers):
        chain: Any = BlockChain.from_dense(run.layers, run.activations, apart.pop(run.names[0], None))
        for name, layer in zip(run.names, chain.layers, strict=True):
            networks = chain.n_subnetworks
            note(name, layer, OperatorRecord("chain", layer.n_blocks, subnetworks=networks, copies=layer.copies))
        prefix = f"{run.parent}." if run.parent else ""
        result = replace_(result, prefix + run.places[0], chain)
        for place in run.places[1:]:
            result = put_(result, prefix + place, nn.Identity().train(chain.training))
    for name, labels in apart.items():
        weight, bias = units[name].matrix, units[name].bias
        blocks = [(rows, cols % weight.shape[1]) for rows, cols in decompose(expand_columns(weight, labels)).blocks]
        single = BlockLinear.from_blocks(weight, bias, blocks)
        note(name, single, OperatorRecord("blocks", single.n_blocks, copies=single.copies))
        result = replace_(result, name, single)
    found = Record(ExactOptions())
    left = [name for name in layers if name not in changes]
    if left:
        result = reorganize(result, level=None, targets=left, example=example, only_if_faster=False)
        found = record(result)
    changes |= {each.name: each for each in found.changes}
    set_record_(result, replace(found, changes=tuple(changes[name] for name in layers)))
    return result
