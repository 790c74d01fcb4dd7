"""`trace`: which neurons of a model may change places, and every stored tensor that must follow them."""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Node

from crystallite.core.errors import CrystalliteError
from crystallite.graph import axes as union
from crystallite.graph.attention import Attention, find_attentions
from crystallite.graph.operator_rules import Reader, stored_weight
from crystallite.graph.sequential_calls import Watch
from crystallite.models.caches import turn_caches_off_
from crystallite.operators.experts import Experts

__all__ = ["Axis", "Layer", "Mode", "Space", "Spaces", "Untraceable", "export_quietly", "trace"]

Axis = tuple[tuple[int, ...], ...]  # one or more ranges after each other, each a product of spaces, outermost first
Mode = Literal["evaluation", "training"]
_LOGGERS = ("torch._subclasses.fake_tensor", "torch.export", "torch.fx.experimental.symbolic_shapes")  # print errors


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
    """A module whose weight multiplies as its kind has it: the spaces it writes and those it reads."""

    name: str
    rows: Axis
    columns: Axis


@dataclass(frozen=True)
class Spaces:
    """The dataflow of a model as far as the order of its neurons goes."""

    spaces: tuple[Space, ...]
    layers: tuple[Layer, ...]  # in the order in which they first run
    places: dict[tuple[str, int], Axis]  # (parameter or buffer, axis) → the spaces along it
    unused: tuple[str, ...] = ()  # parameters that forward does not use: who knows which neurons they belong to
    whole: frozenset[str] = frozenset()  # nn.Sequentials that run only as a whole, as far as forward goes
    attentions: tuple[Attention, ...] = ()  # in evaluation mode

    def sizes(self, part: Sequence[int]) -> list[int]:
        """How many neurons each of some spaces has."""
        return [self.spaces[space].size for space in part]

    def length(self, axis: Axis) -> int:
        return sum(math.prod(self.sizes(part)) for part in axis)

    def neurons(self, space: int) -> int:
        """How many neurons share the order of a space; those of other heads have another, and count too."""
        return math.prod(self.sizes((*self.spaces[space].within, space)))

    def labels(self, axis: Axis, space: int) -> Tensor:
        """(length of the axis,) the neuron of a space that each index belongs to, −1 where none.

        >>> spaces = trace(nn.Sequential(nn.Conv1d(1, 3, 1), nn.Flatten(), nn.Linear(6, 1)), torch.zeros(2, 1, 2))
        >>> spaces.labels(spaces.layers[1].columns, spaces.layers[0].rows[0][0]).tolist()
        [0, 0, 1, 1, 2, 2]
        """
        found = []
        for part in axis:
            sizes = self.sizes(part)
            labels = torch.full(sizes, -1)
            if space in part:
                labels = torch.zeros(sizes, dtype=torch.long)
                for each in (*self.spaces[space].within, space):
                    along = [-1 if other == each else 1 for other in part]
                    labels = labels * self.spaces[each].size + torch.arange(self.spaces[each].size).view(along)
            found.append(labels.flatten())
        return torch.cat(found)

    def __repr__(self) -> str:
        free = sum(not space.fixed for space in self.spaces)
        return f"Spaces({len(self.layers)} layers, {free} of {len(self.spaces)} spaces free)"


