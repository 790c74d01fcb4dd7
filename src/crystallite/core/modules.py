"""The door through which models enter that verbs compute with: their weights must be numbers, in plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption

__all__ = ["check_numbers", "odd_kind"]


def odd_kind(tensor: Tensor) -> str:
    """What a tensor is instead of numbers in rows and columns, and the way out; "" if it is that.

    >>> odd_kind(torch.eye(2)), odd_kind(torch.eye(2).to_sparse())
    ('', 'a sparse tensor; call .to_dense() first')
    """
    if tensor.is_nested:
        return "a nested tensor; call .to_padded_tensor(0) first"
    if tensor.layout != torch.strided:
        return "a sparse tensor; call .to_dense() first"
    if tensor.is_meta:
        return "a tensor on the meta device, which holds no numbers"
    return ""


def check_numbers(model: nn.Module, finite: bool = False) -> None:
    """Refuse a model with weights that are no numbers; with `finite`, also one with NaN or infinity among them.

    >>> layer = nn.Linear(2, 2)
    >>> _ = layer.weight.data.fill_(torch.nan)
    >>> check_numbers(layer, finite=True)
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: weight: expected finite numbers, got NaN or infinity
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(value):
            raise InvalidOption(f"{name}: expected numbers, got a lazy parameter; run the model once first")
        if odd := odd_kind(value):
            raise InvalidOption(f"{name}: expected numbers, got {odd}")
        plain = type(value) in (Tensor, nn.Parameter) and value.is_floating_point()
        if finite and plain and isinstance(value, nn.Parameter) and not bool(torch.isfinite(value).all()):
            raise InvalidOption(f"{name}: expected finite numbers, got NaN or infinity")
