"""Pruning by a score: neurons whose weights are small, or small beside what they multiply (Wanda)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from crystallite.baselines.groups import Group, without
from crystallite.baselines.layers import largest
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch

__all__ = ["pruned", "scores"]


def pruned(
    model: nn.Module, groups: Sequence[Group], batch: Batch, limit: int, norms: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """The model without the neurons of least score, the same share of every group; other weights stay as they are.

    - `limit`: multiply-adds for the batch that may be left.
    - `norms`: of the layers' inputs, for Wanda's score instead of the magnitude.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> pruned(net, [Group.between(net, ["0"], "2")], Batch(0, 1, (torch.zeros(1, 4),)), 32)[0]
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
def scores(model: nn.Module, group: Group, norms: Mapping[str, Tensor] | None = None) -> Tensor:
    """(neurons,) the squared norm of a neuron's weights, in and out, each times the norm of its input if given.

    >>> net = nn.Sequential(nn.Linear(1, 2, False), nn.ReLU(), nn.Linear(2, 1, False))
    >>> for layer, weight in ((net[0], [[1.0], [2.0]]), (net[2], [[3.0, 0.0]])):
    ...     _ = layer.weight.data.copy_(torch.tensor(weight))
    >>> scores(net, Group.between(net, ["0"], "2")).tolist()
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
