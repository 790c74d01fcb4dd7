"""Channels that can go: inputs of a layer that belong together, and what stands around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.refitting.pruning import eliminate
from crystallite.refitting.regression import Regression

__all__ = ["eliminate_groups", "smaller_norm"]

_PORTION = 1 / 48  # of the groups that go at once; after each portion all others are fitted again


def eliminate_groups(regression: Regression, width: int, sizes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """As `eliminate`, where `width` inputs after each other stay or go together; sizes count such groups.

    For each size: which inputs to keep, and the best weight that is zero for all others. A group costs
    tr W_g [M⁻¹]_gg⁻¹ W_gᵀ, with M the metric: what its removal adds to the error after all others have been fitted
    again. O(inputs³).

    >>> from crystallite.refitting.regression import Moments
    >>> x = torch.randn(99, 6)
    >>> both = Moments("a"); both.add(x, x[:, 2:4].sum(1, keepdim=True))
    >>> own = torch.tensor([[0.0, 0, 1, 1, 0, 0]])
    >>> kept, _ = eliminate_groups(Regression.solve(both, both, own, True, 0.01), 2, [1])[1]
    >>> kept.tolist()
    [2, 3]
    """
    if width == 1:
        return eliminate(regression, sizes)
    weight, count = regression.weight, len(regression.metric) // width
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regression.metric))
    alive = torch.arange(count * width, device=inverse.device)
    found = dict[int, tuple[Tensor, Tensor]]()
    for size in sorted(set(sizes), reverse=True):
        while len(alive) > size * width:
            groups = len(alive) // width
            own = inverse.view(groups, width, groups, width).diagonal(dim1=0, dim2=2).movedim(2, 0)  # (groups, w, w)
            parts = weight.view(len(weight), groups, width).permute(1, 2, 0)  # (groups, width, outputs)
            cost = (torch.linalg.solve(own, parts) * parts).sum((1, 2))
            portion = min(max(1, int(count * _PORTION)), groups - size)
            order = cost.argsort(stable=True)
            places = torch.arange(width, device=order.device)
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


def smaller_norm(norm: Any, kept: Tensor) -> nn.Module:
    """A batch norm of some of the channels."""
    found = type(norm)(len(kept), norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name, value in norm.state_dict().items():
        getattr(found, name).data = value[kept.to(value.device)].clone() if value.ndim else value.clone()
    return found
