"""Cheaper shapes of the same weights: two layers by the SVD, and random blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.baselines.layers import largest
from crystallite.compression.recurrent import expand_recurrent
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.models.layers import plain_layer
from crystallite.models.swap import put_everywhere_
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank import LowRankConv, LowRankLinear
from crystallite.validation.cost import count_macs

__all__ = ["decomposed", "random_blocks"]

_SLACK = 1.03  # otherwise halves would be thirds beside a model that was fitted to 49.9 %


def decomposed(model: nn.Module, names: Sequence[str], batch: Batch, limit: int) -> nn.Module:
    """Every layer as two by the SVD of its weight, each with the same share of its multiply-adds.

    The products of recurrent networks with inputs and with states, each of all gates at once, are layers too.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> decomposed(net, ["0", "1"], Batch(0, 1, (torch.zeros(1, 8),)), 64)[0]
    LowRankLinear(in_features=8, out_features=8, bias=True, rank=2, 32 of 64 multiply-adds)
    """
    recurrent = [name for name in names if isinstance(model.get_submodule(name), nn.RNNBase)]
    model = expand_recurrent(copy.deepcopy(model), recurrent)
    inner = [f"{name}.layers.{i}" for name in recurrent for i in range(len(model.get_submodule(name).layers))]  # type: ignore[arg-type]
    names = [name for name in names if name not in recurrent]
    names += [f"{layer}.{product}" for layer in inner for product in ("input", "recurrent")]
    factors = {
        name: torch.linalg.svd(model.get_submodule(name).get_parameter("weight").detach().flatten(1), False)
        for name in names
    }

    def made(share: float) -> nn.Module:
        small = copy.deepcopy(model)
        for name, (left, values, right) in factors.items():
            outputs, inputs = len(left), right.shape[1]
            rank = max(1, int(share * outputs * inputs / (outputs + inputs)))
            layer = _low_rank(plain_layer(small.get_submodule(name)), right[:rank], left[:, :rank] * values[:rank])
            small = put_everywhere_(small, name, layer)
        return small

    return largest(made, batch, limit)


@torch.no_grad()
def _low_rank(old: Any, down: Tensor, up: Tensor) -> nn.Module:
    """A layer of these factors (rank, inputs) and (outputs, rank) in the place of another."""
    if isinstance(old, nn.Linear):
        return LowRankLinear.from_factors(up, down, old.bias).train(old.training)
    kind = {"device": old.weight.device, "dtype": old.weight.dtype}
    first = type(old)(
        old.in_channels, len(down), old.kernel_size, old.stride, old.padding, old.dilation, 1, False,
        old.padding_mode, **kind,
    )  # fmt: skip
    second = type(old)(len(down), old.out_channels, 1, bias=old.bias is not None, **kind)
    for layer, weight in ((first, down), (second, up)):
        layer.weight.copy_(weight.view_as(layer.weight))
    if old.bias is not None:
        second.bias.copy_(old.bias)
    return LowRankConv(first, second).train(old.training)


def random_blocks(model: nn.Module, names: Sequence[str], batch: Batch, limit: int, seed: int = 0) -> nn.Module:
    """Every linear layer as equal blocks (±1) of random neurons; what lies between blocks is dropped.

    As few blocks as the limit allows, or 3 % more than it: they come in whole numbers. Layers with fewer outputs or
    inputs than that stay as they are.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    >>> random_blocks(net, ["0", "1"], Batch(0, 1, (torch.zeros(1, 8),)), 64)[0]
    BlockLinear(in_features=8, out_features=8, bias=True, blocks=2, 32 of 64 multiply-adds)
    """
    others = [name for name in names if not isinstance(model.get_submodule(name), nn.Linear)]
    if others:
        kind = type(model.get_submodule(others[0])).__name__
        raise InvalidOption(f"only linear layers are cut into random blocks, {others[0]} is a {kind}")
    sizes = {name: model.get_submodule(name).get_parameter("weight").shape for name in names}
    allowed = _SLACK * limit
    blocks, small = int(count_macs(model, batch) / max(allowed, 1)) - 1, model
    while count_macs(small, batch) > allowed:
        blocks = max(blocks + 1, 2)
        cut = [name for name, size in sizes.items() if min(size) >= blocks]
        if not cut:
            raise InvalidOption(f"cannot be made so small: no layer has {blocks} outputs and inputs")
        small = _in_blocks(model, cut, blocks, seed)
    return small


def _in_blocks(model: nn.Module, names: Sequence[str], blocks: int, seed: int) -> nn.Module:
    rng = np.random.default_rng(seed)
    small = copy.deepcopy(model)
    for name in names:
        old: Any = small.get_submodule(name)
        rows, columns = (rng.permutation(size) % blocks for size in old.weight.shape)
        cells = [(np.flatnonzero(rows == block), np.flatnonzero(columns == block)) for block in range(blocks)]
        small = put_everywhere_(small, name, BlockLinear.from_blocks(old.weight.detach(), old.bias, cells))
    return small
