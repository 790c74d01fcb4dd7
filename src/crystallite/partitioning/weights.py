"""Weights by name: a layer's own where it has one, the path of a matrix of a recurrent network, which has several."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

__all__ = ["edges", "owner", "parameter", "weight_of"]

_RECURRENT = re.compile(r"(?:(.*)\.)?(weight_(?:ih|hh)_l\d+(?:_reverse)?)")


def owner(name: str) -> tuple[str, str]:
    """The module a weight belongs to, and what it is called there.

    >>> owner("encoder.0"), owner("gru.weight_hh_l0"), owner("weight_ih_l1_reverse")
    (('encoder.0', 'weight'), ('gru', 'weight_hh_l0'), ('', 'weight_ih_l1_reverse'))
    """
    found = _RECURRENT.fullmatch(name)
    return (found[1] or "", found[2]) if found else (name, "weight")


def parameter(name: str) -> str:
    """The name of a weight among the model's parameters.

    >>> parameter("encoder.0"), parameter("gru.weight_hh_l0")
    ('encoder.0.weight', 'gru.weight_hh_l0')
    """
    return ".".join(part for part in owner(name) if part)


def weight_of(model: nn.Module, name: str) -> Tensor:
    """The weight as the model uses it, a gate applied if there is one."""
    module, tensor = owner(name)
    found = getattr(model.get_submodule(module), tensor)
    assert isinstance(found, Tensor)
    return found


def edges(weight: Tensor, tiles: tuple[int, int]) -> Tensor:
    """(outputs, inputs) bool: which neurons any nonzero weight joins, through whatever gate or place of a kernel.

    tiles: how often the neurons stand along the rows (gates) and the columns (directions) of the weight.

    >>> edges(torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]), (2, 1)).tolist()
    [[True, True], [False, False]]
    """
    rows, columns = (size // times for size, times in zip(weight.shape[:2], tiles, strict=True))
    return torch.as_tensor(weight != 0).reshape(tiles[0], rows, tiles[1], columns, -1).any(4).any(2).any(0)
