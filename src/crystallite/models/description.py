"""Modules as plain values and back: all that is said about a module besides its weights and index tables.

Descriptions stand in artifacts and configs, and may be hostile: names come from an allow-list, modules are built on the
meta device, so nothing is executed or allocated on a description's word.

An operator of this package describes itself: `describe()` gives plain values and the modules inside it, the class
method `from_description` takes them back and builds the operator without its numbers, and `index_limits()` names its
index tables with the bound that their entries must stay below. `check_tables()`, where there is one, refuses tables
that hold indices in those bounds and yet fit to nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, CrystalliteError, InvalidOption
from crystallite.models.swap import put_
from crystallite.operators.attention import ExpandedAttention
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import MOST_POSITIONS, BlockConv, check_reach
from crystallite.operators.experts import Expert, Experts
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank import LowRankConv, LowRankLinear
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.operators.low_rank_table import LowRankEmbedding, LowRankHead
from crystallite.operators.recurrent import BlockRecurrent

__all__ = [
    "OPERATORS", "build", "build_once", "check_indices", "check_size", "describe", "describe_parts", "mixed_dtypes",
    "replace",
]  # fmt: skip

OPERATORS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        BlockChain, BlockConv, BlockFeedForward, BlockLinear, BlockRecurrent, Expert, Experts, ExpandedAttention,
        LowRankConv, LowRankEmbedding, LowRankHead, LowRankLinear, LowRankRecurrent,
    )
}  # fmt: skip

_CONTAINERS: dict[str, type[nn.Module]] = {cls.__name__: cls for cls in (nn.Sequential, nn.ModuleList)}

_CONVOLUTION = "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"
_MAX_POOLING = "kernel_size stride padding dilation return_indices ceil_mode"
_POOLING = "kernel_size stride padding ceil_mode count_include_pad"
_BATCH_NORM = "num_features eps momentum affine track_running_stats"
_RECURRENT = "input_size hidden_size num_layers bias batch_first dropout bidirectional"

# PyTorch's own modules, with the attributes that are their constructor's arguments.
_KNOWN: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    cls.__name__: (cls, tuple(arguments.split()))
    for cls, arguments in [
        (nn.Identity, ""), (nn.ReLU, ""), (nn.ReLU6, ""), (nn.SiLU, ""), (nn.Mish, ""), (nn.Tanh, ""),
        (nn.Sigmoid, ""), (nn.Softsign, ""), (nn.Tanhshrink, ""), (nn.LogSigmoid, ""), (nn.Hardsigmoid, ""),
        (nn.Hardswish, ""), (nn.SELU, ""), (nn.GELU, "approximate"), (nn.ELU, "alpha"), (nn.CELU, "alpha"),
        (nn.LeakyReLU, "negative_slope"), (nn.PReLU, "num_parameters"), (nn.Softplus, "beta threshold"),
        (nn.Hardtanh, "min_val max_val"), (nn.Hardshrink, "lambd"), (nn.Softshrink, "lambd"),
        (nn.Threshold, "threshold value"), (nn.Softmax, "dim"), (nn.LogSoftmax, "dim"),
        (nn.Dropout, "p"), (nn.Dropout1d, "p"), (nn.Dropout2d, "p"), (nn.Dropout3d, "p"),
        (nn.Flatten, "start_dim end_dim"),
        (nn.Linear, "in_features out_features bias"),
        (nn.Embedding, "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse"),
        (nn.Conv1d, _CONVOLUTION), (nn.Conv2d, _CONVOLUTION), (nn.Conv3d, _CONVOLUTION),
        (nn.LayerNorm, "normalized_shape eps elementwise_affine bias"),
        (nn.RMSNorm, "normalized_shape eps elementwise_affine"), (nn.GroupNorm, "num_groups num_channels eps affine"),
        (nn.BatchNorm1d, _BATCH_NORM), (nn.BatchNorm2d, _BATCH_NORM), (nn.BatchNorm3d, _BATCH_NORM),
        (nn.MaxPool1d, _MAX_POOLING), (nn.MaxPool2d, _MAX_POOLING), (nn.MaxPool3d, _MAX_POOLING),
        (nn.AvgPool1d, _POOLING),
        (nn.AvgPool2d, f"{_POOLING} divisor_override"), (nn.AvgPool3d, f"{_POOLING} divisor_override"),
        (nn.AdaptiveAvgPool1d, "output_size"), (nn.AdaptiveAvgPool2d, "output_size"),
        (nn.AdaptiveAvgPool3d, "output_size"),
        (nn.RNN, f"{_RECURRENT} nonlinearity"), (nn.GRU, _RECURRENT), (nn.LSTM, f"{_RECURRENT} proj_size"),
    ]
}  # fmt: skip
_ACTIVATIONS = "transformers.activations"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOST_LAYERS = 1_000  # of recurrent modules: a number that costs time and memory even on the meta device
_MOST_PARTS = 200_000  # modules, stacks and blocks; each costs some 20 microseconds and a kilobyte
_LARGEST = 1 << 31  # no size of a module is as large


class _OwnCode(Exception):
    """A module that names and numbers cannot rebuild."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(f"{type(module).__module__}.{type(module).__name__}")


