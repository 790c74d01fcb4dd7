"""GPT-2's `Conv1D` of transformers, a linear layer whose weight is stored (inputs, outputs), turned and turned back."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.models.layers import find_units, is_transformers_conv1d
from crystallite.models.swap import replace_

__all__ = ["conv1d_of", "turn_back_", "turn_conv1d_"]


def turn_conv1d_(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, in place, with an `nn.Linear` for each `Conv1D` that nothing else knows of, and their names."""
    names = []
    for unit in find_units(model, ["*"], []):
        if is_transformers_conv1d(unit.module) and not unit.reason:
            outputs, inputs = unit.matrix.shape
            layer = nn.Linear(inputs, outputs, unit.bias is not None, device="meta")
            layer.weight = nn.Parameter(unit.matrix.contiguous())
            layer.bias = unit.bias  # type: ignore[assignment]
            model = replace_(model, unit.name, layer)
            names.append(unit.name)
    return model, tuple(names)


def turn_back_(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """The model, in place, with a `Conv1D` for each of these linear layers."""
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        model = replace_(model, name, conv1d_of(layer))
    return model


def conv1d_of(dense: nn.Linear) -> nn.Module:
    """The `Conv1D` that computes what a linear layer does."""
    library = sys.modules.get("transformers.pytorch_utils")  # a model that holds such layers has imported it
    if library is None:
        raise InvalidOption("this model had layers of transformers' Conv1D: import transformers to restore it")
    layer: nn.Module = library.Conv1D(dense.out_features, dense.in_features)
    layer.weight = nn.Parameter(dense.weight.detach().T.contiguous())
    layer.bias = dense.bias
    return layer
