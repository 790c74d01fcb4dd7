"""What PyTorch and Hugging Face draw for each weight before training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from crystallite.annealing.distributions import Normal, Null, Orthogonal, Uniform
from crystallite.core.arrays import odd_tensor
from crystallite.core.errors import InvalidMatrix, InvalidOption

__all__ = [
    "candidates",
    "for_module",
    "kaiming_normal",
    "kaiming_uniform",
    "named_weights",
    "orthogonal",
    "xavier_normal",
    "xavier_uniform",
]

_KINDS = ("linear", "conv", "embedding", "recurrent", "attention")
_GATES = {nn.LSTM: "ifgo", nn.GRU: "rzn", nn.LSTMCell: "ifgo", nn.GRUCell: "rzn"}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_CONVOLUTION = (nn.modules.conv._ConvNd,)
_TRANSPOSED_CONVOLUTION = (nn.modules.conv._ConvTransposeNd,)
_EMBEDDING = (nn.Embedding, nn.EmbeddingBag)


def kaiming_uniform(fan_in: int, a: float = 0.0, nonlinearity: str = "leaky_relu") -> Uniform:
    """U(±gain·√(3/fan_in)), as `torch.nn.init.kaiming_uniform_`.

    >>> kaiming_uniform(100, a=math.sqrt(5))  # PyTorch's default for Linear and Conv: 1/√fan_in
    Uniform(±0.1)
    """
    return Uniform(_gain(nonlinearity, a) * math.sqrt(3 / _fan(fan_in)))


def kaiming_normal(fan_in: int, a: float = 0.0, nonlinearity: str = "leaky_relu") -> Normal:
    """N(0, gain²/fan_in), as `torch.nn.init.kaiming_normal_`.

    >>> kaiming_normal(200)
    Normal(0.1)
    """
    return Normal(_gain(nonlinearity, a) / math.sqrt(_fan(fan_in)))


def xavier_uniform(fan_in: int, fan_out: int, gain: float = 1.0) -> Uniform:
    """U(±gain·√(6/(fan_in + fan_out))), as `torch.nn.init.xavier_uniform_`.

    >>> xavier_uniform(300, 300)
    Uniform(±0.1)
    """
    return Uniform(gain * math.sqrt(6 / (_fan(fan_in) + _fan(fan_out))))


def xavier_normal(fan_in: int, fan_out: int, gain: float = 1.0) -> Normal:
    """N(0, gain²·2/(fan_in + fan_out)), as `torch.nn.init.xavier_normal_`.

    >>> xavier_normal(100, 100)
    Normal(0.1)
    """
    return Normal(gain * math.sqrt(2 / (_fan(fan_in) + _fan(fan_out))))


def orthogonal(rows: int, cols: int, gain: float = 1.0) -> Orthogonal:
    """The entry distribution of `torch.nn.init.orthogonal_`.

    >>> orthogonal(512, 256)
    Orthogonal(512×256, gain 1)
    """
    return Orthogonal(rows, cols, gain)


def candidates(kind: str, fan_in: int, fan_out: int, hidden: int | None = None, config: Any = None) -> tuple[Null, ...]:
    """The initialisations a matrix of this kind may have had when only its shape is known; for `choose`.

    `kind` is "linear", "conv", "embedding", "recurrent" or "attention"; `hidden` the state size of a recurrent layer;
    `config` a Hugging Face config, object or dict. Its `initializer_range` is knowledge: nothing else is guessed then,
    since some guess would fit a finished layer's σ by accident and be reported as its initialisation.

    >>> candidates("embedding", 50000, 384, config={"initializer_range": 0.02})
    (Normal(0.02),)
    >>> candidates("recurrent", 64, 256, hidden=256)[0]
    Uniform(±0.0625)
    """
    if kind not in _KINDS:
        raise InvalidOption(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    std = _range_of(config)
    if std is not None:
        return (Normal(std),)
    if kind == "embedding":
        return (Normal(1.0),)
    glorot: tuple[Null, ...] = (xavier_uniform(fan_in, fan_out), xavier_normal(fan_in, fan_out))
    if kind == "recurrent":
        return (Uniform(1 / math.sqrt(_fan(hidden or fan_out))), *glorot)
    if kind == "attention":  # q, k and v fused or apart, and PyTorch's output projection
        return (*glorot, xavier_uniform(fan_in, 3 * fan_in), kaiming_uniform(fan_in, math.sqrt(5)))
    he: tuple[Null, ...] = (kaiming_uniform(fan_in, nonlinearity="relu"), kaiming_normal(fan_in, nonlinearity="relu"))
    return (kaiming_uniform(fan_in, math.sqrt(5)), *he, *glorot)


def for_module(module: nn.Module) -> Any:
    """The null of a module's weight as its own `reset_parameters` (or Hugging Face's `_init_weights`) draws it.

    A module with one weight gives one null; a recurrent layer, attention, or any module that contains others gives a
    dict from parameter name to null. Below a module with `config.initializer_range` (every Hugging Face
    `PreTrainedModel`) linear and embedding weights are N(0, initializer_range²), and GPT-2's residual projections
    that over 2·n_layer. Biases and norms have no null: they are not matrices.

    >>> for_module(nn.Linear(400, 10))
    Uniform(±0.05)
    >>> for_module(nn.MultiheadAttention(8, 2))
    {'in_proj_weight': Uniform(±0.433), 'out_proj.weight': Uniform(±0.3536)}
    """
    found = {name: null for name, _, null in _weights_and_nulls(module)}
    if not found:
        raise InvalidOption(f"{type(module).__name__} has no weight whose initialisation is known")
    return found["weight"] if found.keys() == {"weight"} else found


def named_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Null]]:
    """(name, matrix, null) of every weight in a model, as the operator rows = outputs, columns = inputs.

    Convolutions are flattened to (out, in·kernel), transposed ones to (out, in·kernel) too, embeddings transposed to
    (features, tokens). Gate stacks and fused projections come apart into one matrix per gate: "lstm.weight_ih_l0[f]",
    "attn.in_proj_weight[q]". Shared weights come once.
    """
    seen: set[int] = set()
    for name, weight, null in _weights_and_nulls(module):
        if id(weight) in seen:
            continue
        seen.add(id(weight))
        owner = module.get_submodule(name.rpartition(".")[0])
        parts = _parts(owner, name.rpartition(".")[2])
        matrix = _as_operator(owner, weight.detach())
        for part, block in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{name}[{part}]" if part else name, block, null


def _weights_and_nulls(root: nn.Module) -> Iterator[tuple[str, torch.Tensor, Null]]:
    for prefix, module in root.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if odd := odd_tensor(parameter):
                raise InvalidMatrix(f"{prefix}.{name}: expected {odd}")
            null = _initial(root, prefix, module, name, parameter)
            if null is not None:
                yield f"{prefix}.{name}" if prefix else name, parameter, null


def _initial(root: nn.Module, prefix: str, module: nn.Module, name: str, weight: torch.Tensor) -> Null | None:
    """The null of one parameter, or None if it is not a weight matrix of a known kind."""
    if weight.ndim < 2 or not name.startswith(("weight", "in_proj", "q_proj", "k_proj", "v_proj")):
        return None
    if isinstance(module, _RECURRENT):
        return Uniform(1 / math.sqrt(_fan(module.hidden_size)))
    linear = isinstance(module, (nn.Linear, nn.Bilinear, *_CONVOLUTION)) or _is_transformers_conv1d(module)
    if not (linear or isinstance(module, (nn.MultiheadAttention, *_EMBEDDING))):
        return None
    std = _initializer_range(root, prefix)
    if std is not None:
        return Normal(std)
    if _is_transformers_conv1d(module):
        return Normal(0.02)
    if isinstance(module, _EMBEDDING):
        return Normal(1.0)
    if isinstance(module, nn.MultiheadAttention):
        return xavier_uniform(weight.shape[1], weight.shape[0])
    outer, _, last = prefix.rpartition(".")
    fans = getattr(root.get_submodule(outer), "xavier_fans", {}) if prefix else {}
    if last in fans:  # a layer that was a part of an attention's weight
        return xavier_uniform(*fans[last])
    # torch.nn.init counts dimension 1 as inputs everywhere, also for transposed convolutions; Bilinear does the same
    fan_in = weight.shape[1] if isinstance(module, nn.Bilinear) else math.prod(weight.shape[1:])
    return kaiming_uniform(fan_in, math.sqrt(5))


def _initializer_range(root: nn.Module, prefix: str) -> float | None:
    """The std that the nearest enclosing Hugging Face model prescribes for the module at this path, if there is one."""
    path = prefix.split(".") if prefix else []
    for depth in range(len(path), -1, -1):
        config = getattr(root.get_submodule(".".join(path[:depth])), "config", None)
        std = _range_of(config)
        if config is not None and std is not None:
            residual = getattr(config, "model_type", None) == "gpt2" and path[-1:] == ["c_proj"]
            return std / math.sqrt(2 * config.n_layer) if residual else std
    return None


def _range_of(config: Any) -> float | None:
    """A config's `initializer_range`, if it has one that is a positive number."""
    get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    std = get("initializer_range")
    return float(std) if isinstance(std, (int, float)) and std > 0 else None


def _is_transformers_conv1d(module: nn.Module) -> bool:
    """GPT-2's `Conv1D`: a linear layer whose weight is stored (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _as_operator(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(module, _EMBEDDING) or _is_transformers_conv1d(module):
        return weight.T
    if isinstance(module, _TRANSPOSED_CONVOLUTION):
        return weight.transpose(0, 1).flatten(1)
    return weight.flatten(1)


def _parts(module: nn.Module, name: str) -> str | tuple[str, ...]:
    """The names of the equal row blocks a stacked weight consists of."""
    if name == "in_proj_weight":
        return "qkv"
    if not name.startswith("weight_hr"):
        for kind, gates in _GATES.items():
            if isinstance(module, kind):
                return gates
    return ("",)


def _gain(nonlinearity: str, a: float) -> float:
    try:
        return nn.init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    except ValueError as error:
        raise InvalidOption(f"nonlinearity: {error}") from None


def _fan(count: int) -> int:
    if count < 1:
        raise InvalidOption(f"fan_in and fan_out must be at least 1, got {count}")
    return count