def describe(module: nn.Module) -> dict[str, Any] | None:
    """The module as plain JSON values, or None if it holds a module with code of its own.

    >>> describe(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))["children"]["0"]
    {'type': 'Linear', 'arguments': {'in_features': 2, 'out_features': 3, 'bias': True}}
    """
    try:
        return _describe_whole(module)
    except _OwnCode:
        return None


def describe_parts(model: nn.Module) -> dict[str, dict[str, Any]]:
    """By name, descriptions of all parts of the model that can be rebuilt, the largest ones there are.

    Of an operator around code of its own, such as an activation function, the type says so and cannot be built.

    >>> [*describe_parts(nn.Linear(2, 3))]
    ['']
    >>> [*describe_parts(nn.TransformerEncoderLayer(4, 1))][:2]  # its attention has code of its own
    ['linear1', 'dropout']
    """
    return dict(_parts("", model))


def build(description: Any, source: object) -> nn.Module:
    """The module that was described, on the meta device; `source` is where the description came from, for the error.

    >>> build({"type": "os.system", "arguments": {}}, "a.json")
    Traceback (most recent call last):
    crystallite.core.errors.CheckpointError: a.json: expected the description of a module, got the unknown type
    'os.system'
    """
    check_size(description, source)
    try:
        with torch.device("meta"):
            built = _built(description)
        for name, first in _shared_in(description).items():
            put_(built, name, built.get_submodule(first))
        if not isinstance(built, nn.Module):
            raise TypeError(f"{description!r:.80}")
    except (
        ArithmeticError, AttributeError, CrystalliteError, LookupError, RecursionError, RuntimeError, TypeError,
        ValueError,
    ) as error:  # fmt: skip
        what = f"no {error}" if isinstance(error, KeyError) else f"{error!s:.200}"
        raise CheckpointError(f"{source}: expected the description of a module, got {what}") from None
    return built


def check_size(descriptions: Any, source: object) -> None:
    """Refuse descriptions of more parts or recurrent layers than any model has, before one of them is built.

    >>> check_size({"type": "LSTM", "arguments": {"num_layers": 10**12}}, "a.json")
    Traceback (most recent call last):
    crystallite.core.errors.CheckpointError: a.json: expected at most 1000 recurrent layers, got more
    """
    left, parts, layers = [descriptions], 0, 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            count = value.get("num_layers", 0)
            layers += count if type(count) is int and count > 0 else 0
            left += value.values()
        elif isinstance(value, list):
            left += value
        parts += isinstance(value, (dict, list))
        if parts > _MOST_PARTS:
            raise CheckpointError(f"{source}: expected descriptions of at most {_MOST_PARTS} parts, got more")
        if layers > _MOST_LAYERS:
            raise CheckpointError(f"{source}: expected at most {_MOST_LAYERS} recurrent layers, got more")


