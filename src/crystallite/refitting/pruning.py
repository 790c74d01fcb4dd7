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
    weight, count = regression.weight.clone(), len(regression.metric)
    root = torch.linalg.cholesky(regression.metric)
    half = torch.linalg.solve_triangular(root, torch.eye(count).to(root), upper=False)
    inverse = half.T @ half
    alive = torch.ones(count, dtype=torch.bool, device=inverse.device)
    left, found = count, dict[int, tuple[Tensor, Tensor]]()
    for size in sorted(set(sizes), reverse=True):
        while left > size:
            cost = ((weight**2).sum(0) / inverse.diagonal()).where(alive, torch.inf)
            gone = cost.argsort(stable=True)[: min(max(1, int(count * _PORTION)), left - size)]
            side = torch.linalg.solve(inverse[gone][:, gone], inverse[gone])  # (gone, inputs)
            weight -= weight[:, gone] @ side
            inverse -= inverse[:, gone] @ side
            alive[gone] = False
            weight[:, ~alive] = 0  # exactly: rounding must not bring them back
            left -= len(gone)
        found[size] = alive.nonzero()[:, 0], weight.clone()
    return found
