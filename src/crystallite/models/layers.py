"""The layers of a model that can be taken apart, each in the way of its kind, and why others are left alone."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.suggest import matching
from crystallite.models.record import LayerChange, OperatorRecord
from crystallite.operators.attention import ExpandedAttention
from crystallite.operators.experts import holds_stacks
from crystallite.operators.low_rank_table import LowRankEmbedding

__all__ = [
    "Unit",
    "change",
    "find_units",
    "has_hooks",
    "in_several_places",
    "is_transformers_conv1d",
    "left_alone",
    "plain_layer",
    "set_trained_",
    "trained",
]

_KINDS = {
    nn.Linear: "linear",
    nn.Conv1d: "convolution", nn.Conv2d: "convolution", nn.Conv3d: "convolution",
    nn.RNN: "recurrent", nn.GRU: "recurrent", nn.LSTM: "recurrent",
    nn.MultiheadAttention: "attention",
}  # fmt: skip
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Unit:
    """A layer with weights: its kind says how it is taken apart, or `reason` why it is left alone."""

    name: str
    module: nn.Module
    kind: str
    reason: str = ""
    tied: int = 0  # of its numbers, those that an earlier layer holds too
    shared: bool = False  # whether it stands in several places, so that it cannot be joined with its neighbour in one

    @property
    def parameters(self) -> int:
        """Its numbers, tied ones counted with the first layer that holds them."""
        return sum(p.numel() for p in self.module.parameters()) - self.tied

    @property
    def weights(self) -> list[Tensor]:
        """Its matrices and kernels."""
        inside = isinstance(self.module, nn.MultiheadAttention)  # its output projection is a module
        flat = 2 if holds_stacks(self.module) else 1  # a stack of biases has two axes
        own: list[Tensor] = [p for p in self.module.parameters(recurse=inside) if p.ndim > flat]
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
        if isinstance(self.module, LowRankEmbedding):
            return self.module.macs
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
    several = in_several_places(model)
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    attention = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    inside = {id(module.out_proj) for module in attention}  # which only holds weights
    units, seen = dict[str, Unit](), set[int]()
    for name, module in model.named_modules():
        unit = Unit(name, module, _kind(module), shared=module in several)
        is_layer = isinstance(module, tuple(_KINDS)) or not any(True for _ in module.children())
        is_layer |= holds_stacks(module)  # experts, which may have an activation below them
        if not unit.weights or not is_layer or id(module) in inside:
            continue
        tied = any(owners[id(p)] > 1 for p in module.parameters())
        earlier = sum(p.numel() for p in module.parameters() if id(p) in seen)
        seen |= {id(p) for p in module.parameters()}
        units[name] = replace(unit, reason=_why_left_alone(unit, tied), tied=earlier)
    taken, left = (_with_inner(model, units, patterns) for patterns in (targets, ignore))
    return [units[name] for name in matching(units, taken, left)]


def in_several_places(model: nn.Module) -> set[nn.Module]:
    """Modules that have more than one name in the model: themselves in several places, or inside one that is.

    >>> layer = nn.Linear(2, 2)
    >>> in_several_places(nn.Sequential(layer, nn.ReLU(), layer)) == {layer}
    True
    """
    places = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in places.items() if count > 1}


def _with_inner(model: nn.Module, units: Iterable[str], patterns: str | Sequence[str]) -> list[str]:
    """The patterns; one that matches an attention whose projections are layers matches these layers too."""
    outer = [name for name, module in model.named_modules() if isinstance(module, ExpandedAttention)]
    found = list[str]()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        named = tuple(f"{name}." for name in outer if name and fnmatchcase(name, pattern))
        inner = [name for name in units if name.startswith(named)] if named else []
        itself = not inner or any(fnmatchcase(name, pattern) for name in units)
        found += [*([pattern] if itself else []), *inner]
    return found


def _kind(module: nn.Module) -> str:
    """How a module is taken apart, or "other"."""
    if is_transformers_conv1d(module):
        return "linear"
    known = next((known for known in _KINDS if isinstance(module, known)), None)
    if known is None or not (_is_itself(module, known) or _computes_the_same(module, known)):
        return "other"
    return _KINDS[known]


def _is_itself(module: nn.Module, known: type[nn.Module]) -> bool:
    return type(module) is known and "forward" not in vars(module)


def _computes_the_same(module: Any, known: type[nn.Module]) -> bool:
    """Whether a subclass of a linear layer or convolution is one all the same: it holds and does nothing else.

    What it does is inherited, or is what PyTorch's layer does with its weight and bias, on random inputs and in
    evaluation and training mode.
    """
    if known is not nn.Linear and known not in _CONVOLUTIONS:
        return False
    own, cls = {name for name, _ in module.named_parameters()}, type(module)
    more = any(True for _ in (*module.buffers(), *module.children()))
    called = cls.__call__ is nn.Module.__call__ and len(inspect.signature(module.forward).parameters) == 1
    if more or not {"weight"} <= own <= {"weight", "bias"} or not called or type(module.weight) is not nn.Parameter:
        return False
    inherited = [name for name in ("forward", "_conv_forward") if hasattr(known, name)]
    if all(getattr(cls, name) is getattr(known, name) and name not in vars(module) for name in inherited):
        return True
    return _same_on_random_inputs(module, known)


@torch.no_grad()
def _same_on_random_inputs(module: Any, known: Any) -> bool:
    weight, bias, mode = module.weight, module.bias, module.training
    tolerance, rng = _ROUNDING.get(weight.dtype), torch.Generator().manual_seed(0)
    if tolerance is None or weight.is_meta:
        return False
    shapes = [(5, weight.shape[1]), (2, 3, weight.shape[1])]
    if known is not nn.Linear:  # an odd and an even size: padding may depend on it
        sizes = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        shapes = [(2, module.in_channels, *(size + more for size in sizes)) for more in (6, 7)]
    try:
        with torch.random.fork_rng(devices=[]):
            for shape, (scale, training) in product(shapes, ((1.0, False), (30.0, True))):
                x = (torch.randn(shape, generator=rng) * scale).to(weight)
                if known is nn.Linear:
                    expected = F.linear(x, weight, bias)
                else:
                    expected = known._conv_forward(module, x, weight, bias)
                module.training = training
                found = module.forward(x)
                same = isinstance(found, Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
                if not same or not (found - expected).norm() <= tolerance * expected.norm():
                    return False
    except Exception:  # whatever the user's code raises
        return False
    finally:
        module.training = mode
    return True


def plain_layer(module: nn.Module) -> nn.Module:
    """The layer as PyTorch's own class has it, with the same parameters: itself, or what a subclass of it computes.

    To be asked of units only: `find_units` has seen what the subclass computes.
    """
    known: Any = next((c for c in _CONVOLUTIONS if isinstance(module, c)), None)
    own: Any = module
    if known is None or type(module) is known:
        return module
    plain = known(
        own.in_channels, own.out_channels, own.kernel_size, own.stride, own.padding, own.dilation, own.groups,
        own.bias is not None, own.padding_mode, device="meta",
    )  # fmt: skip
    plain.weight, plain.bias = own.weight, own.bias
    result: nn.Module = plain.train(own.training)
    return result


def _why_left_alone(unit: Unit, tied: bool) -> str:
    module, kind = unit.module, type(unit.module).__name__
    if isinstance(module, _TABLES):
        return f"{kind} is a look-up table"
    if isinstance(module, nn.MultiheadAttention) and (obstacle := ExpandedAttention.obstacle(module)):
        return obstacle
    if unit.kind == "other":
        base = next((known.__name__ for known in _KINDS if isinstance(module, known)), None)
        return f"{kind} is a {base} with code of its own" if base else f"no block operator for {kind}"
    if tied:
        return "its weights are tied"
    if any(map(has_hooks, module.modules())):
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
    return change(unit, operator, macs=unit.macs, parameters=unit.parameters, share=1.0)


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
