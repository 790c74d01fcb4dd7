"""A decoder as a stream: what embeddings make, what each layer adds, and what the head makes of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding
from crystallite.models.layered_folder import list_of_layers
from crystallite.operators.experts import Experts, holds_stacks

__all__ = ["Call", "Calls", "Stack", "find_stack", "why_no_stack"]

_KEPT = 2**26  # bytes of what layers are called with
_LARGE = 2**25  # parameters from which on time matters
_TRIED = 1024  # tokens whose logits are compared in trials
Call = tuple[tuple[Any, ...], dict[str, Any]]  # what a layer is called with beside hidden states


@dataclass(frozen=True)
class Stack:
    """A language model whose layers, in one list, each read and write the same stream of hidden states.

    The model itself may hold no weights of the layers: they are passed when one is run.
    """

    model: nn.Module
    name: str  # of the list of layers
    rounded: bool = False  # products in bfloat16, sums in the model's own precision: twice as quick where it is known

    @property
    def layers(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.name)
        assert isinstance(found, nn.ModuleList)
        return found

    def layer_name(self, number: int) -> str:
        return f"{self.name}.{number}"

    @torch.no_grad()
    def begin(self, batch: Batch) -> tuple[Tensor, list[Call]]:
        """(samples, positions, features) what the first layer reads, and what each layer is called with beside that."""
        seen: list[tuple[Tensor, Call]] = []

        def watch(hidden: Tensor, *rest: Any, **named: Any) -> Tensor:
            seen.append((hidden, (rest, named)))
            return hidden

        with self._instead_of_layers(watch, stop_before_head=True):
            _run(self.model, batch)
        if len(seen) != len(self.layers):
            raise InvalidOption(f"{self.name}: {len(self.layers)} layers, of which {len(seen)} ran on the data")
        return seen[0][0], [call for _, call in seen]

    def end(self, hidden: Tensor) -> Tensor:
        """(samples, positions, vocabulary): the logits, from what the last layer writes at any positions."""
        tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        first = iter([True])

        def inject(given: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden if next(first, False) else given

        with self._instead_of_layers(inject):
            logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    def run(self, layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
        """What a layer makes of hidden states."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.rounded):
            found = layer(hidden, *call[0], **call[1])
        result: Tensor = found if isinstance(found, Tensor) else found[0]
        return result

    def quick(self) -> Stack:
        """The same, rounding products where the processor is quicker with that and the model is large."""
        weight = next(self.model.parameters())
        large = sum(p.numel() for p in self.model.parameters()) >= _LARGE
        known = weight.device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())
        return replace(self, rounded=large and known and weight.dtype == torch.float32)

    def with_one(self, layer: nn.Module) -> nn.Module:
        """The model with this layer alone, all its weights shared."""
        return _replaced(self.model, self.name.split("."), nn.ModuleList([layer]))

    def with_module(self, name: str, module: nn.Module) -> Stack:
        """The same with another module at one place, all else shared."""
        return replace(self, model=_replaced(self.model, name.split("."), module))

    def with_few_tokens(self, batch: Batch) -> tuple[Stack, Batch]:
        """The same with the rows of the table that a batch asks for and some of the head, and the batch for it.

        For trials of a layer, which would copy both, and would compare what they make of all tokens.
        """
        model: Any = self.model
        names = {id(module): name for name, module in model.named_modules()}
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        found = self
        if type(head) is nn.Linear:
            rows = torch.linspace(0, len(head.weight) - 1, min(_TRIED, len(head.weight))).long()
            found = found.with_module(names[id(head)], _with_rows(head, rows))
        if isinstance(table, nn.Embedding):
            tokens, places = batch.named["input_ids"].unique(return_inverse=True)
            few: Any = _with_rows(table, tokens)
            few.padding_idx = None  # a row that learns nothing, of the whole table
            found = found.with_module(names[id(table)], few)
            batch = replace(batch, named={**batch.named, "input_ids": places})
        return found, batch

    @contextmanager
    def _instead_of_layers(self, function: Callable[..., Tensor], stop_before_head: bool = False) -> Iterator[None]:
        owner, _, last = self.name.rpartition(".")
        around, layers = self.model.get_submodule(owner), self.layers
        stand_ins = nn.ModuleList(_StandIn(layer, function) for layer in layers)
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        handle = head.register_forward_pre_hook(_stop) if stop_before_head else None
        setattr(around, last, stand_ins)
        try:
            yield
        except _Stopped:
            pass
        finally:
            setattr(around, last, layers)
            if handle is not None:
                handle.remove()


