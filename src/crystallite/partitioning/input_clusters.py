"""Inputs shared out to blocks by regions: those that vary together stay together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.linalg import eigh
from torch import Tensor

from crystallite.graph.chains import Chain
from crystallite.partitioning.partition import Partition, random_partition

__all__ = ["cluster_partition"]

_NEIGHBOURS = 8  # of each input: near ones say where it lies, far ones only what kinds of samples there are
_UNBALANCED = 0.1  # of the weight of a region, by which a cut may miss its place
_BRIDGE = 1e-6  # of a perfect correlation's square, between any two inputs, so that no input stands alone


def cluster_partition(chains: Sequence[Chain], blocks: int, samples: Mapping[str, Tensor], seed: int = 0) -> Partition:
    """As `random_partition`, but inputs that say nearly the same go to the same block.

    So every block sees a region of its own, of an image a patch, and knows it well. That is best where a layer that is
    not separated reads all blocks. The graph that joins each input with the eight it correlates most with is cut in
    two along its Fiedler vector, where that severs least, and so are the parts. Regions have about equal sums of
    standard deviations; inputs that never change fill up the smaller ones. Where no input says anything of another, any
    partition is as good.

    samples: (samples, features) that the first layer of each chain reads, by its name. O(features³) for each.

    >>> import torch
    >>> from torch import nn
    >>> from crystallite.separation import find_chains
    >>> chains = find_chains(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> said = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])  # each of the two by three inputs
    >>> labels = cluster_partition(chains, 2, {"0": said.repeat(1, 3)}).labels[0]["in"].tolist()
    >>> labels in ([0, 1] * 3, [1, 0] * 3)
    True
    """
    random, found = random_partition(chains, blocks, seed), []
    for chain, labels in zip(random.chains, random.labels, strict=True):
        first = chain.layers[0]
        own = chain.reads[first]
        read = samples[first].detach().cpu().double().numpy()
        found.append({**labels, own: _regions(read - read.mean(0), labels[own], blocks)})
    return Partition(blocks, random.chains, tuple(found))


def _regions(read: np.ndarray, otherwise: np.ndarray, blocks: int) -> np.ndarray:
    deviation = np.sqrt(np.square(read).mean(0))
    live = np.flatnonzero(deviation > 1e-9 * deviation.max(initial=0))  # rounding is no change
    if len(live) < blocks:
        return otherwise
    standard = read[:, live] / deviation[live]
    alike = np.square(standard.T @ standard / len(read))
    np.fill_diagonal(alike, 0)
    labels = np.full(read.shape[1], -1)
    weight = deviation[live] / deviation[live].mean() + 1  # half by what they say, half by what they cost
    labels[live] = _cut(_nearest(alike), weight, blocks)
    sizes = np.bincount(labels[live], minlength=blocks)
    for i in np.flatnonzero(labels < 0):
        labels[i] = int(np.argmin(sizes))
        sizes[labels[i]] += 1
    return labels


def _nearest(alike: np.ndarray) -> np.ndarray:
    """What each element has in common with those most like it; between all others next to nothing."""
    if len(alike) > _NEIGHBOURS:
        near = alike >= np.partition(alike, -_NEIGHBOURS, axis=1)[:, -_NEIGHBOURS, None]
        alike = np.where(near | near.T, alike, 0)
    return alike + _BRIDGE


def _cut(alike: np.ndarray, weight: np.ndarray, parts: int) -> np.ndarray:
    """Labels 0 … parts − 1 for the elements of a graph, with about equal sums of weights, by repeated cuts in two."""
    labels = np.zeros(len(alike), int)
    if parts == 1:
        return labels
    first = parts // 2
    degree = np.sqrt(alike.sum(1))
    last = len(alike) - 1
    vector = eigh(alike / np.outer(degree, degree), subset_by_index=[last - 1, last - 1])[1][:, 0] / degree
    order = np.argsort(vector * np.sign(vector[np.argmax(np.abs(vector))]), kind="stable")
    place = _place(alike[np.ix_(order, order)], weight[order], first, parts)
    for own, count, start in ((order[:place], first, 0), (order[place:], parts - first, first)):
        labels[own] = start + _cut(alike[np.ix_(own, own)], weight[own], count)
    return labels


def _place(alike: np.ndarray, weight: np.ndarray, first: int, parts: int) -> int:
    """How many elements of a row come before the cut: that of the well-balanced cuts which severs least."""
    severed = np.cumsum(alike.sum(1) - 2 * np.tril(alike).sum(1))  # by a cut after each element; the diagonal is small
    reached = np.cumsum(weight) / weight.sum()
    away = np.abs(reached - first / parts)
    away[: first - 1] = away[len(away) - (parts - first) :] = np.inf  # every part needs elements
    balanced_assignment = np.flatnonzero(away <= max(_UNBALANCED / parts, float(away.min())))
    return 1 + int(balanced_assignment[np.argmin(severed[balanced_assignment])])
