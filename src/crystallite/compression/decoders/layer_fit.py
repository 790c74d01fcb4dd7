"""One decoder layer made smaller: layers in it that add to the stream are fitted to what the dense stream is there.

Inputs come from the layers that are smaller already. So each makes good, as far as it can, for what was lost before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from crystallite.compression.decoders.layer_parts import LayerParts, watching
from crystallite.compression.decoders.sensitivity import LayerProbe, own_weight, rotated, with_constant
from crystallite.compression.decoders.stack import Call, Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.operator_specs import FittedOperator, OperatorSpec
from crystallite.compression.pruning import eliminate
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_
from crystallite.models.swap import put_
from crystallite.statistics.layer_io import matrix_of, set_layer_
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression

__all__ = ["Chunk", "FittedLayer", "Streams", "fit_layer_"]


_RIDGES = (1.0, 10.0, 100.0)  # times the one asked for


@dataclass(frozen=True)
class Chunk:
    """Hidden states of some samples where a layer begins, and what else it is called with."""

    dense: Tensor  # of the original model
    small: Tensor  # of the one whose earlier layers are smaller
    call: Call
    real: Tensor | slice  # of its positions in one row, those that are no padding
    held_out: bool  # not fitted on


@dataclass(frozen=True)
class FittedLayer:
    """What became of a layer, and what both streams are behind it."""

    sizes: Mapping[str, tuple[int, int]]  # layer inside it → outputs and inputs that are left
    errors: Mapping[str, float]  # reader → share of the variance of what it shall add that it gets wrong, held out


@dataclass(frozen=True)
class Streams:
    """Both streams where a layer begins, chunk by chunk, and a place for what is known of them inside it."""

    load: Callable[[int], Chunk]
    count: int
    work: Workspace

    def chunks(self) -> Iterator[tuple[int, Chunk]]:
        yield from ((number, self.load(number)) for number in range(self.count))


@torch.no_grad()
def fit_layer_(
    stack: Stack, dense: nn.Module, layer: nn.Module, parts: LayerParts, probe: LayerProbe, sizes: Mapping[str, int],
    streams: Streams, ridge: float,
) -> tuple[FittedLayer, Iterator[tuple[Tensor, Tensor]]]:  # fmt: skip
    """Make a copy of a dense layer smaller, in place; what it is now, and both streams behind it, chunk by chunk.

    sizes: how many neurons are left of each part. Cost: a run of the dense layer over the data, and for each reader one
    of the smaller layer up to it. Memory: that of one chunk, and moments of one reader.
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
    errors, work = {}, streams.work
    for number, chunk in streams.chunks():
        for name, goal in _goals(stack, dense, parts, chunk).items():
            work.put(f"goal-{number}-{name}", {"goal": goal})
        work.put(f"small-{number}", {"small": chunk.small})
    for name in parts.readers:
        module, read = layer.get_submodule(name), parts.read_by(name)
        moments, held = Moments(name), Moments(name)
        for number, chunk in streams.chunks():
            x = _read_by(stack, layer, name, chunk)
            work.put(f"read-{number}", {"read": x})
            goal = work.get(f"goal-{number}-{name}")["goal"].float()
            target = goal - work.get(f"small-{number}")["small"] if parts.adds else goal
            goal, target, rows_read = (value.flatten(0, -2)[chunk.real] for value in (goal, target, x))
            scale = goal.pow(2).mean(-1, keepdim=True).rsqrt()  # large states are normed away later
            scaled = with_constant(rows_read.float()).mul_(scale)
            (held if chunk.held_out else moments).add(scaled, target * scale)
        fitted = _solved(moments, held, own_weight(module), ridge)
        weight = judged = fitted.weight
        if read is not None and read[1].embedded and sizes.get(read[0], read[1].size) < read[1].size:
            weight, judged = _reduced_(layer, fitted, probe.factors[name], read[1], sizes[read[0]], rows, columns)
            embedded |= {*read[1].layers}
        errors[name] = fitted.error(judged)
        set_layer_(module, weight[:, :-1], weight[:, -1])
        moved = read is not None and read[1].inside_heads and read[1].reader in columns  # it reads other numbers now
        for number, chunk in streams.chunks() if parts.adds else ():
            x = _read_by(stack, layer, name, chunk) if moved else work.get(f"read-{number}")["read"]
            small = work.get(f"small-{number}")["small"]
            work.put(f"small-{number}", {"small": small + stack.run(module, x, ((), {})).reshape(small.shape)})
            work.drop(f"read-{number}")
    done = FittedLayer(left | _shrink_(layer, rows, columns, embedded), errors)
    return done, _ends(stack, dense, layer, parts, streams)


def _solved(moments: Moments, held: Moments, own: Tensor, ridge: float) -> Regression:
    """The best dense weight; of several strengths of the ridge, the one that does best on held-out samples."""
    best = Regression.solve(moments, held, own, False, ridge * _RIDGES[0])
    for factor in _RIDGES[1:]:
        other = Regression.solve(moments, held, own, False, ridge * factor)
        best = min(best, other, key=lambda one: one.error(one.weight))
    return best


def _ends(
    stack: Stack, dense: nn.Module, layer: nn.Module, parts: LayerParts, streams: Streams
) -> Iterator[tuple[Tensor, Tensor]]:
    """Both streams behind the layer; what is known of them inside it is dropped."""
    for number, chunk in streams.chunks():
        if parts.adds:
            last = f"goal-{number}-{parts.readers[-1]}"
            yield streams.work.get(last)["goal"], streams.work.get(f"small-{number}")["small"]
        else:
            yield stack.run(dense, chunk.dense, chunk.call), stack.run(layer, chunk.small, chunk.call)
        for name in parts.readers:
            streams.work.drop(f"goal-{number}-{name}")
        streams.work.drop(f"small-{number}")


def _goals(stack: Stack, dense: nn.Module, parts: LayerParts, chunk: Chunk) -> dict[str, Tensor]:
    """What the dense stream is behind each reader or, where they do not add to it, what each writes."""
    with watching(dense, parts.readers) as seen:
        end = stack.run(dense, chunk.dense, chunk.call)
    if not parts.adds:
        return {name: seen.outputs[name] for name in parts.readers}
    found = {}
    for name in reversed(parts.readers):
        found[name] = end
        end = end - seen.outputs[name].reshape(end.shape)
    return found


class _Enough(Exception):
    """What was wanted has been seen."""


def _read_by(stack: Stack, layer: nn.Module, name: str, chunk: Chunk) -> Tensor:
    """What a layer inside reads; what would run after it does not."""

    def stop(_: str) -> None:
        raise _Enough

    with watching(layer, [name], before=stop) as seen, suppress(_Enough):
        stack.run(layer, chunk.small, chunk.call)
    return seen.inputs[name]


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
    whitened = replace(fitted, weight=factor.T.to(fitted.weight) @ fitted.weight)
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
