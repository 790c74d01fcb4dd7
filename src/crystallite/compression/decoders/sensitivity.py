"""What each size of each part of a decoder layer would cost, from one stream of gradients that runs backwards.

The gradients are those of −log p(y) with y drawn from what the model itself predicts: their mean square is Fisher's
metric, so that an error δ of the stream changes what is decided by E(g·δ)²/2. A sample is enough: sizes need no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.compression.decoders.layer_parts import LayerParts, watching
from crystallite.compression.decoders.stack import Call, Stack
from crystallite.compression.heads import value_rotation
from crystallite.compression.pruning import elimination_order_
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression, Weighed

__all__ = [
    "LayerProbe",
    "ProbeSums",
    "back_through",
    "gradients_at_end",
    "inputs_of",
    "least_weights_of",
    "own_weight",
    "probe_of",
    "rotated",
    "sizes_of",
    "weights_of",
]

_POSITIONS = 64  # at once, where logits are computed
_RIDGE = 0.01
_ROOT = 1e-3  # of the mean square of gradients, added in all directions


@dataclass(frozen=True)
class LayerProbe:
    """What is known of a layer: how much its outputs matter, and what it costs to make each part smaller."""

    factors: Mapping[str, Tensor]  # reader → (outputs, outputs) lower root of the mean ggᵀ
    costs: Mapping[str, Tensor]  # part → (sizes, 3): neurons that are left, the error that adds, and their weights
    orders: Mapping[str, Tensor]  # part → its neurons, the most needed first; of values: none, as heads are rotated

    def to_tensors(self) -> dict[str, Tensor]:
        kinds = {"factor": self.factors, "cost": self.costs, "order": self.orders}
        return {f"{kind} {name}": value for kind, found in kinds.items() for name, value in found.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> LayerProbe:
        kinds: dict[str, dict[str, Tensor]] = {"factor": {}, "cost": {}, "order": {}}
        for key, value in tensors.items():
            kind, _, name = key.partition(" ")
            kinds[kind][name] = value
        return cls(kinds["factor"], kinds["cost"], kinds["order"])


def gradients_at_end(stack: Stack, hidden: Tensor, seed: int) -> Tensor:
    """The gradients of −log p(y) with respect to what the last layer writes, y drawn from p at every position."""
    found = torch.empty_like(hidden)
    rng = torch.Generator(hidden.device).manual_seed(seed)
    buffers: list[Tensor] = []  # used again: memory of this size is expensive to get
    for sample in range(len(hidden)):
        for start in range(0, hidden.shape[1], _POSITIONS):
            part = hidden[sample : sample + 1, start : start + _POSITIONS].clone().requires_grad_()
            with torch.enable_grad():
                logits = stack.end(part)  # not rounded: what that would make of the head is half as large
            rows = logits.detach()[0]
            if not buffers:
                buffers = [torch.empty(rows.shape, dtype=torch.float32, device=rows.device) for _ in range(2)]
            error, sums = (buffer[: len(rows)] for buffer in buffers)
            torch.sub(rows, rows.amax(-1, keepdim=True), out=error).exp_()
            error /= error.sum(-1, keepdim=True)
            torch.cumsum(error, -1, out=sums)
            at = torch.rand(len(sums), 1, generator=rng).to(sums) * sums[:, -1:]
            drawn = torch.searchsorted(sums, at).clamp_max(sums.shape[1] - 1)
            error.scatter_add_(1, drawn, error.new_full(drawn.shape, -1.0))  # p − y: the gradient at the logits
            (gradient,) = torch.autograd.grad(logits, part, error[None].to(logits.dtype))  # not that of the head
            found[sample : sample + 1, start : start + _POSITIONS] = gradient
    return found


@dataclass
class ProbeSums:
    """Sums over positions from which a `LayerProbe` follows."""

    positions: int = 0
    squares: dict[str, Tensor] = field(default_factory=dict)  # reader → Σ ggᵀ of what it writes
    moments: dict[str, Moments] = field(default_factory=dict)  # reader → of what it reads, times the length of g
    weights: dict[str, float] = field(default_factory=dict)  # reader → Σ gᵀg
    worth: dict[str, Tensor] = field(default_factory=dict)  # part of queries and keys → see `_moved`

    @classmethod
    def total(cls, parts: Sequence[ProbeSums]) -> ProbeSums:
        """Of all positions together."""
        if len(parts) == 1:
            return parts[0]

        def joined(side: str) -> dict[str, Any]:
            every = [getattr(part, side) for part in parts]
            return {name: [some[name] for some in every if name in some] for some in every for name in some}

        sums = {side: {k: sum(v) for k, v in joined(side).items()} for side in ("squares", "weights", "worth")}
        moments = {name: Moments.total(some) for name, some in joined("moments").items()}
        return cls(sum(part.positions for part in parts), moments=moments, **sums)


def back_through(
    stack: Stack, layer: nn.Module, parts: LayerParts, chunks: Iterable[tuple[Tensor, Call, Tensor]]
) -> tuple[ProbeSums, list[Tensor]]:
    """What `probe_of` needs of some positions, and the gradients with respect to what the layer reads there.

    chunks: hidden states that the layer reads, what else it is called with, and the gradients at what it writes.
    """
    trained = [p for p in layer.parameters() if p.requires_grad]
    scores = {key: group for key, group in parts.groups.items() if not group.readers}
    asked = {key: group.compared[0].layer for key, group in scores.items()}
    sums = ProbeSums(
        moments={name: Moments(name) for name in parts.readers if parts.read_by(name)},
        weights=dict.fromkeys(parts.readers, 0.0),
        worth={key: torch.zeros(group.size, dtype=torch.float64) for key, group in scores.items()},
    )
    for parameter in trained:
        parameter.requires_grad_(False)
    before = [_back_through_one(stack, layer, parts, asked, sums, *chunk) for chunk in chunks]
    for parameter in trained:
        parameter.requires_grad_()
    return sums, before


def _back_through_one(
    stack: Stack, layer: nn.Module, parts: LayerParts, asked: Mapping[str, str], sums: ProbeSums,
    hidden: Tensor, call: Call, after: Tensor,
) -> Tensor:  # fmt: skip
    """The gradients before the layer, for one chunk, which is added to the sums; asked: part → layer of its queries."""
    start = hidden.clone().requires_grad_()
    with torch.enable_grad(), watching(layer, [*parts.readers, *asked.values()], gradients=True) as seen:
        torch.autograd.backward(stack.run(layer, start, call), after)
    assert start.grad is not None
    sums.positions += hidden.shape[0] * hidden.shape[1]
    for name in parts.readers:
        gradient = seen.outputs[name].grad
        assert gradient is not None
        g = gradient.flatten(0, -2).float()
        sums.squares[name] = (g.T @ g).double() + sums.squares.get(name, 0.0)
        if name in sums.moments:
            length = g.norm(dim=1, keepdim=True)  # a position counts as much as its errors matter
            x = inputs_of(layer.get_submodule(name), seen.inputs.pop(name).flatten(0, -2), length)
            sums.moments[name].add(x, x[:, :0])
            sums.weights[name] += float((length.double() ** 2).sum())
    for key, name in asked.items():
        q = seen.outputs[name]
        assert q.grad is not None
        sums.worth[key] += _moved(parts.groups[key], (q.detach() * q.grad).flatten(0, -2).float())
    return start.grad


def probe_of(layer: nn.Module, parts: LayerParts, sums: ProbeSums) -> LayerProbe:
    """What the layer's parts cost; the moments of what they read are gone afterwards."""
    factors = {name: _root(total / sums.positions) for name, total in sums.squares.items()}
    costs, orders = {}, {}
    for name, found in sums.moments.items():
        read = parts.read_by(name)
        assert read is not None
        key, group = read
        scale = sums.weights[name]
        weighed = Weighed.spend(found, factors[name].T @ own_weight(layer.get_submodule(name)), _RIDGE)
        if group.inside_heads:
            weighed = rotated(weighed, group)[0]
        order, errors = elimination_order_(weighed, sizes_of(group), group.places)
        del weighed  # what may be large
        each = weights_of(layer, group) / group.size
        costs[key] = _table((size, error / scale, size * each) for size, error in errors.items())
        if not group.inside_heads:
            orders[key] = order
    for key, worth in sums.worth.items():
        group = parts.groups[key]
        orders[key] = worth.argsort(descending=True, stable=True)
        lost = (worth.sum() - worth[orders[key]].cumsum(0)) / sums.positions
        held = _weights_held(layer, group)[orders[key]].cumsum(0)  # positions turn some numbers in pairs, others not
        costs[key] = _table((n, max(float(lost[n - 1]), 0.0), float(held[n - 1])) for n in sizes_of(group))
    return LayerProbe(factors, costs, orders)


