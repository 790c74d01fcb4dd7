"""The Neyman test inside the forward pass: weights below a threshold do not act, but go on learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from crystallite.models.swap import replace_
from crystallite.partitioning.partition import Partition
from crystallite.partitioning.weights import owner

__all__ = ["Gate", "GatedLinear", "attach_", "harden_", "reaching"]


class Gate(nn.Module):
    """w → w where it is inside a block and |w| ≥ threshold, else 0; gradients reach every weight inside the blocks.

    A weight below the threshold has the gradient that it would have if it acted (straight-through), so it can grow.
    Weights between blocks have no gradient, so no optimizer gathers moments for them.

    >>> gate = Gate(torch.tensor([[True, True, False]]))
    >>> gate.threshold = 0.5
    >>> w = torch.tensor([[0.9, 0.2, 0.8]], requires_grad=True)
    >>> gate(w).detach().tolist()
    [[0.8999999761581421, 0.0, 0.0]]
    >>> gate(w).sum().backward()
    >>> w.grad.tolist()
    [[1.0, 1.0, 0.0]]
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)
        self.threshold = 0.0

    def forward(self, weight: Tensor) -> Tensor:
        return _StraightThrough.apply(weight, self.mask, self.threshold)


class GatedLinear(nn.Module):
    """A linear layer in training: only its blocks, behind a gate, at the cost of the blocks.

    Blocks are of one size here, filled up with places without a weight. An input may be in several.

    >>> layer = nn.Linear(4, 2)
    >>> gated = GatedLinear(layer, [(np.array([0]), np.array([0, 2])), (np.array([1]), np.array([1, 3]))])
    >>> with torch.no_grad():
    ...     layer.weight[0, 1::2] = layer.weight[1, ::2] = 0
    >>> x = torch.randn(3, 4)
    >>> torch.allclose(gated(x), layer(x), atol=1e-6), torch.equal(gated.to_dense().weight, layer.weight)
    (True, True)
    """

    rows: Tensor
    columns: Tensor
    places: Tensor

    def __init__(self, layer: nn.Linear, members: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """members: rows and columns of each block."""
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        rows, columns = (_table(side).to(layer.weight.device) for side in zip(*members, strict=True))
        mask = (rows >= 0)[:, :, None] & (columns >= 0)[:, None]
        kept = layer.weight.detach()[rows[:, :, None], columns[:, None]]  # −1 takes some weight, which the mask drops
        self.weight = nn.Parameter(kept * mask)  # (blocks, rows, columns)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())
        self.gate = Gate(mask)
        for name, table in (("rows", rows), ("columns", columns)):
            self.register_buffer(name, table, persistent=False)
        places = torch.empty(self.out_features, dtype=torch.int64, device=rows.device)
        places[rows[rows >= 0]] = torch.nonzero(rows.flatten() >= 0)[:, 0]
        self.register_buffer("places", places, persistent=False)  # of each output among those of the blocks

    def forward(self, x: Tensor) -> Tensor:
        blocks, _, width = self.weight.shape
        read = x.flatten(0, -2).index_select(1, self.columns.clamp_min(0).flatten()).unflatten(1, (blocks, width))
        written = torch.bmm(read.transpose(0, 1), self.gate(self.weight).transpose(1, 2))  # (blocks, samples, rows)
        y = written.transpose(0, 1).flatten(1).index_select(1, self.places)
        y = y if self.bias is None else y + self.bias
        return y.unflatten(0, x.shape[:-1])

    @torch.no_grad()
    def to_dense(self) -> nn.Linear:
        """The linear layer with zeros between blocks and where the gate holds weights back."""
        weight = self.weight.new_zeros(self.out_features, self.in_features)
        block, row, column = self.gate.mask.nonzero(as_tuple=True)
        weight[self.rows[block, row], self.columns[block, column]] = self.gate(self.weight)[block, row, column]
        layer = nn.Linear(1, 1, self.bias is not None, device="meta")
        layer.in_features, layer.out_features, layer.weight = self.in_features, self.out_features, nn.Parameter(weight)
        if self.bias is not None:
            layer.bias = nn.Parameter(self.bias.detach().clone())
        return layer


def _table(members: Sequence[np.ndarray]) -> Tensor:
    """(blocks, largest): the elements of each block, filled up with −1."""
    return nn.utils.rnn.pad_sequence([torch.from_numpy(own) for own in members], batch_first=True, padding_value=-1)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, mask: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(mask)
        acts = mask & (weight.abs() >= reaching(threshold, weight.dtype))
        return weight.masked_fill(~acts, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0] * mask, None, None


def reaching(threshold: float, dtype: torch.dtype) -> float:
    """The smallest number of a dtype that is not below the threshold, so that tests in any format agree.

    >>> reaching(0.1, torch.float32) >= 0.1, reaching(0.5, torch.float32)
    (True, 0.5)
    """
    nearest = torch.tensor(threshold, dtype=dtype)
    if nearest.double() < threshold:
        nearest = torch.nextafter(nearest, torch.tensor(torch.inf, dtype=dtype))
    return float(nearest)


def attach_(model: nn.Module, name: str, partition: Partition) -> tuple[nn.Module, Gate]:
    """Put a weight of the model behind a gate that lets only blocks through; the model, and the gate."""
    module, tensor = owner(name)
    layer = model.get_submodule(module)
    if type(layer) is nn.Linear:
        gated = GatedLinear(layer, partition.members(name))
        return replace_(model, module, gated), gated.gate
    weight = getattr(layer, tensor)
    mask = partition.mask(name).to(weight.device)
    gate = Gate(mask.view(*mask.shape, *[1] * (weight.ndim - 2)).expand_as(weight))
    parametrize.register_parametrization(layer, tensor, gate)
    return model, gate


def harden_(model: nn.Module, name: str) -> nn.Module:
    """Make what the gate lets through the layer's weight, and remove the gate; the model."""
    module, tensor = owner(name)
    layer = model.get_submodule(module)
    if isinstance(layer, GatedLinear):
        return replace_(model, module, layer.to_dense())
    parametrize.remove_parametrizations(layer, tensor, leave_parametrized=True)
    return model
