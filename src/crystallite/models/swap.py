"""A module of a model exchanged for another: the one place that does it."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torch.nn import functional as F

from crystallite.models.layers import set_trained_, trained
from crystallite.operators.experts import Experts

__all__ = ["put_", "replace_"]


def replace_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module at a place, in the mode and as frozen as the old one was, weights and biases apart.

    That is the module itself if the place is the whole model.
    """
    old = model.get_submodule(name)
    module.training = old.training  # only its own: activations inside it keep theirs
    set_trained_(module, *trained(old))
    return put_(model, name, module)


def put_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module at a place; that is the module itself if the place is the whole model.

    PyTorch's fused kernel for encoders takes dense weights: where blocks come in it is left out, where they go it is
    allowed again.
    """
    if not name:
        return module
    if isinstance(module, Experts):
        module.stand_for_(model.get_submodule(name))
    around, _, place = name.rpartition(".")
    setattr(model.get_submodule(around), place, module)
    while True:
        outer = model.get_submodule(around)
        if isinstance(outer, nn.TransformerEncoderLayer):
            _choose_kernel_(outer)
        elif isinstance(outer, nn.TransformerEncoder):
            _choose_layout_(outer)
        if not around:
            return model
        around = around.rpartition(".")[0]


def _choose_kernel_(layer: nn.TransformerEncoderLayer) -> None:
    dense = all(type(child) is nn.Linear for child in (layer.linear1, layer.linear2))
    activation: Any = layer.activation
    is_relu = activation is F.relu or isinstance(activation, nn.ReLU)
    is_gelu = activation is F.gelu or isinstance(activation, nn.GELU)
    layer.activation_relu_or_gelu = (1 * is_relu or 2 * is_gelu) if dense else 0


def _choose_layout_(encoder: nn.TransformerEncoder) -> None:
    """Sequences without their padding only where all layers run in the fused kernel: no other takes them."""

    def suits(layer: nn.Module) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says why a layer does not
            empty = nn.TransformerEncoder(layer, 0, enable_nested_tensor=encoder.enable_nested_tensor)  # type: ignore[arg-type]
        return empty.use_nested_tensor

    encoder.use_nested_tensor = all(map(suits, encoder.layers))