def _table(rows: Iterable[tuple[int, float, float]]) -> Tensor:
    return torch.tensor(list(rows), dtype=torch.float64)


def weights_of(layer: nn.Module, group: NeuronGroup) -> float:
    """How many weights belong to a group."""
    found = _weights_held(layer, group).sum()
    for name in group.readers:
        found += int((group.columns[name] >= 0).sum()) * len(matrix_of(layer.get_submodule(name)))
    return float(found)


def least_weights_of(layer: nn.Module, group: NeuronGroup) -> float:
    """How many weights belong to what is at least left of a group."""
    size = sizes_of(group)[-1]
    if group.readers:
        return weights_of(layer, group) * size / group.size
    return float(_weights_held(layer, group).sort().values[:size].sum())


def _weights_held(layer: nn.Module, group: NeuronGroup) -> Tensor:
    """(neurons,) of layers that write them."""
    found = torch.zeros(group.size, dtype=torch.float64)
    for name in group.writers:
        labels = group.rows[name]
        counts = torch.bincount(labels[labels >= 0], minlength=group.size)
        found += counts * matrix_of(layer.get_submodule(name)).shape[1]
    return found


def inputs_of(module: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """(rows, inputs) what a layer read, times a number for each row; a bias is a weight of what is always 1."""
    if module._parameters.get("bias") is None:
        return x * scale
    found = x.new_empty(len(x), x.shape[1] + 1, dtype=scale.dtype)
    torch.mul(x, scale, out=found[:, :-1])
    found[:, -1:] = scale
    return found


def own_weight(module: nn.Module) -> Tensor:
    """(outputs, inputs) float64: the weight of a layer and, in a column more, its bias if it has one."""
    weight, bias = matrix_of(module).double(), module._parameters.get("bias")
    return weight if bias is None else torch.cat([weight, bias.detach().double()[:, None]], 1)


def rotated(regression: Regression | Weighed, group: NeuronGroup) -> tuple[Weighed, Tensor, Tensor]:
    """The same with other numbers of each head, the most needed first, which are apart; and the way there and back.

    (heads, width, width) each: see `value_rotation`.
    """
    metric, weight = regression.metric.clone(), regression.weight.clone()
    forward, back = value_rotation(group, weight, metric / metric.diagonal().mean())
    places = group.places.view(group.heads, -1, group.width).mT.to(metric.device)  # (heads, queries, numbers)
    for head in range(group.heads):
        for columns in places[head]:
            weight[:, columns] = weight[:, columns] @ back[head]
            metric[columns] = forward[head] @ metric[columns]
            metric[:, columns] = metric[:, columns] @ forward[head].T
    metric = (metric + metric.T) / 2
    return Weighed(weight, metric), forward, back


def sizes_of(group: NeuronGroup) -> list[int]:
    """How many neurons of a group may be left, largest first: steps that suit vectors and quantised blocks."""
    step = max(1, group.size // 48)
    if step >= 16:
        step = 32 * max(1, round(step / 32))
    elif step >= 2:
        step = 1 << (step.bit_length() - 1)
    return list(range(group.size, 0, -step))


def _moved(group: NeuronGroup, products: Tensor) -> Tensor:
    """(neurons,) Σ over positions of (Σ q·∂q)²: what it would change that a number of queries were not there."""
    queries, keys = group.compared
    neurons = group.rows[keys.layer][keys.places].expand(queries.places.shape)
    found = products.new_zeros(len(products), group.size)
    found.index_add_(1, neurons.flatten(), products[:, queries.places.flatten()])
    return (found**2).sum(0).double().cpu()


def _root(square: Tensor) -> Tensor:
    """A lower triangular root of a mean square; in half precision it may miss being positive by rounding."""
    mean = square.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.linalg.cholesky(square + _ROOT * mean * torch.eye(len(square)).to(square))
