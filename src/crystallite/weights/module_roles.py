"""What the module classes of a model say about their parameters: no guessing from names where the code is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from crystallite.weights.stored import Role

__all__ = ["module_config", "module_roles"]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
_GATES = {"LSTM": ("i", "f", "g", "o"), "GRU": ("r", "z", "n"), "RNN": ("h",)}


def module_config(module: nn.Module) -> dict[str, Any]:
    """What config.json would say: the `config` of a Hugging Face model, {} for any other module."""
    config = getattr(module, "config", None)
    as_dict = config if isinstance(config, dict) else getattr(config, "to_dict", dict)()
    return as_dict if isinstance(as_dict, dict) else {}


def module_roles(module: nn.Module) -> dict[str, Role]:
    """Roles by tensor name, for the parameters of classes this package knows and for every buffer.

    >>> module_roles(nn.Linear(2, 2))["weight"].kind
    'linear'
    """
    roles: dict[str, Role] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        roles |= {prefix + name: role for name, role in _roles_in(child)}
        roles |= {prefix + name: Role("skipped", "buffer") for name, _ in child.named_buffers(recurse=False)}
    return roles


def _roles_in(module: nn.Module) -> Iterator[tuple[str, Role]]:
    parameters = [name for name, _ in module.named_parameters(recurse=False)]
    for name in parameters:
        role = _role(module, name)
        if role is not None:
            yield name, role


def _role(module: nn.Module, name: str) -> Role | None:
    if isinstance(module, _NORMS) or type(module).__name__.lower().endswith("norm"):
        return Role("skipped", "norm")
    if name.endswith("bias") or name.startswith("bias_"):
        return Role("skipped", "bias")
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return _recurrent(module, name)
    if isinstance(module, nn.MultiheadAttention):
        return Role("attention") if name == "in_proj_weight" else Role("linear")
    if name != "weight":
        return None
    if isinstance(module, nn.Linear):
        return Role("linear")
    if isinstance(module, nn.modules.conv._ConvNd):
        return Role("conv", groups=module.groups, layout="in-out" if module.transposed else "out-in")
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Role("embedding")
    if isinstance(module, nn.Bilinear):
        return Role("skipped", "bilinear")
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer, stored (in, out)
        return Role("linear", layout="in-out")
    return None


def _recurrent(module: nn.RNNBase | nn.RNNCellBase, name: str) -> Role:
    if name.startswith("weight_hr"):
        return Role("linear")
    family = next(f for f in _GATES if type(module).__name__.startswith(f) or getattr(module, "mode", "").startswith(f))
    projected = getattr(module, "proj_size", 0) > 0  # then the feedback matrices are not square
    feedback = name.startswith("weight_hh") and not projected
    return Role("recurrent", gates=_GATES[family], feedback=feedback)
