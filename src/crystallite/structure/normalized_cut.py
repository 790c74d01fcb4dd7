"""Normalised cuts of weights: how far neurons fall into k modules that share little weight, exact blocks or not.

|w| of one layer or of several are the edges of a graph whose nodes are neurons. Of k modules V_b,
Ncut = Σ_b cut(V_b) / vol(V_b) lies between 0, for exact blocks, and about k − 1, for modules at random. So
1 − Ncut / (k − 1) says how modular a partition is, whatever k: 1 for exact blocks, about 0 for a random one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

__all__ = ["WeightGraph", "best_partitions"]

_WIDTH, _DEPTH = 8, 4  # of the Krylov space that eigenvectors are taken from: so many reads of the weights
_TURNS = 4  # of the neurons' choice between modules; later ones change little


@dataclass(frozen=True, eq=False)
class WeightGraph:
    """Groups of neurons, and magnitudes of weights between them; several graphs of the same sizes at once.

    An edge is (weights, rows, columns): a non-negative float32 array (graphs, rows, columns) and the groups of its rows
    and columns, which are one group for feedback. Groups that several edges name are shared.
    """

    sizes: tuple[int, ...]
    edges: tuple[tuple[np.ndarray, int, int], ...]

    @cached_property
    def bounds(self) -> np.ndarray:
        """Where the neurons of each group begin among all of them, and where the last ones end."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def degrees(self) -> np.ndarray:
        """(graphs, neurons) sum of the weights at each."""
        found = np.zeros((len(self.edges[0][0]), self.bounds[-1]))
        for weights, rows, cols in self.edges:
            found[:, self.neurons(rows)] += weights.sum(2, dtype=np.float64)
            found[:, self.neurons(cols)] += weights.sum(1, dtype=np.float64)
        return found

    def neurons(self, group: int) -> slice:
        return slice(self.bounds[group], self.bounds[group + 1])

    def times_into(self, group: int, x: np.ndarray) -> np.ndarray:
        """x S for the neurons of one group, S the symmetric matrices of all weights, x (graphs, …, neurons)."""
        result = np.zeros((*x.shape[:2], self.sizes[group]), np.float32)
        for weights, rows, cols in self.edges:
            if rows == group:
                result += x[:, :, self.neurons(cols)] @ weights.swapaxes(1, 2)
            if cols == group:
                result += x[:, :, self.neurons(rows)] @ weights
        return result

    def times(self, x: np.ndarray) -> np.ndarray:
        """x S: one read of the weights."""
        return np.concatenate([self.times_into(group, x) for group in range(len(self.sizes))], 2)


