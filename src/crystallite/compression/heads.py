"""Attention heads: what they hand on from the value layer to the output layer, in fewer numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from crystallite.compression.session import Session
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_
from crystallite.statistics.moments import Moments

__all__ = ["order_head_numbers_"]

_LEAST = 1e-3  # what a number is taken to be worth at least, as a share of the most, so that there is a way back


def order_head_numbers_(session: Session, groups: Sequence[NeuronGroup]) -> None:
    """Write the dense model, in place, so that each head hands on numbers in the order of what they are worth.

    They become the principal components of what the reader makes of the head, and its weights for them orthonormal.
    The model computes the same. Cost: a run of the model over the data, O(numbers²) memory for each group.
    """
    readers = {group.reader: group for group in groups if group.heads}
    carry = session.start()
    for segment, layer_groups in enumerate(session.plan.segments if readers else ()):
        here = [name for layer_group in layer_groups for name in layer_group if name in readers]
        moments = {name: Moments(name) for name in here}
        following = []
        for number, (seen, carried) in enumerate(session.seen(session.dense, segment, carry, here)):
            following.append(carried)
            for name, one in seen.items():
                if number < len(session.data.fitted):
                    moments[name].add(one.inputs, one.inputs[:, :0])
        for name in here:
            covariance = moments[name].covariances[0]
            rotations = _worth_first(session.units[name].matrix, covariance, readers[name].heads)
            rotate_heads_(session.dense, readers[name], *rotations)
        carry = following


def _worth_first(weight: Tensor, covariance: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Matrices (heads, width, width): what each head's numbers become, and the way back.

    Of O L = U S Vᵀ with the covariance LLᵀ, the numbers S Vᵀ L⁻¹ c are read by U.
    """
    width = len(covariance) // heads
    places = torch.arange(len(covariance), device=covariance.device).view(heads, width)
    own = covariance[places[:, :, None], places[:, None, :]]
    mean = own.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)
    own = own + _LEAST**2 * mean[:, None, None] * torch.eye(width).to(own)
    output_factor = torch.linalg.cholesky(own)
    rooted = weight.double()[:, places].movedim(1, 0) @ output_factor  # (heads, outputs, width)
    squares, right = (found.flip(-1) for found in torch.linalg.eigh(rooted.mT @ rooted))
    most = squares.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    worth = squares.clamp_min(_LEAST**2 * most).sqrt()[:, :, None]
    forward = worth * torch.linalg.solve_triangular(output_factor, right.mT, upper=False, left=False)
    return forward, torch.linalg.inv(forward)
