"""Weights by name: a layer's own where it has one, the path of a matrix of a recurrent network, which has several."""

from __future__ import annotations

import re

import numpy as np
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


def edges(weight: Tensor, written: np.ndarray, read: np.ndarray) -> Tensor:
    """(outputs, inputs) bool: which neurons any nonzero weight joins, through whatever gate, head or place of a kernel.

    written, read: the neuron that each row and each column of the weight is.

    >>> weight = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
    >>> edges(weight, np.array([0, 1, 0, 1]), np.array([0, 1])).tolist()
    [[True, True], [False, False]]
    """
    met = (weight != 0).flatten(2).any(2) if weight.ndim > 2 else weight != 0
    for axis, neurons in enumerate((written, read)):
        size = int(neurons.max()) + 1
        if size < len(neurons):
            shape = (size, met.shape[1]) if axis == 0 else (met.shape[0], size)
            count = torch.zeros(shape, dtype=torch.int32, device=met.device)
            met = count.index_add_(axis, torch.from_numpy(neurons).to(met.device), met.int()) > 0
    return met
