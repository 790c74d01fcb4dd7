"""The Neyman test inside the forward pass: weights below a threshold do not act, but go on learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["Gate", "attach", "harden_", "reaching"]


class Gate(nn.Module):
    """w → w where it is inside a block and |w| ≥ threshold, else 0; gradients reach every weight inside the blocks.

    A weight below the threshold is told what it would do if it acted (straight-through), so it can grow over it.
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


def attach(layer: nn.Linear, mask: Tensor) -> Gate:
    """Put a gate on a layer's weight; returns it."""
    gate = Gate(mask.to(layer.weight.device))
    parametrize.register_parametrization(layer, "weight", gate)
    return gate


def harden_(layer: nn.Module) -> None:
    """Make what the gate lets through the layer's weight, and remove the gate."""
    parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
