"""`trace`: which neurons of a model may change places, and every stored tensor that must follow them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from crystallite.errors import CrystalliteError
from crystallite.reorganization import axes as union
from crystallite.reorganization.aten import Reader

__all__ = ["Axis", "Layer", "Space", "Spaces", "Untraceable", "trace"]

Axis = tuple[tuple[int, ...], ...]  # one or more ranges after each other, each a product of spaces, outermost first


class Untraceable(CrystalliteError):
    """A model whose dataflow cannot be recorded: its weights cannot be permuted, but it can be used as it is."""


@dataclass(frozen=True)
class Space:
    """Neurons that share one order in every tensor that carries them."""

    size: int
    fixed: str  # why this order must stay, or an empty string
    within: tuple[int, ...] = ()  # spaces for each of whose elements this one has an order of its own: heads


@dataclass(frozen=True)
class Layer:
    """A module that multiplies by its weight: the spaces it writes and those it reads."""

    name: str
    rows: Axis
    columns: Axis


@dataclass(frozen=True)
class Spaces:
    """The dataflow of a model as far as the order of its neurons goes."""

    spaces: tuple[Space, ...]
    layers: tuple[Layer, ...]  # in the order in which they first run
    places: dict[tuple[str, int], Axis]  # (parameter or buffer, axis) → the spaces along it

    def __repr__(self) -> str:
        free = sum(not space.fixed for space in self.spaces)
        return f"Spaces({len(self.layers)} layers, {free} of {len(self.spaces)} spaces free)"


def trace(model: nn.Module, example: Any = None) -> Spaces:
    """The spaces of a model's neurons, from its graph of ATen operators in evaluation mode.

    Two axes are in one space if renumbering the neurons of one takes the same renumbering of the other to keep the
    model's function. A space is fixed where it reaches an input or output of the model, or an operator that is not
    known to allow it.

    - `example`: inputs that the model accepts: a tensor, a tuple of arguments or a dict of named ones. Left out, a
      transformers model's own are used, or they are guessed from the model's first layer.

    Raises `Untraceable` with the reason where no input can be guessed or `torch.export` cannot follow the model.
    The model is not changed. Cost: one run on shapes alone; no weight is read or copied.

    >>> spaces = trace(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> [(layer.name, layer.rows, layer.columns) for layer in spaces.layers]
    [('0', ((1,),), ((0,),)), ('2', ((2,),), ((1,),))]
    >>> [space.fixed or "free" for space in spaces.spaces]
    ['an input of the model', 'free', 'an output of the model']
    """
    tensors = _tensors(model)
    program = _export(model, example, list(tensors.values()))
    shared = _shared(tensors)
    signature = program.graph_signature
    stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    known = union.Axes()
    reader = Reader(known)
    owners: dict[int, tuple[str, list[union.Axis]]] = {}  # tied names are one tensor
    names: dict[Node, str] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and node.name in stored:
            tensor = tensors[stored[node.name]]
            reason = "a tensor that shares its memory with another carries it" if id(tensor) in shared else ""
            labels = reader.fixed(tensor.shape, reason)
            names[node], reader.labels[node] = owners.setdefault(id(tensor), (stored[node.name], labels))
        elif node.op in ("placeholder", "get_attr") and isinstance(value, Tensor):
            reader.labels[node] = reader.fixed(value.shape, "an input of the model")
        elif node.op == "call_function":
            reader.read(node)
        elif node.op == "output":
            for result in node.all_input_nodes:
                reader.fix(reader.labels.get(result, []), "an output of the model")
    layers = {
        owner: (rows, columns)
        for weight, rows, columns in reader.layers
        if (owner := _owner(names.get(weight, ""))) is not None
    }
    places = {(name, axis): label for name, labels in owners.values() for axis, label in enumerate(labels)}
    return _settled(known, layers, places)


def _settled(
    known: union.Axes, layers: dict[str, tuple[union.Axis, union.Axis]], places: dict[tuple[str, int], union.Axis]
) -> Spaces:
    """What was found, numbered in the order of the layers."""
    for axis in [*(axis for pair in layers.values() for axis in pair), *places.values()]:
        known.settle(axis)
    number: dict[int, int] = {}

    def numbered(axis: union.Axis) -> Axis:
        return tuple(tuple(number.setdefault(piece, len(number)) for piece in part) for part in known.parts(axis))

    found = [(name, numbered(columns), numbered(rows)) for name, (rows, columns) in layers.items()]
    carried = {place: numbered(axis) for place, axis in places.items()}
    spaces = [
        Space(known.size[piece], known.reason[piece], tuple(number[p] for p in known.pieces(known.within[piece])))
        for piece in number
    ]
    return Spaces(tuple(spaces), tuple(Layer(name, rows, columns) for name, columns, rows in found), carried)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def _shared(tensors: Mapping[str, Tensor]) -> set[int]:
    """Ids of tensors that are views of each other's memory: moving one would move the other too."""
    found: dict[tuple[Any, int], set[int]] = {}
    for tensor in tensors.values():
        address = tensor.untyped_storage().data_ptr()
        if address:  # on the meta device, and without elements, there is no memory
            found.setdefault((tensor.device, address), set()).add(id(tensor))
    return {tensor for together in found.values() if len(together) > 1 for tensor in together}


def _owner(weight: str) -> str | None:
    """The module that a weight belongs to."""
    name, _, last = weight.rpartition(".")
    return name if last == "weight" else None


def _export(model: nn.Module, example: Any, tensors: list[Tensor]) -> torch.export.ExportedProgram:
    # a copy of everything but the tensors: the model keeps its mode, its hooks and its attributes
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).eval()
    config: Any = getattr(twin, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache is no result of the function
    reasons: list[str] = []
    for arguments, named in _inputs(twin, example):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                return torch.export.export(twin, arguments, named, strict=False)
        except Exception as error:  # whatever the model's own code raises
            reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    if not reasons:
        raise Untraceable("no input can be guessed for this model: pass example=, a batch it accepts")
    raise Untraceable(f"torch.export cannot follow this model ({reasons[0]}): pass example=, a batch it accepts")


def _inputs(model: nn.Module, example: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Positional and named arguments to try, likeliest first."""
    if example is None and isinstance(getattr(model, "dummy_inputs", None), Mapping):
        example = dict(model.dummy_inputs)  # type: ignore[arg-type]
    if isinstance(example, Mapping):
        yield (), dict(example)
    elif isinstance(example, (tuple, list)):
        yield tuple(example), {}
    elif example is not None:
        yield (example,), {}
    else:
        first = next((m for m in model.modules() if not list(m.children()) and list(m.parameters())), None)
        if first is not None:
            like = next(first.parameters())
            for shape in _shapes(first):
                batch = torch.zeros(shape, dtype=like.dtype, device=like.device)
                yield (batch.long() if isinstance(first, nn.Embedding) else batch,), {}


def _shapes(first: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of a batch of two that a model whose first layer is this one may take."""
    match first:
        case nn.Linear(in_features=n):
            return [(2, n), (2, 8, n)]
        case nn.Conv1d(in_channels=n):
            return [(2, n, side) for side in (32, 256, 4096)]
        case nn.Conv2d(in_channels=n):
            return [(2, n, side, side) for side in (32, 64, 224)]
        case nn.Conv3d(in_channels=n):
            return [(2, n, side, side, side) for side in (16, 64)]
        case nn.RNNBase(input_size=n):
            return [(2, 8, n)]
        case nn.LayerNorm(normalized_shape=shape):
            return [(2, *shape), (2, 8, *shape)]
        case nn.Embedding():
            return [(2, 8), (2,)]
    return []
