"""The layers of a model that can be taken apart, each in the way of its kind, and why others are left alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.annealing.initial import named_weights
from crystallite.operators.conv import BlockConv, Convolution, channel_structure
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.pays import Judge
from crystallite.reorganization.record import LayerChange
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose
from crystallite.weights.names import is_fused_qkv

__all__ = [
    "Unit",
    "anneal_",
    "block_operator",
    "change",
    "find_units",
    "has_hooks",
    "set_trained_",
    "structure_of",
    "trained",
    "would_pay",
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
    0 other left alone: Embedding is a look-up table
    1 linear
    """
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    units = []
    for name, module in model.named_modules():
        if not any(fnmatchcase(name, p) for p in targets) or any(fnmatchcase(name, p) for p in ignore):
            continue
        unit = Unit(name, module, "linear" if _is_transformers_conv1d(module) else _KINDS.get(type(module), "other"))
        is_layer = isinstance(module, (*_KINDS, nn.MultiheadAttention)) or not any(True for _ in module.children())
        if not unit.weights or not is_layer:
            continue
        tied = any(owners[id(p)] > 1 for p in module.parameters(recurse=False))
        reason = _why_left_alone(unit, tied, places[id(module)] > 1)
        units.append(Unit(name, module, unit.kind, f"left alone: {reason}" if reason else ""))
    return units


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


def anneal_(
    unit: Unit, initial: Mapping[str, nulls.Null], null: nulls.Null | str, level: float | str, correction: str | None,
    random_walk: str | None, rule: str,
) -> None:  # fmt: skip
    """Set the weights that annealing does not keep to zero, gate by gate and in place.

    initial: what each parameter of the model was drawn from, by name (`nulls.for_module`).
    """
    prefix, masks = f"{unit.name}." if unit.name else "", dict[str, list[Tensor]]()
    for name, matrix, own in named_weights(unit.module):
        parameter = name.partition("[")[0]  # one gate of a stack goes by the name of the whole
        drawn, chosen = initial.get(prefix + parameter, own), null
        if null == "auto":
            chosen = nulls.choose(matrix, [drawn], prefix + name)  # type: ignore[assignment]
        elif null == "init":
            chosen = drawn
        mask = anneal(matrix, chosen, level, correction, random_walk, rule, prefix + name).mask
        masks.setdefault(parameter, []).append(mask)
    for parameter, parts in masks.items():
        weight, mask = unit.module.get_parameter(parameter), torch.cat(parts)
        turned = mask.T if _is_transformers_conv1d(unit.module) else mask
        with torch.no_grad():
            weight.masked_fill_(~turned.reshape(weight.shape), 0)


def structure_of(unit: Unit) -> BipartiteStructure | None:
    """Blocks of outputs and inputs of a linear layer or a convolution, None for other kinds."""
    if unit.kind == "linear":
        return decompose(unit.matrix, name=f"{unit.name}.weight")
    return channel_structure(unit.module, f"{unit.name}.weight") if isinstance(unit.module, Convolution) else None


def would_pay(unit: Unit, structure: BipartiteStructure, judge: Judge, kind: str = "") -> bool:
    """Whether the unit's blocks alone, in this structure, are worth it; `kind`: what they would be instead."""
    per_pair = unit.module.weight[0, 0].numel() if isinstance(unit.module, Convolution) else 1  # kernel positions
    macs, blocks = structure.macs * per_pair, structure.n_blocks
    if unit.kind == "convolution":
        return judge.convolution_pays(unit.macs, macs, min(structure.shape) / max(blocks, 1), blocks)
    return judge.pays(kind or unit.kind, unit.macs, macs, blocks)


def block_operator(unit: Unit, structure: BipartiteStructure | None, judge: Judge) -> nn.Module | None:
    """What replaces the unit, or None if it is better left dense."""
    module = unit.module
    if isinstance(module, nn.RNNBase):
        recurrent = BlockRecurrent.from_dense(module)
        fewer = recurrent.macs < recurrent.dense_macs
        return recurrent if (recurrent.pays if judge.only_if_faster else fewer) else None
    assert structure is not None
    if isinstance(module, Convolution):
        return BlockConv.from_dense(module, structure) if would_pay(unit, structure, judge) else None
    rows, _ = structure.shape
    blocks = _blocks_of_thirds(unit.matrix) if is_fused_qkv(f"{unit.name}.weight") and rows % 3 == 0 else []
    thirds_macs = sum(len(r) * len(c) for r, c in blocks)
    thirds_pay = judge.pays("linear", unit.macs, thirds_macs, len(blocks))
    if blocks and thirds_macs < structure.macs and thirds_pay:
        return BlockLinear.from_blocks(unit.matrix, unit.bias, blocks)
    return BlockLinear.from_dense(unit.matrix, unit.bias, structure) if would_pay(unit, structure, judge) else None


def _blocks_of_thirds(matrix: Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
    """The blocks of query, key and value apart: they share columns, so together they may be one block."""
    height = matrix.shape[0] // 3
    parts = [decompose(part, name="query, key or value") for part in matrix.split(height)]
    return [(rows + i * height, cols) for i, part in enumerate(parts) for rows, cols in part.blocks]


def change(
    unit: Unit, became: str, macs: int, parameters: int, share: float, blocks: int, role: str = ""
) -> LayerChange:
    """The record of one unit."""
    before = sum(p.numel() for p in unit.module.parameters())
    return LayerChange(
        unit.name, became, unit.macs, macs, before, parameters, share, blocks, type(unit.module).__name__, role
    )


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
    """`bias`, `bias_ih_l0`, `channels.0.first.biases.1`."""
    return name.rstrip("0123456789.").rpartition(".")[2].startswith("bias")


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the user's runs around the module's own."""
    return any(getattr(module, hooks) for hooks in _HOOKS)


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """GPT-2's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
