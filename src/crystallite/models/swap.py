"""A module of a model exchanged for another: the one place that does it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn import functional as F

from crystallite.models.layers import set_trained_, trained
from crystallite.operators.experts import Experts

__all__ = ["put_", "put_everywhere_", "replace_"]

_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder)


def replace_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module in the place of a layer, in all its places if it has several.

    In the mode and as frozen as the old one was, weights and biases apart. That is the module itself if the layer is
    the whole model.
    """
    old = model.get_submodule(name)
    module.training = old.training  # only its own: activations inside it keep theirs
    set_trained_(module, *trained(old))
    return put_everywhere_(model, name, module)


def put_everywhere_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module wherever the one of this name stands: it may be used in several places.

    >>> layer = nn.Linear(2, 2)
    >>> net = put_everywhere_(nn.Sequential(layer, nn.Sequential(layer)), "0", nn.Identity())
    >>> net[0] is net[1][0]
    True
    """
    if not name:
        return module
    old = model.get_submodule(name)
    _set_(model, [(m, slot) for m in _modules(model) for slot, child in m._modules.items() if child is old], module)
    return model


def put_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module at one place; that is the module itself if the place is the whole model."""
    if not name:
        return module
    around, _, slot = name.rpartition(".")
    _set_(model, [(model.get_submodule(around), slot)], module)
    return model


def _set_(model: nn.Module, slots: Iterable[tuple[nn.Module, str]], module: nn.Module) -> None:
    """Put a module into the slots of others.

    PyTorch's fused kernel for encoders takes dense weights: where blocks come in it is left out, where they go it is
    allowed again.
    """
    for outer, slot in slots:
        if isinstance(module, Experts):
            module.stand_for_(getattr(outer, slot))
        setattr(outer, slot, module)
    around = [m for m in _modules(model) if isinstance(m, _FUSED) and any(part is module for part in _modules(m))]
    for outer in around:
        if isinstance(outer, nn.TransformerEncoderLayer):
            _choose_kernel_(outer)
    for outer in around:
        if isinstance(outer, nn.TransformerEncoder):
            _choose_layout_(outer)


def _modules(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` gives, in any order and ten times as fast: models have thousands of layers to put."""
    found, waiting = {id(model): model}, [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def _choose_kernel_(layer: nn.TransformerEncoderLayer) -> None:
    dense = all(type(child) is nn.Linear for child in (layer.linear1, layer.linear2))
    dense = dense and isinstance(layer.self_attn, nn.MultiheadAttention)
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
