"""Neurons that can go: in which groups, and which ones, so that the rest can make good for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.graph.experts import expert_groups
from crystallite.graph.neuron_groups import NeuronGroup, find_neuron_groups
from crystallite.graph.trace import Untraceable
from crystallite.graph.trials import acts_alone, can_rotate
from crystallite.models.record import OUTSIDE_EXPERTS
from crystallite.statistics.regression import Regression

__all__ = ["eliminate", "find_prunable", "find_prunable_with_experts"]

_PORTION = 1 / 48  # of the neurons that go at once; after each portion all others are fitted again


def find_prunable(model: nn.Module, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The neurons between some layers that each act on their own on one reader, which can then be fitted without them.

    The numbers that attention heads hand on from a value layer to an output layer are such neurons once they have been
    rotated. Raises `Untraceable` where the model's graph cannot be had.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> [group.layers for group in find_prunable(net, {"0", "2", "4"}, Batch(0, 9, (torch.randn(9, 2),)))]
    [('0', '2')]
    """
    groups = find_neuron_groups(model, names, batch)
    single = [group for group in groups if group.is_aligned and len(group.readers) == 1]
    return [g for g in single if (can_rotate if g.inside_heads else acts_alone)(model, g, batch)]


def find_prunable_with_experts(
    model: nn.Module, names: Collection[str], routed: Collection[str], batch: Batch
) -> tuple[list[NeuronGroup], str]:
    """The same and the neurons of experts, which no graph of the whole model is needed for; and why it was not had.

    routed: layers of experts in lists.
    """
    experts = expert_groups(model, names, routed, batch)
    others = {*names} - {name for group in experts for name in group.layers}
    try:
        return [*experts, *find_prunable(model, others, batch.first(2))], ""
    except Untraceable as error:
        return experts, f"{OUTSIDE_EXPERTS * bool(experts)}{error}"


def eliminate(regression: Regression, sizes: Sequence[int], width: int = 1) -> dict[int, tuple[Tensor, Tensor]]:
    """For each size, which inputs of a layer to keep, and the best weight that is zero for all others.

    width: inputs after each other that stay or go together, as the places of a channel; sizes count such groups.
    Backward elimination: those groups go whose removal costs least after all others have been fitted again,
    tr W_g [M⁻¹]_gg⁻¹ W_gᵀ with M the metric. O(inputs³).

    >>> from crystallite.statistics.moments import Moments
    >>> x = torch.randn(99, 3); x[:, 2] = x[:, 0]  # what the third says is known already
    >>> both = Moments("a"); both.add(x, x.sum(1, keepdim=True))
    >>> kept, weight = eliminate(Regression.solve(both, both, torch.ones(1, 3), True, 0.01), [2])[2]
    >>> 1 in kept.tolist(), int((weight != 0).sum())
    (True, 2)
    >>> x = torch.randn(99, 6)
    >>> both = Moments("a"); both.add(x, x[:, 2:4].sum(1, keepdim=True))
    >>> own = torch.tensor([[0.0, 0, 1, 1, 0, 0]])
    >>> eliminate(Regression.solve(both, both, own, True, 0.01), [1], width=2)[1][0].tolist()
    [2, 3]
    """
    weight, count = regression.weight, len(regression.metric) // width
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regression.metric))
    alive = torch.arange(count * width, device=inverse.device)
    places = torch.arange(width, device=inverse.device)
    found = dict[int, tuple[Tensor, Tensor]]()
    for size in sorted(set(sizes), reverse=True):
        while len(alive) > size * width:
            order = _costs(weight, inverse, width).argsort(stable=True)
            portion = min(max(1, int(count * _PORTION)), len(order) - size)
            gone, left = (
                (some[:, None] * width + places).flatten() for some in (order[:portion], order[portion:].sort().values)
            )
            side = torch.linalg.solve(inverse[gone][:, gone], inverse[gone][:, left])  # (gone, left)
            weight = weight[:, left] - weight[:, gone] @ side
            inverse = inverse[left][:, left].addmm_(inverse[left][:, gone], side, alpha=-1)
            alive = alive[left]
        whole = torch.zeros_like(regression.weight)
        whole[:, alive] = weight
        found[size] = alive, whole
    return found


def _costs(weight: Tensor, inverse: Tensor, width: int) -> Tensor:
    """What the removal of each group adds to the error."""
    if width == 1:
        return (weight**2).sum(0) / inverse.diagonal()
    groups = weight.shape[1] // width
    own = inverse.view(groups, width, groups, width).diagonal(dim1=0, dim2=2).movedim(2, 0)  # (groups, width, width)
    parts = weight.view(len(weight), groups, width).permute(1, 2, 0)  # (groups, width, outputs)
    return (torch.linalg.solve(own, parts) * parts).sum((1, 2))
