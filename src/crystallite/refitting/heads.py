"""Attention heads: what they hand on from the value layer to the output layer, in fewer numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crystallite.refitting.groups import Hidden, turn_
from crystallite.refitting.regression import Moments
from crystallite.refitting.session import Session

__all__ = ["turn_heads_"]

_LEAST = 1e-3  # what a number is taken to be worth at least, as a share of the most, so that there is a way back


def turn_heads_(session: Session, groups: Sequence[Hidden]) -> None:
    """Write the dense model, in place, so that each head hands on numbers in the order of what they are worth.

    They become the principal components of what the reader makes of the head, and its weights for them orthonormal.
    The model computes the same. Cost: a run of the model over the data, O(numbers²) memory for each group.
    """
    readers = {group.reader: group for group in groups if group.heads}
    handed = session.start()
    for stretch, stages in enumerate(session.itinerary.stretches if readers else ()):
        here = [name for stage in stages for name in stage if name in readers]
        moments = {name: Moments(name) for name in here}
        following = []
        for number, (seen, returned) in enumerate(session.seen(session.dense, stretch, handed, here)):
            following.append(returned)
            for name, one in seen.items():
                if number < len(session.data.fitted):
                    moments[name].add(one.inputs, one.inputs[:, :0])
        for name in here:
            covariance = moments[name].around(*moments[name].means)[0] / moments[name].samples
            turns = _worth_first(session.units[name].matrix, covariance, readers[name].heads)
            turn_(session.dense, readers[name], *turns)
        handed = following


def _worth_first(weight: Tensor, covariance: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Matrices (heads, width, width): what each head's numbers become, and the way back.

    Of O L = U S Vᵀ with the covariance LLᵀ, the numbers S Vᵀ L⁻¹ c are read by U.
    """
    width = len(covariance) // heads
    places = torch.arange(len(covariance), device=covariance.device).view(heads, width)
    own = covariance[places[:, :, None], places[:, None, :]]
    mean = own.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)
    own = own + _LEAST**2 * mean[:, None, None] * torch.eye(width).to(own)
    root = torch.linalg.cholesky(own)
    rooted = weight.double()[:, places].movedim(1, 0) @ root  # (heads, outputs, width)
    squares, right = (found.flip(-1) for found in torch.linalg.eigh(rooted.mT @ rooted))
    most = squares.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    worth = squares.clamp_min(_LEAST**2 * most).sqrt()[:, :, None]
    forth = worth * torch.linalg.solve_triangular(root, right.mT, upper=False, left=False)
    return forth, torch.linalg.inv(forth)
