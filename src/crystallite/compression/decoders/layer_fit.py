"""One decoder layer made smaller: layers in it that add to the stream are fitted to what the dense stream is there.

Inputs come from the layers that are smaller already. So each makes good, as far as it can, for what was lost before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.compression.decoders.layer_parts import LayerParts, watching
from crystallite.compression.decoders.sensitivity import LayerProbe, inputs_of, own_weight, rotated
from crystallite.compression.decoders.stack import Call, Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.operator_specs import FittedOperator, OperatorSpec
from crystallite.compression.pruning import eliminate
from crystallite.core.free_memory import give_back
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_
from crystallite.models.familiarity import Readings
from crystallite.models.swap import put_
from crystallite.statistics.layer_io import matrix_of, set_layer_
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression, Weighed

__all__ = ["Chunk", "FitData", "FittedLayer", "Streams", "add_", "ends_of", "fit_layer_", "goals_of", "moments_of"]


_RIDGES = (1.0, 10.0, 100.0)  # times the one asked for


@dataclass(frozen=True)
class Chunk:
    """Hidden states of some samples where a layer begins, and what else it is called with."""

    hidden: Tensor
    call: Call
    real: Tensor | slice  # of its positions in one row, those that are no padding
    held_out: bool  # not fitted on


@dataclass(frozen=True)
class FittedLayer:
    """What became of a layer."""

    sizes: Mapping[str, tuple[int, int]]  # layer inside it → outputs and inputs that are left
    errors: Mapping[str, float]  # reader → share of the variance of what it shall add that it gets wrong, held out


@dataclass(frozen=True)
class Streams:
    """Chunk by chunk, what a smaller layer reads, and what the dense stream is behind each of its readers."""

    load: Callable[[int], Chunk]  # of the model whose earlier layers are smaller
    goal: Callable[[int, str], Tensor]  # of a chunk, behind a reader: see `goals_of`
    numbers: Sequence[int]  # of the chunks
    work: Workspace

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        yield from ((number, self.load(number)) for number in self.numbers)


class FitData(Protocol):
    """The data that a layer is fitted to: in this process, or spread over others."""

    def moments(self, layer: nn.Module, reader: str, watch: bool) -> tuple[Moments, Moments]:
        """See `moments_of`; watch: what is read there shall be known afterwards."""
        ...

    def add(self, layer: nn.Module, reader: str, weight: Tensor | None) -> None:
        """See `add_`."""
        ...


@torch.no_grad()
def fit_layer_(
    layer: nn.Module, parts: LayerParts, probe: LayerProbe, sizes: Mapping[str, int], data: FitData, ridge: float
) -> FittedLayer:
    """Make a copy of a dense layer smaller, in place; what it is now.

    sizes: how many neurons are left of each part. Cost: for each reader a run of the smaller layer up to it. Memory:
    that of one chunk, and moments of one reader.
    """
    rows: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    embedded: set[str] = set()
    left: dict[str, tuple[int, int]] = {}
    for key, group in parts.groups.items():
        if sizes.get(key, group.size) == group.size:
            continue
        if not group.readers:
            _silence_(layer, group, probe.orders[key][: sizes[key]], rows)
            embedded |= {*group.layers}
        elif not group.embedded:  # what is chosen goes at once: the rest is quicker to run and to fit
            kept = probe.orders[key][: sizes[key]].sort().values
            gone = {name: group.lost(name, kept) for name in group.writers}
            left |= _shrink_(layer, gone, {group.reader: group.read(kept)}, set())
    errors: dict[str, float] = {}
    for name in parts.readers:
        module, read = layer.get_submodule(name), parts.read_by(name)
        final = name == parts.readers[-1] and not (read is not None and read[1].embedded)  # what it reads stays so
        moments, held = data.moments(layer, name, final)
        give_back()  # activations: what follows needs room for large matrices
        fitted = Regression.spend(moments, held, own_weight(module), [ridge * factor for factor in _RIDGES])
        weight = judged = fitted.weight
        if read is not None and read[1].embedded and sizes.get(read[0], read[1].size) < read[1].size:
            weight, judged = _reduced_(layer, fitted, probe.factors[name], read[1], sizes[read[0]], rows, columns)
            embedded |= {*read[1].layers}
        errors[name] = fitted.error(judged)
        del fitted, moments, held  # what may be large
        inputs = matrix_of(module).shape[1]
        set_layer_(module, weight[:, :inputs], weight[:, inputs:].flatten())
        if parts.adds:
            moved = judged is not weight  # what it reads is turned from here on, what was read is not
            data.add(layer, name, judged[:, :inputs] if moved else None)
    return FittedLayer(left | _shrink_(layer, rows, columns, embedded), errors)


def moments_of(
    stack: Stack, layer: nn.Module, parts: LayerParts, name: str, streams: Streams, readings: Readings | None
) -> tuple[Moments, Moments]:
    """Of what a reader reads and shall write, on the data to fit on and to judge by; what it reads is kept.

    readings: takes in what it reads.
    """
    module, work, both = layer.get_submodule(name), streams.work, (Moments(name), Moments(name))
    for number, chunk in streams.chunks():
        if name == parts.readers[0]:
            _forget(parts, number, work)  # what a run that was killed here has left
        x = _read_by(stack, layer, name, chunk, _known(parts, number, work))
        if readings is not None:
            samples, positions = chunk.hidden.shape[:2]
            mask = chunk.real.view(samples, positions) if isinstance(chunk.real, Tensor) else None
            readings.see(module, x, samples, mask, chunk.held_out)
        goal = streams.goal(number, name).float()
        if parts.adds:
            work.put(f"read-{number}", {"read": x})
            target = goal - _before(stack, layer, parts, name, number, chunk, work)
        else:
            target = goal
        goal, target, rows = (value.flatten(0, -2)[chunk.real] for value in (goal, target, x))
        scale = goal.pow(2).mean(-1, keepdim=True).rsqrt()  # large states are normed away later
        both[chunk.held_out].add(inputs_of(module, rows, scale), target * scale)
    return both


def _known(parts: LayerParts, number: int, work: Workspace) -> dict[str, Any]:
    """What modules inside the layer return of a chunk, as far as that is known: see `LayerParts.around`."""
    found: dict[str, Any] = {}
    for name, (outer, more) in parts.around.items():
        if work.has(f"wrote-{number}-{name}"):
            value = work.get(f"wrote-{number}-{name}")["wrote"]
            found[outer] = value if more < 0 else (value, *[None] * more)
    return found


def _before(
    stack: Stack, layer: nn.Module, parts: LayerParts, name: str, number: int, chunk: Chunk, work: Workspace
) -> Tensor:
    """The stream of a chunk before a reader adds to it, as it is known, or else as the layer makes it now."""
    place = parts.readers.index(name)
    if not place:
        return chunk.hidden
    if work.has(f"small-{number}"):
        return work.get(f"small-{number}")["small"]
    with watching(layer, parts.readers) as seen:
        stack.run(layer, chunk.hidden, chunk.call)
    written = (seen.outputs[reader].reshape(chunk.hidden.shape) for reader in parts.readers[:place])
    return sum(written, chunk.hidden)


def add_(stack: Stack, layer: nn.Module, parts: LayerParts, name: str, streams: Streams, weight: Tensor | None) -> None:
    """Add what a reader writes now to the stream; weight: for what it read, where that is not its own."""
    module, work, last = layer.get_submodule(name), streams.work, name == parts.readers[-1]
    for number, chunk in streams.chunks():
        small = _before(stack, layer, parts, name, number, chunk, work)
        known = work.has(f"read-{number}")  # else whoever read it is lost: its own weight is for what it reads now
        x = work.get(f"read-{number}")["read"] if known else _read_by(stack, layer, name, chunk, {})
        if weight is None or not known:
            wrote = stack.run(module, x, ((), {}))
        else:
            bias = module._parameters.get("bias")
            wrote = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        work.put(f"small-{number}", {"small": small + wrote.reshape(small.shape)})
        work.drop(f"read-{number}")
        if name in parts.around and not last:
            work.put(f"wrote-{number}-{name}", {"wrote": wrote})


def ends_of(stack: Stack, layer: nn.Module, parts: LayerParts, streams: Streams) -> Iterator[tuple[int, Tensor]]:
    """The stream behind the layer; what is known of it inside the layer is dropped."""
    for number, chunk in streams.chunks():
        if parts.adds and streams.work.has(f"small-{number}"):
            yield number, streams.work.get(f"small-{number}")["small"]
            _forget(parts, number, streams.work)
        else:
            yield number, stack.run(layer, chunk.hidden, chunk.call)


def _forget(parts: LayerParts, number: int, work: Workspace) -> None:
    """Drop what is known of a chunk inside a layer."""
    for name in (f"read-{number}", f"small-{number}", *(f"wrote-{number}-{reader}" for reader in parts.around)):
        work.drop(name)


def goals_of(stack: Stack, dense: nn.Module, parts: LayerParts, chunk: Chunk) -> tuple[Tensor, dict[str, Tensor]]:
    """The dense stream behind a layer, and behind each reader; where they do not add to it, what each writes.

    What is behind the last reader that adds to the stream is the first of both, and not in the second.
    """
    with watching(dense, parts.readers) as seen:
        end = behind = stack.run(dense, chunk.hidden, chunk.call)
    if not parts.adds:
        return end, {name: seen.outputs[name] for name in parts.readers}
    found = {}
    for before, name in reversed(list(itertools.pairwise(parts.readers))):
        found[before] = behind = behind - seen.outputs[name].reshape(end.shape)
    return end, found


class _Enough(Exception):
    """What was wanted has been seen."""


def _read_by(stack: Stack, layer: nn.Module, name: str, chunk: Chunk, known: Mapping[str, Any]) -> Tensor:
    """What a layer inside reads; what would run after it does not; known: what some modules return, unrun."""

    def stop(_: str) -> None:
        raise _Enough

    with watching(layer, [name], before=stop) as seen, suppress(_Enough), ExitStack() as stand_ins:
        for outer, value in known.items():
            module = layer.get_submodule(outer)
            module.forward = _returns(value)
            stand_ins.callback(delattr, module, "forward")
        stack.run(layer, chunk.hidden, chunk.call)
    return seen.inputs[name]


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _silence_(layer: nn.Module, group: NeuronGroup, left: Tensor, rows: dict[str, Tensor]) -> None:
    """Take out numbers in which queries and keys are compared: their rows are zero, and marked."""
    for name in group.writers:
        gone = group.lost(name, left)
        module = layer.get_submodule(name)
        matrix_of(module)[gone] = 0
        if module._parameters.get("bias") is not None:
            module.get_parameter("bias").data[gone] = 0
        rows[name] = torch.cat([rows[name], gone]) if name in rows else gone


def _reduced_(
    layer: nn.Module, fitted: Regression, factor: Tensor, group: NeuronGroup, size: int,
    rows: dict[str, Tensor], columns: dict[str, Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The reader's weight for some neurons, zero for all others, and the same for inputs as they were.

    The rows and columns that go are marked.
    """
    whitened = Weighed(factor.T.to(fitted.weight) @ fitted.weight, fitted.metric)
    if group.inside_heads:
        whitened, forward, back = rotated(whitened, group)
        rotate_heads_(layer, group, forward, back)
    neurons, weight = eliminate(whitened, [size], group.places)[size]
    for name in group.writers:
        gone = group.lost(name, neurons)
        rows[name] = torch.cat([rows[name], gone]) if name in rows else gone
    columns[group.reader] = group.read(neurons)
    weight = torch.linalg.solve_triangular(factor.T.to(weight), weight, upper=True)
    if not group.inside_heads:
        return weight, weight
    judged = weight.clone()  # moments are of what was read before
    places = group.places.view(group.heads, -1, group.width).mT  # (heads, queries, numbers)
    for head in range(group.heads):
        for numbers in places[head]:
            judged[:, numbers] = weight[:, numbers] @ forward[head].to(weight)
    return weight, judged


def _shrink_(
    layer: nn.Module, gone: Mapping[str, Tensor], columns: Mapping[str, Tensor], embedded: set[str]
) -> dict[str, tuple[int, int]]:
    """Put smaller layers in the places of those of which rows or columns went; outputs and inputs that are left."""
    left = {}
    for name in {**gone, **columns}:
        old = layer.get_submodule(name)
        weight, bias = matrix_of(old).double(), old._parameters.get("bias")
        outputs, inputs = torch.arange(len(weight)), torch.arange(weight.shape[1])
        if name in gone:
            outputs = outputs[~torch.isin(outputs, gone[name])]
        if name in columns:
            kept = columns[name]
            inputs = kept[kept < len(inputs)]
        own_bias = weight.new_zeros(len(weight)) if bias is None else bias.detach().double()
        built = FittedOperator(OperatorSpec(), weight, own_bias, 0.0).build(outputs, inputs, old, name in embedded)
        built.training = old.training
        put_(layer, name, built)
        left[name] = (len(outputs), len(inputs))
    return left