def mixed_dtypes(model: nn.Module, whole: bool) -> str:
    """What is wrong with the dtypes of a model's numbers, in words; "" if nothing is.

    Those of an operator must be of one dtype. So must all of a model that is described as a `whole`, in which nothing
    casts; its norms may have another one.
    """
    groups: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if type(module) in OPERATORS.values():
            groups[name] = [*module.parameters(), *module.buffers()]
        if whole:
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            groups.setdefault(f"{name}." if isinstance(module, _NORMS) else "", []).extend(own)
    for name, tensors in sorted(groups.items(), key=lambda group: not group[0]):  # the model as a whole comes last
        found = sorted({str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point()})
        if len(found) > 1 or not {*found} <= _DTYPES.keys():
            where = name.removesuffix(".") or "the model"
            return f"{where}: expected numbers of one dtype among {', '.join(_DTYPES)}, got {', '.join(found)}"
    return ""


def replace(model: nn.Module, parts: dict[str, Any], source: object) -> None:
    """Put what is described in the place of what the model has there, where they differ."""
    check_size(parts, source)
    made = dict[nn.Module, tuple[Any, nn.Module]]()
    for name, description in parts.items():
        try:
            present = model.get_submodule(name)
        except AttributeError:
            raise CheckpointError(f"{source}: the given model has no module {name!r:.80}") from None
        if describe(present) != description:
            put_(model, name, build_once(description, source, present, made))


def build_once(
    description: Any, source: object, present: nn.Module, made: dict[nn.Module, tuple[Any, nn.Module]]
) -> nn.Module:
    """What is described, for the place of a module; the same again where that module stands in several places.

    made: what was built so far, by the module whose place it takes.
    """
    if present not in made or made[present][0] != description:
        made[present] = description, build(description, source)
    return made[present][1]


def check_indices(model: nn.Module, source: object) -> None:
    """Index tables must stay inside their vectors: a wrong one would read another neuron, or crash."""
    for name, module in model.named_modules():
        limits: Any = getattr(module, "index_limits", dict)
        for table, limit in limits().items():
            values: Tensor = attrgetter(table)(module)
            inside = values.dtype == torch.int64
            inside &= not len(values) or 0 <= int(values.min()) <= int(values.max()) < limit
            full = f"{name}.{table}".removeprefix(".")
            if not inside:
                raise CheckpointError(f"{source}: {full} must hold indices below {limit}")
            if table in getattr(module, "permutations", ()) and len(values.unique()) < limit:
                raise CheckpointError(f"{source}: {full} must hold every index below {limit} once")
        check: Any = getattr(module, "check_tables", None)
        if check is not None:
            try:
                check()
            except InvalidOption as error:
                raise CheckpointError(f"{source}: {f'{name}.{error}'.removeprefix('.')}") from None