def best_partitions(graph: WeightGraph, ks: Sequence[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The score 1 − Ncut / (k − 1) of the best partition found, (graphs, ks), and the labels (graphs, ks, neurons).

    Spectral: the leading eigenvectors of D^(−½) S D^(−½) from a Krylov space, rounded to k modules; then neurons choose
    by turns, group by group, the module that has most of their weight for its size. The best partition on the way
    counts. About 20 reads of the weights for all k together.

    >>> w = np.kron(np.eye(2), np.ones((3, 4)))[None].astype(np.float32)
    >>> scores, labels = best_partitions(WeightGraph((6, 8), ((w, 0, 1),)), [2], np.random.default_rng(0))
    >>> round(float(scores[0, 0]), 6), len({*labels[0, 0, :3]}), len({*labels[0, 0, 3:6]})
    (1.0, 1, 1)
    """
    vectors = _leading_vectors(graph, max(ks), rng)
    labels = np.stack([_rounded(vectors[:, :k]) for k in ks], 1)
    best, scores = labels.copy(), _scores(graph, ks, labels)
    for _ in range(_TURNS):
        for group in range(len(graph.sizes)):
            found = graph.times_into(group, _one_hot(ks, labels))  # (graphs, modules of all k, neurons of the group)
            totals = found.sum(2, keepdims=True)
            found /= np.where(totals > 0, totals, 1)
            for i, part in enumerate(_columns(ks)):
                labels[:, i, graph.neurons(group)] = _largest(found[:, part])
        now = _scores(graph, ks, labels)
        better = now > scores + 1e-6
        if not better.any():
            break
        best[better], scores[better] = labels[better], now[better]
    return scores, best


def _score(inside: np.ndarray, volumes: np.ndarray) -> np.ndarray:
    """1 − (k − Σ inside / volume) / (k − 1) along the last axis; a module without weight is all cut."""
    kept = (inside / np.where(volumes > 0, volumes, np.inf)).sum(-1)
    return np.asarray((kept - 1) / (inside.shape[-1] - 1))


def _scores(graph: WeightGraph, ks: Sequence[int], labels: np.ndarray) -> np.ndarray:
    """(graphs, ks)"""
    members = _one_hot(ks, labels)
    inside = np.zeros(members.shape[:2])
    for weights, rows, cols in graph.edges:
        shared = members[:, :, graph.neurons(rows)] @ weights
        inside += 2 * np.einsum("gbn,gbn->gb", shared, members[:, :, graph.neurons(cols)])  # S has each edge twice
    volumes = (members @ graph.degrees[:, :, None].astype(np.float32))[:, :, 0]
    return np.stack([_score(inside[:, part], volumes[:, part]) for part in _columns(ks)], 1)


def _columns(ks: Sequence[int]) -> list[slice]:
    """Where the modules of each k stand among those of all."""
    return [slice(end - k, end) for k, end in zip(ks, np.cumsum(ks), strict=True)]


def _one_hot(ks: Sequence[int], labels: np.ndarray) -> np.ndarray:
    """(graphs, Σ k, neurons) which module of each partition a neuron is in."""
    result = np.empty((len(labels), sum(ks), labels.shape[2]), np.float32)
    for i, part in enumerate(_columns(ks)):
        for module in range(part.stop - part.start):
            result[:, part.start + module] = labels[:, i] == module
    return result


def _largest(values: np.ndarray) -> np.ndarray:
    """argmax along the middle axis, which is short: NumPy's would take it one by one."""
    best, result = values[:, 0], np.zeros((len(values), values.shape[2]), np.int8)
    for i in range(1, values.shape[1]):
        result[values[:, i] > best] = i
        best = np.maximum(best, values[:, i])
    return result


def _leading_vectors(graph: WeightGraph, count: int, rng: np.random.Generator) -> np.ndarray:
    """(graphs, count, neurons) eigenvectors of D^(−½) S D^(−½) to its largest eigenvalues, the known first one too."""
    degrees = graph.degrees[:, None]
    inverse = np.where(degrees > 0, 1 / np.sqrt(np.where(degrees > 0, degrees, 1)), 0).astype(np.float32)
    basis = first = np.sqrt(degrees / degrees.sum(2, keepdims=True)).astype(np.float32)
    graphs, _, neurons = degrees.shape
    block = rng.standard_normal((graphs, min(_WIDTH, max(1, neurons // _DEPTH - 1)), neurons)).astype(np.float32)
    images = []
    for _ in range(_DEPTH):
        for _ in range(2):  # once loses digits
            block = block - (block @ basis.swapaxes(1, 2)) @ basis
        block = np.linalg.qr(block.swapaxes(1, 2))[0].swapaxes(1, 2)
        basis = np.concatenate([basis, block], 1)
        block = inverse * graph.times(inverse * block)
        images.append(block)
    space = basis[:, 1:]
    projected = space @ np.concatenate(images, 1).swapaxes(1, 2)
    _, turned = np.linalg.eigh(projected + projected.swapaxes(1, 2))  # ascending
    return np.concatenate([first, turned[:, :, :-count:-1].swapaxes(1, 2) @ space], 1)


def _rounded(vectors: np.ndarray) -> np.ndarray:
    """(graphs, neurons) k modules from the k leading vectors, without a random start (Damle, Minden and Ying 2019).

    The directions of neurons bundle around k orthogonal ones. Pivoting finds a member of each bundle, and the
    orthogonal matrix next to these members turns the bundles to the axes.
    """
    lengths = np.sqrt((vectors**2).sum(1, keepdims=True))
    points = vectors / np.where(lengths > 0, lengths, 1)
    rest, chosen, graphs = points, [], np.arange(len(points))
    for _ in range(points.shape[1]):
        sizes = (rest**2).sum(1)
        pivot = np.argmax(sizes, 1)
        chosen.append(points[graphs, :, pivot])
        direction = rest[graphs, :, pivot] / np.sqrt(np.maximum(sizes[graphs, pivot], 1e-12))[:, None]
        rest = rest - direction[:, :, None] * (direction[:, None] @ rest)
    u, _, v = np.linalg.svd(np.stack(chosen, 2))  # (graphs, coordinates, bundles)
    return _largest(np.abs((u @ v).swapaxes(1, 2) @ points))