class Calls:
    """What the layers of a stack are called with beside hidden states, chunk by chunk of the data: masks, tables of
    positions. Equal tensors are one; those of chunks beyond a limit of memory are made again when they are needed."""

    def __init__(self, stack: Stack, chunks: Mapping[int, Batch]) -> None:
        self._stack, self._chunks = stack, chunks
        self._kept: dict[int, list[Call]] = {}
        self._tensors: dict[int, Tensor] = {}  # by identity

    def of(self, chunk: int, layer: int) -> Call:
        found = self._kept.get(chunk)
        if found is None:
            seen: dict[int, Tensor] = {}
            found = [self._shared(call, seen) for call in self._stack.begin(self._chunks[chunk])[1]]
            used = {id(tensor): tensor for tensor in seen.values()}
            if sum(tensor.nbytes for tensor in (self._tensors | used).values()) <= _KEPT:
                self._kept[chunk], self._tensors = found, self._tensors | used
        return found[layer]

    def _shared(self, call: Call, seen: dict[int, Tensor]) -> Call:
        """The same call with tensors that are known already; seen: by the identity of what is replaced."""

        def one(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(one, value))
            if isinstance(value, Tensor) and id(value) not in seen:
                alike = (t for t in self._tensors.values() if t.shape == value.shape and t.dtype == value.dtype)
                seen[id(value)] = next((tensor for tensor in alike if torch.equal(tensor, value)), value)
            return seen[id(value)] if isinstance(value, Tensor) else value

        return one(call[0]), {name: one(value) for name, value in call[1].items()}


class _Stopped(Exception):
    """What lies after the layers is not needed."""


def _stop(*_: Any) -> None:
    raise _Stopped


class _StandIn(nn.Module):
    """Runs a function in the place of a layer, and has the attributes that the model's code asks the layer for."""

    def __init__(self, layer: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        vars(self)["_layer"], vars(self)["_function"] = layer, function

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_layer"], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        if not args:
            hidden = named.pop("hidden_states")
            args = (hidden,)
        return vars(self)["_function"](*args, **named)


def experts_in(layer: nn.Module) -> str:
    """The name of the experts in a layer, "" if it has none: rows that reach them are not those of the stream."""
    for name, module in layer.named_modules():
        if holds_stacks(module) or isinstance(module, Experts) or (isinstance(module, nn.ModuleList) and len(module)):
            return name or type(module).__name__
    return ""


def why_no_stack(model: nn.Module, batch: Batch) -> str:
    """What a model, whose layers need not have numbers, lacks to be a decoder with layers of one kind; "": nothing."""
    asked: Any = getattr(model, "get_output_embeddings", None)
    if not callable(asked) or asked() is None or getattr(model.config, "is_encoder_decoder", False):
        return f"a {type(model).__name__} is no causal language model"
    if "input_ids" not in batch.named:
        return f"expected input_ids, got {', '.join(batch.named) or 'other inputs'}"
    name = list_of_layers(model)
    if not name:
        return f"a {type(model).__name__} has no list of layers"
    layers: Any = model.get_submodule(name)
    if len({type(layer) for layer in layers}) > 1:
        return f"{name}: its layers are of several kinds"
    experts = next((f"{name}.{n}.{found}" for n, layer in enumerate(layers) if (found := experts_in(layer))), "")
    return f"{experts}: experts are not fitted layer by layer" if experts else ""


def find_stack(model: nn.Module, batch: Batch) -> Stack | None:
    """The model as a stack, None where it is none: it must compute the same when its layers are run one by one."""
    if why_no_stack(model, batch):
        return None
    stack, few = Stack(model, list_of_layers(model)), batch.first(1)
    try:
        with torch.no_grad():
            expected = _run(model, few).logits
            hidden, calls = stack.begin(few)
            for layer, call in zip(stack.layers, calls, strict=True):
                hidden = stack.run(layer, hidden, call)
            found = stack.end(hidden)
    except Exception:  # whatever the code of a model that is no such stack raises
        return None
    return stack if found.shape == expected.shape and equal_up_to_rounding(found, expected) else None


def _run(model: nn.Module, batch: Batch) -> Any:
    weight = next(model.parameters())
    return model(**{**batch.to(weight.device).named, "use_cache": False})


def _replaced(model: nn.Module, path: Sequence[str], module: nn.Module) -> nn.Module:
    """A copy of a module, one below it exchanged; everything else is shared."""
    if not path:
        return module
    found = copy.copy(model)
    found._modules = dict(model._modules)
    inner = model._modules[path[0]]
    assert inner is not None
    found._modules[path[0]] = _replaced(inner, path[1:], module)
    return found


def _with_rows(module: nn.Module, rows: Tensor) -> nn.Module:
    """A copy of a layer with some rows of its parameters, which each belong to an output or a token."""
    found = copy.copy(module)
    found._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[rows.to(p.device)], requires_grad=p.requires_grad)
        for name, p in module._parameters.items()
    }
    return found
