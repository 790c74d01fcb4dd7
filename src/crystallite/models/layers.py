"""The layers of a model that can be taken apart, each in the way of its kind, and why others are left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from crystallite.core.suggest import matching
from crystallite.models.record import LayerChange, OperatorRecord
from crystallite.operators.experts import holds_stacks

__all__ = [
    "Unit",
    "change",
    "find_units",
    "has_hooks",
    "is_transformers_conv1d",
    "left_alone",
    "set_trained_",
    "trained",
]

_KINDS = {
    nn.Linear: "linear",
    nn.Conv1d: "convolution", nn.Conv2d: "convolution", nn.Conv3d: "convolution",
    nn.RNN: "recurrent", nn.GRU: "recurrent", nn.LSTM: "recurrent",
}  # fmt: skip
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Unit:
    """A layer with weights: its kind says how it is taken apart, or `reason` why it is left alone."""

    name: str
    module: nn.Module
    kind: str
    reason: str = ""
    tied: int = 0  # of its numbers, those that an earlier layer holds too

    @property
    def parameters(self) -> int:
        """Its numbers, tied ones counted with the first layer that holds them."""
        return sum(p.numel() for p in self.module.parameters()) - self.tied

    @property
    def weights(self) -> list[Tensor]:
        """Its matrices and kernels."""
        own: list[Tensor] = [p for p in self.module.parameters(recurse=False) if p.ndim > 1]
        computed = getattr(self.module, "weight", None) if isinstance(self.module, tuple(_KINDS)) else None
        return own or ([computed] if isinstance(computed, Tensor) else [])  # computed: by a parametrization

    @property
    def matrix(self) -> Tensor:
        """The weight of a linear layer as (outputs, inputs)."""
        weight = self.module.get_parameter("weight").detach()
        return weight if isinstance(self.module, nn.Linear) else weight.T

    @property
    def bias(self) -> Tensor | None:
        return self.module._parameters.get("bias")

    @property
    def macs(self) -> int:
        """Multiply-adds of the dense layer: per input vector, output position or time step; a look-up needs none."""
        return 0 if isinstance(self.module, _TABLES) else sum(w.numel() for w in self.weights)

    @property
    def kept_share(self) -> float:
        kept, size = (sum(f(w) for w in self.weights) for f in (torch.count_nonzero, torch.numel))
        return float(kept) / max(int(size), 1)


def find_units(model: nn.Module, targets: Sequence[str], ignore: Sequence[str]) -> list[Unit]:
    """Every layer with weights whose name matches a target and no pattern to ignore, in the model's order.

    >>> for unit in find_units(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.ReLU()), ["*"], []):
    ...     print(unit.name, unit.kind, unit.reason)
    0 other Embedding is a look-up table
    1 linear
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    units, seen = dict[str, Unit](), set[int]()
    for name, module in model.named_modules():
        unit = Unit(name, module, "linear" if is_transformers_conv1d(module) else _KINDS.get(type(module), "other"))
        is_layer = isinstance(module, (*_KINDS, nn.MultiheadAttention)) or not any(True for _ in module.children())
        is_layer |= holds_stacks(module)  # experts, which may have an activation below them
        if not unit.weights or not is_layer:
            continue
        tied = any(owners[id(p)] > 1 for p in module.parameters(recurse=False))
        earlier = sum(p.numel() for p in module.parameters() if id(p) in seen)
        seen |= {id(p) for p in module.parameters()}
        units[name] = replace(unit, reason=_why_left_alone(unit, tied, places[id(module)] > 1), tied=earlier)
    return [units[name] for name in matching(units, targets, ignore)]


def _why_left_alone(unit: Unit, tied: bool, reused: bool) -> str:
    module, kind = unit.module, type(unit.module).__name__
    if isinstance(module, _TABLES):
        return f"{kind} is a look-up table"
    if isinstance(module, nn.MultiheadAttention):
        return f"{kind} splits and multiplies its weights itself"
    if unit.kind == "other":
        base = next((known.__name__ for known in _KINDS if isinstance(module, known)), None)
        return f"{kind} is a {base} with code of its own" if base else f"no block operator for {kind}"
    if tied:
        return "its weights are tied"
    if reused:
        return "the module is used in several places"
    if has_hooks(module):
        return "hooks are attached to it"
    if getattr(module, "proj_size", 0):
        return "a projected state (proj_size) mixes all blocks"
    if isinstance(module, nn.RNNBase) and len({(p.ndim, p.requires_grad) for p in module.parameters()}) > 2:
        return "only some of its weights are frozen"
    return ""


def change(
    unit: Unit, *operators: OperatorRecord, macs: int, parameters: int, share: float, role: str = ""
) -> LayerChange:
    """The record of one unit that was replaced."""
    kind, before = type(unit.module).__name__, unit.parameters
    return LayerChange(unit.name, kind, operators, unit.macs, macs, before, parameters, share, role)


def left_alone(unit: Unit) -> LayerChange:
    """The record of one unit that stays what it is, for its reason."""
    operator = OperatorRecord("left alone", reason=unit.reason)
    return change(unit, operator, macs=unit.macs, parameters=unit.parameters, share=unit.kept_share)


def trained(module: nn.Module) -> tuple[bool, bool]:
    """Whether the weights of a layer, or of the operator that replaced it, are trained, and whether its biases are.

    Biases that are not there count as weights, weights that are not there as trained.

    >>> trained(nn.Linear(2, 2).requires_grad_(False)), trained(nn.ReLU())
    ((False, False), (True, True))
    """
    flags = {False: list[bool](), True: list[bool]()}
    for name, parameter in module.named_parameters():
        flags[_is_bias(name)].append(parameter.requires_grad)
    weights = any(flags[False]) or not flags[False]
    return weights, any(flags[True]) if flags[True] else weights


def set_trained_(module: nn.Module, weights: bool, biases: bool) -> None:
    """Freeze a layer or operator as `trained` said of another."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(biases if _is_bias(name) else weights)


def _is_bias(name: str) -> bool:
    """`bias`, `bias_ih_l0`, `first.biases.1`."""
    return name.rstrip("0123456789.").rpartition(".")[2].startswith("bias")


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the user's runs around the module's own."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def is_transformers_conv1d(module: nn.Module) -> bool:
    """GPT-2's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
