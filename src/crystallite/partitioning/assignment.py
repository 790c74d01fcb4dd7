"""Hidden neurons and outputs shared out to the blocks whose inputs explain most of their variance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.data.positions import real_positions
from crystallite.graph.chains import Chain
from crystallite.partitioning.partition import Partition
from crystallite.partitioning.weights import owner
from crystallite.statistics.moments import Moments
from crystallite.statistics.watching import watching

__all__ = ["assign_by_explained_variance", "balanced_assignment", "explained_variance"]

_RIDGE = 0.01  # of the mean of the Gram matrix's diagonal
_TINY = torch.finfo(torch.float32).tiny
_LARGEST_EXACT = 4096  # elements: the best assignment takes their number squared of memory, and cubed of time


def assign_by_explained_variance(partition: Partition, model: nn.Module, batches: Sequence[Batch]) -> Partition:
    """The same inputs for every block, but hidden neurons and outputs where most of their variance is explained.

    In chains of linear layers, from the first to the last: how much of what the dense layer writes the inputs of
    each block explain, by linear regression. Hidden neurons are weighed by what their readers make of them. Blocks
    are of equal size (±1). Other chains stay as they are.

    Cost: a run of the model, a Gram matrix for each layer.

    >>> from crystallite.graph.chains import find_chains
    >>> net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.copy_(torch.eye(4))
    >>> random = Partition(2, find_chains(net), ({"in": np.array([0, 1, 0, 1]), "hidden 1": np.array([1, 1, 0, 0]),
    ...                                           "out": np.array([0, 1])},))
    >>> assign_by_explained_variance(random, net, [Batch(0, 64, (torch.randn(64, 4),))]).labels[0]["hidden 1"].tolist()
    [0, 1, 0, 1]
    """
    linear = [chain for chain in partition.chains if _is_linear(chain, model)]
    seen = _moments(model, [name for chain in linear for name in chain.layers], batches)
    labels = tuple(
        _assigned(chain, own, model, seen, partition.blocks) if chain in linear else own
        for chain, own in zip(partition.chains, partition.labels, strict=True)
    )
    return Partition(partition.blocks, partition.chains, labels)


def _is_linear(chain: Chain, model: nn.Module) -> bool:
    return all(isinstance(model.get_submodule(owner(name)[0]), nn.Linear) for name in chain.layers)


@torch.no_grad()
def _moments(model: nn.Module, names: Sequence[str], batches: Sequence[Batch]) -> dict[str, Moments]:
    """Of what each layer reads and writes, without padding."""
    found = {name: Moments(name) for name in names}
    for batch in batches if names else ():
        with watching(model, names) as calls:
            batch.call(model)
        for name, call in ((name, call) for name, own in calls.items() for call in own):
            real = real_positions(batch, call.output.shape[:-1])
            found[name].add(*(value.flatten(0, -2)[real].double() for value in (call.inputs[0], call.output)))
    return found


def _assigned(
    chain: Chain, labels: Mapping[str, np.ndarray], model: nn.Module, seen: Mapping[str, Moments], blocks: int
) -> Mapping[str, np.ndarray]:
    found = {group: own for group, own in labels.items() if group not in chain.writes.values()}
    for group in dict.fromkeys(chain.writes[name] for name in chain.layers):
        worth, size = _worth(chain, group, model, seen), chain.sizes[group]
        explained = []
        for name in chain.layers:
            if chain.writes[name] == group and chain.reads[name] in found:  # what is added later has followed the rest
                own, cross, variance = seen[name].covariances
                value = explained_variance(own, cross, found[chain.reads[name]][chain.read(name)], blocks)
                written = torch.from_numpy(chain.written(name)).to(value.device)
                if worth is not None:
                    value = value * (worth[written] / variance.clamp_min(_TINY))[:, None]
                explained.append(value.new_zeros(size, blocks).index_add_(0, written, value))
        found[group] = balanced_assignment(sum(explained[1:], explained[0]).cpu().numpy(), blocks)
    return found


def _worth(chain: Chain, group: str, model: nn.Module, seen: Mapping[str, Moments]) -> Tensor | None:
    """(neurons,) how much of what their readers write is theirs; None without readers."""
    parts = []
    for name in chain.layers:
        if chain.reads[name] == group:
            squares = model.get_parameter(f"{name}.weight").detach().double().square().sum(0)
            part = squares * seen[name].covariances[0].diagonal()
            read = torch.from_numpy(chain.read(name)).to(part.device)
            parts.append(part.new_zeros(chain.sizes[group]).index_add_(0, read, part))
    return sum(parts[1:], parts[0]) if parts else None


def explained_variance(own: Tensor, cross: Tensor, labels: np.ndarray, blocks: int) -> Tensor:
    """(outputs, blocks) how much of the variance of each output the inputs of each block explain.

    own: (inputs, inputs) covariances of the inputs; cross: (inputs, outputs).
    """
    own = own + _RIDGE * own.diagonal().mean().clamp_min(_TINY) * torch.eye(len(own)).to(own)
    explained = []
    for block in range(blocks):
        inputs = torch.from_numpy(np.flatnonzero(labels == block)).to(own.device)
        root = torch.linalg.cholesky(own[inputs][:, inputs])
        explained.append(torch.linalg.solve_triangular(root, cross[inputs], upper=False).square().sum(0))
    return torch.stack(explained, 1)


def balanced_assignment(value: np.ndarray, blocks: int) -> np.ndarray:
    """A block for each element (elements, blocks), all of equal size (±1), so that the sum of the values is largest.

    Of more than 4,096 elements, those that would lose most elsewhere choose first, which is nearly as good.

    >>> balanced_assignment(np.array([[3.0, 2.0], [9.0, 1.0], [5.0, 4.5], [1.0, 1.0]]), 2).tolist()
    [0, 0, 1, 1]
    """
    elements = len(value)
    rooms = np.arange(elements) % blocks
    chosen = np.empty(elements, np.intp)
    if elements <= _LARGEST_EXACT:
        rows, places = linear_sum_assignment(-value[:, rooms])
        chosen[rows] = rooms[places]
        return chosen
    room, best = np.bincount(rooms, minlength=blocks), np.sort(value, 1)
    for element in np.argsort(best[:, -2] - best[:, -1], kind="stable"):
        chosen[element] = int(np.argmax(np.where(room > 0, value[element], -np.inf)))
        room[chosen[element]] -= 1
    return chosen
