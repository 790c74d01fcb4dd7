"""Neurons that can go: in which groups, and which ones, so that the rest can make good for them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError
from crystallite.data.batch import Batch
from crystallite.graph.attention import Attention
from crystallite.graph.experts import expert_groups
from crystallite.graph.neuron_groups import (
    NeuronGroup,
    neuron_groups,
    pairings,
    score_group,
    trace_batch,
    value_group,
)
from crystallite.graph.trace import Spaces, Untraceable
from crystallite.graph.trials import acts_alone, can_remove, can_rotate, compares_alone, is_normed
from crystallite.models.record import OUTSIDE_EXPERTS
from crystallite.statistics.regression import Regression, Weighed

__all__ = ["Prunable", "eliminate", "elimination_order_", "find_prunable", "find_prunable_with_experts"]

_PORTION = 1 / 48  # of the neurons that go at once; after each portion all others are fitted again
_PACKED = 0.75  # of a matrix is left when what is gone is taken out: taking out costs more than working around it
_MOVED = 256  # rows at once
_SQUARED = 64  # rows at once, which stay in a processor's cache: nine times as quick as all


@dataclass(frozen=True)
class Prunable:
    """The groups of neurons that may go, and why parts of attention may not."""

    groups: tuple[NeuronGroup, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)  # layer → why its heads stay as they are


def find_prunable(model: nn.Module, names: Collection[str], batch: Batch) -> Prunable:
    """The neurons between some layers that each act on their own, so that others can be fitted without them.

    Hidden neurons and channels act on one reader, which is then fitted without some of them; so do the numbers that
    attention heads hand on, once they have been rotated. Those in which queries and keys are compared go without
    anybody reading them. Raises `Untraceable` where the model's graph cannot be had.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> [group.layers for group in find_prunable(net, {"0", "2", "4"}, Batch(0, 9, (torch.randn(9, 2),))).groups]
    [('0', '2')]
    """
    model, batch = _in_float32(model, batch)
    spaces = trace_batch(model, batch)
    hidden = [
        group
        for group in neuron_groups(model, spaces).values()
        if {*group.layers} <= {*names} and group.is_even and len(group.readers) == 1 and not group.heads
    ]
    hidden = [group for group in _one_for_each_reader(hidden) if acts_alone(model, group, batch)]
    if not can_remove(model, hidden, batch):  # some code counts on all of them: which?
        hidden = [group if can_remove(model, [group], batch) else replace(group, embedded=True) for group in hidden]
    inside, reasons = _inside_heads(model, spaces, names, batch)
    return Prunable(_embedded_together([*hidden, *inside]), reasons)


def find_prunable_with_experts(
    model: nn.Module, names: Collection[str], routed: Collection[str], batch: Batch
) -> tuple[Prunable, str]:
    """The same and the neurons of experts, which no graph of the whole model is needed for; and why it was not had.

    routed: layers of experts in lists.
    """
    experts = expert_groups(model, names, routed, batch)
    others = {*names} - {name for group in experts for name in group.layers}
    try:
        found = find_prunable(model, others, batch.first(2))
        return replace(found, groups=(*experts, *found.groups)), ""
    except Untraceable as error:
        return Prunable(tuple(experts)), f"{OUTSIDE_EXPERTS * bool(experts)}{error}"


def _in_float32(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """A model in half precision, and its batch, in float32: trials tell equal from nearly equal."""
    half = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32, torch.float64}
    if not half:
        return model, batch
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype in half]
    floats = {
        id(t): nn.Parameter(t.float(), t.requires_grad) if isinstance(t, nn.Parameter) else t.float() for t in tensors
    }
    whole = copy.deepcopy(model, floats)  # no other copy of what may be large
    return whole, batch.map(lambda value: value.float() if value.dtype in half else value)


def _one_for_each_reader(groups: Sequence[NeuronGroup]) -> list[NeuronGroup]:
    """The largest group that each layer reads: a layer is fitted to one choice of its inputs."""
    largest = {group.reader: group for group in sorted(groups, key=lambda group: group.size)}
    return [group for group in groups if largest[group.reader] is group]


def _inside_heads(
    model: nn.Module, spaces: Spaces, names: Collection[str], batch: Batch
) -> tuple[list[NeuronGroup], dict[str, str]]:
    """The numbers inside attention heads that may go, and why others may not."""
    found: list[NeuronGroup] = []
    reasons: dict[str, str] = {}
    known: set[tuple[str, ...]] = set()
    usual: Tensor | None = None
    for attention in spaces.attentions:
        layers = attention.layers
        if layers in known:  # the same layers, called again
            continue
        known.add(layers)
        where = ", ".join(layers) or "an attention"
        if attention.why_not_values:
            reasons[f"{where}: values"] = attention.why_not_values
        values = value_group(model, attention)
        if values is not None and {*values.layers} <= {*names}:
            if can_rotate(model, values, batch):
                found.append(values)
            else:
                reasons[f"{where}: values"] = "its heads do more than average over them"
        if attention.why_not_scores:
            reasons[f"{where}: queries and keys"] = attention.why_not_scores
        elif {*layers[:2]} <= {*names}:  # queries and keys
            try:
                scores, usual = _scores(model, attention, batch, usual)
                found.append(scores)
            except CrystalliteError as reason:
                reasons[f"{where}: queries and keys"] = str(reason)
    return found, reasons


def _scores(model: nn.Module, attention: Attention, batch: Batch, usual: Tensor | None) -> tuple[NeuronGroup, Tensor]:
    """What queries and keys are compared in, and how its numbers go together; usual: how they did elsewhere."""
    assert attention.queries is not None
    tried = pairings(attention.queries.places.shape[2])
    if usual is not None and len(usual) == len(tried[0]):
        tried.insert(0, usual)
    for place, classes in enumerate(tried):
        group = score_group(model, attention, classes)
        if group is None:
            raise CrystalliteError("they are written by layers of another kind")
        if not place and is_normed(model, group, batch):
            raise CrystalliteError("a norm over each head lies between the layers and the scores")
        if compares_alone(model, group, batch):
            return group, classes
    raise CrystalliteError("a norm or a rotation mixes all numbers of a head")


def _embedded_together(groups: Sequence[NeuronGroup]) -> tuple[NeuronGroup, ...]:
    """A layer keeps its sizes outwards on both sides or on none, and so do all groups that meet in it."""
    found = list(groups)
    while True:
        fixed = {name for group in found if group.embedded for name in group.layers}
        changed = [replace(group, embedded=group.embedded or bool(fixed & {*group.layers})) for group in found]
        if changed == found:
            return tuple(found)
        found = changed


def eliminate(
    regression: Regression | Weighed, sizes: Sequence[int], places: Tensor | None = None
) -> dict[int, tuple[Tensor, Tensor]]:
    """For each size, which neurons that a layer reads to keep, and the best weight that is zero for all others.

    places: (neurons, inputs of each), None: each input is one; inputs that belong to none stay. Backward elimination:
    those go whose removal costs least after all others have been fitted again, tr W_g [M⁻¹]_gg⁻¹ W_gᵀ with metric M.
    O(inputs³).

    >>> from crystallite.statistics.moments import Moments
    >>> x = torch.randn(99, 3); x[:, 2] = x[:, 0]  # what the third says is known already
    >>> both = Moments("a"); both.add(x, x.sum(1, keepdim=True))
    >>> kept, weight = eliminate(Regression.solve(both, both, torch.ones(1, 3), True, 0.01), [2])[2]
    >>> 1 in kept.tolist(), int((weight != 0).sum())
    (True, 2)
    >>> x = torch.randn(99, 6)
    >>> both = Moments("a"); both.add(x, x[:, 1::3].sum(1, keepdim=True))
    >>> own = torch.tensor([[0.0, 1, 0, 0, 1, 0]])
    >>> regression = Regression.solve(both, both, own, True, 0.01)
    >>> eliminate(regression, [1], torch.tensor([[0, 3], [1, 4], [2, 5]]))[1][0].tolist()
    [1]
    """
    inputs, device = len(regression.metric), regression.metric.device
    places = (torch.arange(inputs)[:, None] if places is None else places).to(device)
    found = dict[int, tuple[Tensor, Tensor]]()
    copied = Weighed(regression.weight.clone(), regression.metric.clone())
    for alive, _, others, (weight, columns), _ in _eliminated_(copied, sizes, places):
        whole = torch.zeros_like(regression.weight)
        whole[:, torch.cat([places[alive].flatten(), others])] = weight[:, columns]
        found[len(alive)] = alive, whole
    return found


def elimination_order_(weighed: Weighed, sizes: Sequence[int], places: Tensor) -> tuple[Tensor, dict[int, float]]:
    """The neurons, those that stay longest first, and for each size what the best weight without the others costs.

    See `eliminate`. Weight and metric are overwritten: no other matrix of their size is held.
    """
    places = places.to(weighed.metric.device)
    went, costs, left = [], {}, places
    for alive, gone, *_, cost in _eliminated_(weighed, sizes, places):
        went.append(gone)
        costs[len(alive)], left = cost, alive
    return torch.cat([left, torch.cat(went).flip(0)]).cpu(), costs


def _eliminated_(
    weighed: Weighed, sizes: Sequence[int], places: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], float]]:
    """Neurons that are left, those that have gone since the last size, inputs that are none, the weight and its columns
    for what is left, and what it costs; largest first. The weight changes afterwards; both matrices are overwritten."""
    inputs, device, count = len(weighed.metric), weighed.metric.device, len(places)
    others = torch.ones(inputs, dtype=torch.bool, device=device).index_fill_(0, places.flatten(), False).nonzero()[:, 0]
    weight, inverse, cost = weighed.weight, _inverted_(weighed.metric), 0.0
    alive, at, rest = torch.arange(count, device=device), places, others  # where inputs stand in both matrices
    for size in sorted(set(sizes), reverse=True):
        went = [alive[:0]]
        while len(alive) > size:
            worth = _costs(weight, inverse, at).argsort(stable=True)
            portion = min(max(1, int(count * _PORTION)), len(alive) - size)
            gone, stay = at[worth[:portion]].flatten(), worth[portion:].sort().values
            went.append(alive[worth[:portion]])
            rows, lost = inverse.index_select(0, gone), weight.index_select(1, gone)
            side, back = torch.linalg.solve(rows[:, gone], torch.cat([rows, lost.T], 1)).split(
                [len(inverse), len(lost)], 1
            )
            cost += float((lost * back.T).sum())
            weight.addmm_(lost, side, alpha=-1)
            inverse.addmm_(rows.T, side, alpha=-1)  # what is gone has no part in what is left from here on
            alive, at = alive[stay], at[stay]
            if at.numel() + len(rest) <= _PACKED * len(inverse):
                left = torch.cat([at.flatten(), rest]).sort().values
                weight, inverse = weight.index_select(1, left), _packed_(inverse, left)
                at, rest = torch.searchsorted(left, at), torch.searchsorted(left, rest)
        yield alive, torch.cat(went), others, (weight, torch.cat([at.flatten(), rest])), cost


def _inverted_(metric: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, in its place."""
    columns = metric.mT  # the order in which LAPACK works: else it would work on a copy
    torch.linalg.cholesky(columns, out=columns)
    torch.cholesky_inverse(columns, out=columns)
    return metric


def _packed_(square: Tensor, left: Tensor) -> Tensor:
    """Some rows and columns, ascending, of a matrix that is overwritten: they move to its beginning."""
    count = len(left)
    for start in range(0, count, _MOVED):  # no row is read after it was written: none stands before its place
        rows = square.index_select(0, left[start : start + _MOVED])
        square[start : start + len(rows), :count] = rows.index_select(1, left)
    return square[:count, :count]


def _costs(weight: Tensor, inverse: Tensor, at: Tensor) -> Tensor:
    """What the removal of each neuron adds to the error; at: (neurons, width) where its inputs stand."""
    if at.shape[1] == 1:
        squares = torch.zeros_like(weight[0])
        for rows in weight.split(_SQUARED):
            squares += (rows * rows).sum(0)
        return (squares / inverse.diagonal())[at[:, 0]]
    own = inverse[at[:, :, None], at[:, None]]  # (neurons, width, width)
    parts = weight[:, at].permute(1, 2, 0)  # (neurons, width, outputs)
    return (torch.linalg.solve(own, parts) * parts).sum((1, 2))
