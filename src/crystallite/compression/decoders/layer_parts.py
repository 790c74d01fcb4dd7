"""What may go from the layers of a decoder: feed-forward neurons, numbers of values, and of queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.compression.decoders.stack import Call, Stack
from crystallite.compression.pruning import find_prunable
from crystallite.data.batch import Batch
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.graph.trace import Untraceable
from crystallite.models.layers import find_units

__all__ = ["LayerParts", "Watch", "find_parts", "watching"]

_ROUNDING = 1e-2  # of what a layer adds, in half precision


@dataclass(frozen=True)
class LayerParts:
    """The groups of a decoder layer, names inside the layer, and which layers add to the stream in which order."""

    groups: Mapping[str, NeuronGroup] = field(default_factory=dict)  # kind and reader → group
    readers: tuple[str, ...] = ()  # layers that read the groups, in the order in which they run
    adds: bool = False  # what the layer writes is what it reads and what the readers write, added up
    alone: Mapping[str, str] = field(default_factory=dict)  # what stays as it is → why
    around: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # reader → see `_around`

    def read_by(self, reader: str) -> tuple[str, NeuronGroup] | None:
        """The group that a layer reads, and its key."""
        return next(((key, group) for key, group in self.groups.items() if reader in group.readers), None)


def find_parts(stack: Stack, layer: nn.Module, batch: Batch, form: str, keep: Sequence[str]) -> LayerParts:
    """What may go from a layer; keep: layers in it that must stay as they are, form: see `compress`."""
    few = replace(batch.first(2), named={name: _short(value) for name, value in batch.first(2).named.items()})
    small, few = stack.with_few_tokens(few)
    model, prefix = small.with_one(layer), f"{stack.name}.0."
    units = [unit for unit in find_units(model, ["*"], []) if unit.name.startswith(prefix)]
    names = {unit.name for unit in units if not unit.reason and unit.kind == "linear"}
    names -= {prefix + name for name in keep}
    alone = {unit.name.removeprefix(prefix): unit.reason for unit in units if unit.reason}
    try:
        found = find_prunable(model, names, few)
    except Untraceable as error:
        return LayerParts(alone={"": f"its graph cannot be had: {error}"})
    groups = dict[str, NeuronGroup]()
    every = [name.removeprefix(prefix) for group in found.groups for name in group.readers]
    alone_here = Stack(model, stack.name)
    hidden, (call,) = alone_here.begin(few)
    readers, adds = _readers(alone_here, layer, every, hidden, call)
    for group in found.groups:
        kind = "scores" if not group.readers else "values" if group.inside_heads else "neurons"
        if form != "any" and (kind != "neurons" or group.embedded):
            continue
        groups[f"{kind} {'+'.join(n.removeprefix(prefix) for n in (group.readers or group.writers))}"] = _inside(
            group, prefix
        )
    alone |= {name.replace(prefix, ""): why for name, why in found.reasons.items()}
    return LayerParts(groups, readers, adds, alone, _around(alone_here, layer, readers, hidden, call) if adds else {})


def _short(value: Any) -> Any:
    return value[:, :32] if isinstance(value, Tensor) and value.ndim == 2 else value


def _inside(group: NeuronGroup, prefix: str) -> NeuronGroup:
    """A group whose names are those inside the layer."""

    def short(name: str) -> str:
        return name.removeprefix(prefix)

    attention = group.attention
    if attention is not None:
        parts: dict[str, Any] = {
            side: None if (part := getattr(attention, side)) is None else replace(part, layer=short(part.layer))
            for side in ("queries", "keys", "values", "outputs")
        }
        attention = replace(attention, **parts)
    return replace(
        group,
        writers=tuple(map(short, group.writers)),
        readers=tuple(map(short, group.readers)),
        passed=tuple(map(short, group.passed)),
        carried={(short(name), axis): labels for (name, axis), labels in group.carried.items()},
        rows={short(name): labels for name, labels in group.rows.items()},
        columns={short(name): labels for name, labels in group.columns.items()},
        attention=attention,
    )


@torch.no_grad()
def _readers(
    stack: Stack, layer: nn.Module, candidates: Sequence[str], hidden: Tensor, call: Call
) -> tuple[tuple[str, ...], bool]:
    """The layers that read a group, in the order in which they run, and whether the layer's output is its input and
    what they write, added up: no norm, scale or other layer lies between."""
    order: list[str] = []
    with watching(layer, candidates, order.append) as seen:
        end = stack.run(layer, hidden, call)
    written = [seen.outputs[name] for name in candidates]
    if any(output.numel() != hidden.numel() for output in written):
        return tuple(dict.fromkeys(order)), False
    added = hidden + sum(output.reshape(hidden.shape) for output in written)  # samples and positions may be one axis
    once = len(order) == len(set(order))
    return tuple(dict.fromkeys(order)), once and float((end - added).norm()) <= _ROUNDING * float((end - hidden).norm())


@torch.no_grad()
def _around(
    stack: Stack, layer: nn.Module, readers: Sequence[str], hidden: Tensor, call: Call
) -> dict[str, tuple[str, int]]:
    """The outermost module that returns what a reader writes and nothing else, and how many times None behind it.

    Where that is known, the module, such as all of attention, need not be run again. −1: what it returns is no tuple.
    """
    above = {name: [name[:at] for at, letter in enumerate(name) if letter == "."] for name in readers}
    with watching(layer, [*readers, *(outer for names in above.values() for outer in names)]) as seen:
        stack.run(layer, hidden, call)
    found = {}
    for name, outer in ((name, outer) for name, names in above.items() for outer in reversed(names)):
        given: Any = seen.outputs.get(outer)
        first, *rest = given if isinstance(given, tuple) else (given,)
        if isinstance(first, Tensor) and torch.equal(first, seen.outputs[name]) and all(v is None for v in rest):
            found[name] = outer, len(rest) if isinstance(given, tuple) else -1
    return found


@dataclass
class Watch:
    """What some layers read and wrote in the last run."""

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def watching(
    layer: nn.Module, names: Sequence[str], before: Callable[[str], None] | None = None, gradients: bool = False
) -> Iterator[Watch]:
    """While this lasts, what the named layers read and write is seen.

    before: called with the name of a layer that has read and not yet written. gradients: of outputs, too.
    """
    seen = Watch()

    def reads(name: str) -> Any:
        def see(_: Any, inputs: tuple[Tensor, ...]) -> None:
            if inputs:  # modules around layers may be called with names only
                seen.inputs[name] = inputs[0].detach()
            if before is not None:
                before(name)

        return see

    def writes(name: str) -> Any:
        def see(_: Any, __: Any, output: Tensor) -> None:
            seen.outputs[name] = output
            if gradients:
                output.retain_grad()

        return see

    handles = []
    for name in dict.fromkeys(names):
        module = layer.get_submodule(name)
        handles += [module.register_forward_pre_hook(reads(name)), module.register_forward_hook(writes(name))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
