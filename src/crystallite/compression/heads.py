"""Attention heads: what they compare and what they hand on, in fewer numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from crystallite.compression.session import Session
from crystallite.graph.attention import HeadNumbers
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.moments import Moments

__all__ = ["Energy", "order_head_numbers_", "score_worth", "value_rotation"]

_LEAST = 1e-3  # what a number is taken to be worth at least, as a share of the most, so that there is a way back


class Energy(NamedTuple):
    """Mean squares and variances of what a layer writes, (outputs,) each."""

    squares: Tensor
    variances: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, moments: Moments) -> Energy:
        """From the layer's weight (outputs, inputs) and what it reads."""
        variances = ((weight @ moments.covariances[0]) * weight).sum(1)
        mean = weight @ moments.means[0] + (0.0 if bias is None else bias.detach().double())
        return cls((variances + mean**2).cpu(), variances.cpu())


def order_head_numbers_(session: Session, groups: Sequence[NeuronGroup]) -> None:
    """Write the dense model, in place, so that the numbers of each head stand in the order of what they are worth.

    Those that are handed on become the principal components of what the reader makes of the head, and its weights for
    them orthonormal. Those in which queries and keys are compared become such that the products of different ones do
    not depend on each other, as far as positions do not mix them. The model computes the same. Cost: a run of the model
    over the data, O(numbers²) memory for each group. The session notes which layers write other numbers now.
    """
    heads = [group for group in groups if group.inside_heads]
    needed = {name for group in heads for name in (group.readers or group.writers)}
    known: dict[str, Moments] = {}
    carry = session.start()
    for segment, layer_groups in enumerate(session.plan.segments if heads else ()):
        here = {layer_group[0]: [name for name in layer_group if name in needed] for layer_group in layer_groups}
        first = {names[0]: Moments(names[0]) for names in here.values() if names}  # they read the same
        following = []
        for number, (seen, carried) in enumerate(session.seen(session.dense, segment, carry, list(first))):
            following.append(carried)
            for name, one in seen.items():
                if number < len(session.data.fitted):
                    first[name].add(one.inputs, one.inputs[:, :0])
        known |= {name: first[names[0]] for names in here.values() for name in names}
        carry = following
    for group in heads:
        if group.readers:
            weight = matrix_of(session.units[group.reader].module).double()
            rotations = value_rotation(group, weight, known[group.reader].covariances[0])
        elif group.compared[1].places.numel() == group.size:
            rotations = _compared(session, group, known)
        else:
            continue  # rotary positions turn pairs of numbers: others cannot be mixed with them
        rotate_heads_(session.dense, group, *rotations)
        session.mixed.update(group.writers)


def value_rotation(group: NeuronGroup, weight: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices (heads, width, width): what the numbers that each head hands on become, and the way back.

    weight: of the layer that reads them, (outputs, inputs); covariance: of its inputs. Of O L = U S Vᵀ with the
    covariance LLᵀ of a head, the numbers S Vᵀ L⁻¹ c are read by U. Where queries share a head, their covariances are
    averaged, and what the reader makes of each counts.
    """
    places = group.places.view(group.heads, -1, group.width).mT.to(covariance.device)  # (heads, queries, numbers)
    own = covariance[places[..., :, None], places[..., None, :]].mean(1)
    factor = _root(own)
    read = weight[:, places].permute(1, 2, 0, 3).flatten(1, 2)  # (heads, queries · outputs, numbers)
    rooted = read @ factor
    squares, right = (found.flip(-1) for found in torch.linalg.eigh(rooted.mT @ rooted))
    most = squares.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    worth = squares.clamp_min(_LEAST**2 * most).sqrt()[:, :, None]
    forward = worth * torch.linalg.solve_triangular(factor, right.mT, upper=False, left=False)
    return forward, torch.linalg.inv(forward)


def _compared(session: Session, group: NeuronGroup, known: dict[str, Moments]) -> tuple[Tensor, Tensor]:
    """Matrices (heads, width, width): what each head's queries become, and of which keys take the transpose back.

    With E[qqᵀ] = AAᵀ, summed over queries that share a head, the covariance of keys BBᵀ and AᵀB = U S Vᵀ, queries
    become S^{-½} Vᵀ Bᵀ q: products of different numbers are then uncorrelated, and a number is worth its S².
    """
    queries, keys = group.compared
    second = _second_moments(session, queries, known[queries.layer], centred=False).sum(1)
    spread = _second_moments(session, keys, known[keys.layer], centred=True)[:, 0]
    a, b = _root(second), _root(spread)
    left, values, right = torch.linalg.svd(a.mT @ b)
    values = values.clamp_min(_LEAST * values.amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny))
    scale = values.rsqrt()
    return scale[:, :, None] * (right @ b.mT), (a @ left) * scale[:, None, :]


def _second_moments(session: Session, part: HeadNumbers, moments: Moments, centred: bool) -> Tensor:
    """(heads, queries, numbers, numbers) of what a layer writes, around its mean or not."""
    module = session.units[part.layer].module
    weight, covariance = matrix_of(module).double(), moments.covariances[0]
    own = weight[part.places]  # (heads, queries, numbers, inputs)
    found = own @ covariance @ own.mT
    if centred:
        return found
    bias = session.units[part.layer].bias
    mean = own @ moments.means[0] + (0.0 if bias is None else bias.detach().double()[part.places])
    return found + mean[..., :, None] * mean[..., None, :]


def _root(matrices: Tensor) -> Tensor:
    """Lower triangular roots of symmetric matrices, no direction of which is taken for nothing."""
    mean = matrices.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.linalg.cholesky(matrices + _LEAST**2 * mean[..., None, None] * torch.eye(matrices.shape[-1]).to(mean))


def score_worth(group: NeuronGroup, energies: Mapping[str, Energy]) -> Tensor:
    """(neurons,) how much of the scores' variance comes from each number, or pair of numbers, in which they are taken.

    energies: of each output of the layers of queries and keys. Of a pair that positions turn, each number of a query
    meets each of a key half of the time.
    """
    queries, keys = group.compared
    neurons = group.rows[keys.layer][keys.places]  # (heads, 1, numbers)
    asked, offered, count = (torch.zeros(group.size, dtype=torch.float64) for _ in range(3))
    squares, spread = energies[queries.layer].squares[queries.places], energies[keys.layer].variances[keys.places]
    asked.scatter_add_(0, neurons.expand(queries.places.shape).flatten(), squares.flatten())
    offered.scatter_add_(0, neurons.flatten(), spread.flatten())
    count.scatter_add_(0, neurons.flatten(), torch.ones_like(offered[neurons.flatten()]))
    return asked * offered / count
