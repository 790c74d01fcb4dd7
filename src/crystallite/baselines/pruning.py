"""Pruning by a score: neurons whose weights are small, or small beside what they multiply (Wanda)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from crystallite.baselines.layers import largest
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.graph.neuron_groups import NeuronGroup, find_neuron_groups, without
from crystallite.graph.trials import can_remove

__all__ = ["find_removable", "pruned", "scores"]


def find_removable(model: nn.Module, names: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The neurons, channels and attention heads between some layers that can go, whatever the model takes and returns.

    Groups that overlap, as the heads of grouped queries do, are tried together. Raises `Untraceable` where the model's
    graph cannot be had.

    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> find_removable(net, {"0", "2"}, Batch(0, 2, (torch.ones(2, 2),)))
    [NeuronGroup(size=8, writers=('0',), readers=('2',), heads=0, width=1, passed=(), embedded=False)]
    """
    found: list[NeuronGroup] = []
    for group in find_neuron_groups(model, names, batch):
        if not group.inside_heads and can_remove(model, [*found, group], batch):
            found.append(group)
    return found


def pruned(
    model: nn.Module, groups: Sequence[NeuronGroup], batch: Batch, limit: int, norms: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The model without the neurons of least score, the same share of every group; other weights stay as they are.

    - `limit`: multiply-adds for the batch that may be left.
    - `norms`: of the layers' inputs, for Wanda's score instead of the magnitude.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> pruned(net, [NeuronGroup.between(net, ["0"], "2")], Batch(0, 1, (torch.zeros(1, 4),)), 32)[0]
    Linear(in_features=4, out_features=4, bias=True)
    """
    if not groups:
        raise InvalidOption("no hidden neurons, channels or heads were found that can be taken out")
    ranked = [scores(model, group, norms).argsort(descending=True, stable=True) for group in groups]

    def made(share: float) -> nn.Module:
        return without(
            model,
            [(group, order[: max(1, round(share * group.size))]) for group, order in zip(groups, ranked, strict=True)],
        )

    return largest(made, batch, limit)


@torch.no_grad()
def scores(model: nn.Module, group: NeuronGroup, norms: Mapping[str, Tensor] | None = None) -> Tensor:
    """(neurons,) the squared norm of a neuron's weights, in and out, each times the norm of its input if given.

    >>> net = nn.Sequential(nn.Linear(1, 2, False), nn.ReLU(), nn.Linear(2, 1, False))
    >>> for layer, weight in ((net[0], [[1.0], [2.0]]), (net[2], [[3.0, 0.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight))
    >>> scores(net, NeuronGroup.between(net, ["0"], "2")).tolist()
    [10.0, 4.0]
    """
    total = torch.zeros(group.size, dtype=torch.float64)
    for (name, axis), labels in group.carried.items():
        weight = model.get_parameter(name).detach() if name.endswith(".weight") else None
        if weight is None or weight.ndim < 2:  # biases and batch norms
            continue
        owner = name.removesuffix(".weight")
        if norms is not None and owner in norms:
            weight = weight * norms[owner].to(weight).view(1, -1, *[1] * (weight.ndim - 2))
        each = weight.double().square().transpose(0, axis).flatten(1).sum(1).cpu()  # (indices along the axis,)
        mine = labels >= 0
        total.index_add_(0, labels[mine], each[mine])
    return total
