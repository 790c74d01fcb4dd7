"""Hidden neurons that can go: which ones, so that the rest can make good for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crystallite.refitting.regression import Regression

__all__ = ["eliminate"]

_PORTION = 1 / 48  # of the neurons that go at once; after each portion all others are fitted again


def eliminate(regression: Regression, sizes: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """For each size, which inputs of a layer to keep, and the best weight that is zero for all others.

    Backward elimination: those inputs go whose removal costs least after all others have been fitted again,
    ‖w_j‖² / [M⁻¹]_jj with M the metric. O(inputs³).

    >>> from crystallite.refitting.regression import Moments
    >>> x = torch.randn(99, 3); x[:, 2] = x[:, 0]  # what the third says is known already
    >>> both = Moments("a"); both.add(x, x.sum(1, keepdim=True))
    >>> kept, weight = eliminate(Regression.solve(both, both, torch.ones(1, 3), True, 0.01), [2])[2]
    >>> 1 in kept.tolist(), int((weight != 0).sum())
    (True, 2)
    """
    weight, count = regression.weight, len(regression.metric)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regression.metric))
    alive = torch.arange(count, device=inverse.device)
    found = dict[int, tuple[Tensor, Tensor]]()
    for size in sorted(set(sizes), reverse=True):
        while len(alive) > size:
            cost = (weight**2).sum(0) / inverse.diagonal()
            order = cost.argsort(stable=True)
            portion = min(max(1, int(count * _PORTION)), len(alive) - size)
            gone, left = order[:portion], order[portion:].sort().values
            side = torch.linalg.solve(inverse[gone][:, gone], inverse[gone][:, left])  # (gone, left)
            weight = weight[:, left] - weight[:, gone] @ side
            inverse = inverse[left][:, left].addmm_(inverse[left][:, gone], side, alpha=-1)
            alive = alive[left]
        whole = torch.zeros_like(regression.weight)
        whole[:, alive] = weight
        found[size] = alive, whole
    return found