def _parts(name: str, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        yield name, _describe_whole(module)
        return
    except _OwnCode as own:
        if type(module) in OPERATORS.values():
            yield name, {"type": f"{type(module).__name__} around the code of {own}"}
            return
    for place, child in module._modules.items():  # not named_children, which leaves out a second place of a module
        if child is not None:
            yield from _parts(f"{name}.{place}" if name else place, child)


def _describe_whole(module: nn.Module) -> dict[str, Any]:
    shared = _shared(module) if type(module) in _CONTAINERS.values() else {}
    return _describe(module) | ({"shared": shared} if shared else {})


def _describe(module: nn.Module) -> dict[str, Any]:
    kind = type(module).__name__
    if OPERATORS.get(kind) is type(module):
        fields: dict[str, Any] = {"type": kind, "dtype": str(_dtype(module)).removeprefix("torch.")}
        operator: Any = module
        return fields | _plain(operator.describe())
    if _CONTAINERS.get(kind) is type(module):
        children = {name: _describe(child) for name, child in module._modules.items() if child is not None}
        return {"type": kind, "children": children}
    known, names = _KNOWN.get(kind, (None, ()))
    if known is not type(module):  # a subclass may compute something else
        return {"type": _ACTIVATIONS, "name": _transformers_name(module)}
    arguments = {name: _plain(getattr(module, name)) for name in names}
    if "bias" in names:  # a parameter or None, or a flag
        arguments["bias"] = not (arguments["bias"] is None or arguments["bias"] is False)
    return {"type": kind, "arguments": arguments}


def _shared(container: nn.Module) -> dict[str, str]:
    """name → the earlier name of the same module, for those that stand in several places of a container.

    Places inside a container that stands there again go without saying.
    """
    first: dict[nn.Module, str] = {}
    found: dict[str, str] = {}
    waiting = [("", container)]
    while waiting:
        prefix, outer = waiting.pop()
        for place, child in outer._modules.items():
            if child is not None and first.setdefault(child, prefix + place) != prefix + place:
                found[prefix + place] = first[child]
            elif child is not None and type(child) in _CONTAINERS.values():
                waiting.append((f"{prefix}{place}.", child))
    return found


def _shared_in(description: Any) -> dict[str, str]:
    """What `_shared` said in a description; the modules must be described alike, so that none can hold itself."""

    def at(name: Any) -> Any:
        found = description
        for place in name.split("."):
            found = found["children"][place]
        return found

    shared = description.get("shared", {}) if isinstance(description, dict) else {}
    for name, first in shared.items():
        if at(name) != at(first):
            raise ValueError(f"{name!r:.80} as the module {first!r:.80}, which is another")
    return dict(shared)


def _transformers_name(module: nn.Module) -> str:
    """The name by which transformers knows this activation function."""
    library: Any = sys.modules.get(_ACTIVATIONS)  # a model that uses it has imported it
    for name, made_by in library.ACT2CLS.items() if type(module).__module__ == _ACTIVATIONS else ():
        cls = made_by[0] if isinstance(made_by, tuple) else made_by
        if cls is type(module) and not module.state_dict() and _settings(library.ACT2FN[name]) == _settings(module):
            return str(name)
    raise _OwnCode(module)


def _settings(module: nn.Module) -> dict[str, Any]:
    """What the constructor was given, in a form that can be compared."""

    def comparable(value: Any) -> Any:
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        return getattr(value, "__func__", value)  # a method without its object

    return {name: comparable(v) for name, v in vars(module).items() if not name.startswith("_") and name != "training"}


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return _describe(value)
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _built(value: Any) -> Any:
    """The value with every description in it built."""
    if isinstance(value, list):
        return [_built(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    if kind is None:
        return {name: _built(inner) for name, inner in value.items()}
    if kind in OPERATORS:
        fields = {name: _built(inner) for name, inner in value.items() if name not in ("type", "dtype")}
        if value["dtype"] not in _DTYPES:
            raise ValueError(f"the dtype {value['dtype']!r:.80} instead of {', '.join(_DTYPES)}")
        return OPERATORS[kind].from_description(fields).to(_DTYPES[value["dtype"]])
    if kind in _CONTAINERS:
        container = _CONTAINERS[kind]()
        for name, child in value["children"].items():
            container.add_module(name, _built(child))
        return container
    if kind == _ACTIVATIONS:
        library: Any = sys.modules.get(_ACTIVATIONS)
        if library is None:
            raise ValueError(f"the activation function {value['name']!r:.80} of transformers, which is not imported")
        return library.ACT2FN[value["name"]]
    if kind not in _KNOWN:
        raise ValueError(f"the unknown type {kind!r:.80}")
    cls, names = _KNOWN[kind]
    arguments: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in value["arguments"].items()}
    for name, given in arguments.items():
        if name not in names:  # a device would be allocated on
            raise ValueError(f"the argument {name!r:.80} of {kind}")
        for number in given if isinstance(given, tuple) else (given,):
            if not isinstance(number, (int, float, str, NoneType)) or (type(number) is int and abs(number) > _LARGEST):
                raise ValueError(f"{number!r:.80} as {name} of {kind}")
    made = cls(**arguments)
    if isinstance(made, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        check_reach(made)
    sizes = arguments.get("output_size", ())
    if math.prod(size or 1 for size in (sizes if isinstance(sizes, tuple) else (sizes,))) > MOST_POSITIONS:
        raise ValueError(f"{sizes} as output_size of {kind}")
    return made


def _dtype(operator: nn.Module) -> torch.dtype:
    """Of the operator's numbers; one that may have none keeps it in a buffer called `empty`."""
    numbers = [*operator.parameters(), *operator.buffers()]
    return next(value.dtype for value in numbers if value.is_floating_point())