def trace(model: nn.Module, example: Any = None, modes: Sequence[Mode] = ("evaluation", "training")) -> Spaces:
    """The spaces of a model's neurons, from its graphs of ATen operators in evaluation and in training mode.

    Two axes are in one space if renumbering the neurons of one takes the same renumbering of the other to keep the
    model's function. A space is fixed where it reaches an input or output of the model, or an operator that is not
    known to allow it.

    - `example`: inputs that the model accepts: a tensor, a tuple of arguments or a dict of named ones. Left out, a
      transformers model's own are used, or they are guessed from the model's first layer.
    - `modes`: what is found holds in these. A model that drops layers at random while it trains can be followed in
      evaluation only.

    Raises `Untraceable` with the reason where no input can be guessed or `torch.export` cannot follow the model in one
    of the modes. What forward does with these inputs is all that is seen: not other methods, not branches that other
    inputs would take. The model is not changed. Cost: a run on shapes alone in each mode; no weight is read or copied.

    >>> spaces = trace(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> [(layer.name, layer.rows, layer.columns) for layer in spaces.layers]
    [('0', ((1,),), ((0,),)), ('2', ((2,),), ((1,),))]
    >>> [space.fixed or "free" for space in spaces.spaces]
    ['an input of the model', 'free', 'an output of the model']
    """
    tensors = _tensors(model)
    reasons = {id(tensor): "a buffer that is not saved carries it" for tensor in _unsaved(model)}
    reasons |= dict.fromkeys(_shared(tensors), "a tensor that shares its memory with another carries it")
    known, watch = union.Axes(), Watch(model)
    reader = Reader(known)
    owners: dict[int, tuple[str, list[union.Axis]]] = {}  # tied names are one tensor
    names: dict[Node, str] = {}
    used: set[int] = set()
    attentions: list[Attention] = []
    for mode in modes:  # one set of axes: what any mode asks for holds
        program = _export(model, example, list(tensors.values()), mode, watch)
        signature = program.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        watch.read(program.graph.nodes)
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and node.name in stored:
                tensor = tensors[stored[node.name]]
                used |= {id(tensor)} if node.users else set()
                if id(tensor) not in owners:
                    labels = reader.fixed(tensor.shape, reasons.get(id(tensor), ""))
                    owners[id(tensor)] = stored[node.name], labels
                names[node], reader.labels[node] = owners[id(tensor)]
            elif node.op in ("placeholder", "get_attr") and isinstance(value, Tensor):
                reader.labels[node] = reader.fixed(value.shape, "an input of the model")
            elif node.op == "call_function":
                reader.read(node)
            elif node.op == "output":
                for result in node.all_input_nodes:
                    reader.fix(reader.labels.get(result, []), "an output of the model")
        if mode == "evaluation":
            lifted = signature.inputs_to_lifted_tensor_constants
            constants = {n: program.constants[lifted[n.name]] for n in program.graph.nodes if n.name in lifted}
            attentions = find_attentions(program.graph, names, constants)
    layers = {}
    for weight, rows, columns in reader.layers:
        weight = stored_weight(weight)
        owner = _owner(names.get(weight, ""))
        # x @ weight of an nn.Linear: not what the module does, whose rows are outputs
        if owner is not None and (rows == reader.labels[weight][0] or not _is_linear(model, owner)):
            layers[owner] = rows, columns
    places = {(name, axis): label for name, labels in owners.values() for axis, label in enumerate(labels)}
    found = _settled(known, layers, places)
    unused = tuple(name for name, parameter in model.named_parameters() if id(parameter) not in used)
    return replace(found, unused=unused, whole=watch.whole, attentions=tuple(attentions))


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


def _unsaved(model: nn.Module) -> Iterator[Tensor]:
    """Buffers that are in no state dict: a model that is loaded has its own, in the original order."""
    for module in model.modules():
        buffers = (module._buffers.get(name) for name in module._non_persistent_buffers_set)
        yield from (buffer for buffer in buffers if buffer is not None)


def _is_linear(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), nn.Linear)


def _owner(weight: str) -> str | None:
    """The module that a weight belongs to."""
    name, _, last = weight.rpartition(".")
    return name if last == "weight" else None


def _export(
    model: nn.Module, example: Any, tensors: list[Tensor], mode: Mode, watch: Watch
) -> torch.export.ExportedProgram:
    # a copy of everything but the tensors: the model keeps its mode, its hooks and its attributes
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}).train(mode == "training")
    watch.watch_(twin)
    for module in twin.modules():
        if isinstance(module, Experts):  # who reads what inside is known: see `graph/experts.py`
            module.opaque = True
    turn_caches_off_(twin)
    reasons: list[str] = []
    for arguments, named in _inputs(model, example):
        try:
            with torch.no_grad():
                return export_quietly(twin, arguments, named)
        except Exception as error:  # whatever the model's own code raises
            reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    if not reasons:
        raise Untraceable("no input can be guessed for this model: pass example=, a batch it accepts")
    raise Untraceable(
        f"torch.export cannot follow this model in {mode} mode ({reasons[0]}): pass example=, a batch it accepts"
    )


def export_quietly(
    model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any] | None = None
) -> torch.export.ExportedProgram:
    """`torch.export`, silent about the user's code, which we only look at, and about an attempt that fails."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        # PyTorch prints the graph so far where it cannot go on
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return torch.export.export(model, arguments, named, strict=False)
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


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
