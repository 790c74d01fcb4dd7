"""What the modularity of weights is compared with: copies without modules, searched in the same way.

| control | what it keeps | what it answers |
|---|---|---|
| "norms" | each row's and column's sum of |w|, and how far entries scatter about what these predict | the primary one |
| "shuffled" | the entries, in random places | whether it is modular or only has heavy rows and columns |
| "null" | nothing: drawn from the null, an initialisation or the bulk | the same network before training |

A heavy row alone raises the noise of all cuts, so a matrix of heavy and light rows beats its shuffled copies without
any module. Only copies with the same rows and columns tell the difference: these decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from crystallite.annealing.distributions import Null
from crystallite.structure.normalized_cut import WeightGraph, best_partitions

__all__ = ["PRIMARY", "Control", "Sampled", "Search", "compared", "searched", "without_extremes"]

PRIMARY = "norms"
_FOR_HUBS = 5  # copies that hubs are taken out of, too
_AT_ONCE = 1 << 24  # bytes of copies that are searched together
_ORDINARY = 0.999  # share of the entries; the others count as much as the largest of these


@dataclass(frozen=True)
class Control:
    """How weights compare with copies of one kind, all searched over the same k."""

    copies: int
    percentile: float  # of the weights among the copies, in percent; 50 on average if they are alike
    error: float  # its standard error, from the number of copies
    score: float  # mean score of the copies at the k of the weights
    deviations: float  # standard deviations of the copies' scores that the weights' score lies above that mean


@dataclass(frozen=True, eq=False)
class Sampled:
    """The magnitudes between sampled neurons: an edge of a `WeightGraph`, and the nulls of the matrices they add up."""

    weights: np.ndarray  # (rows, columns) float32, about 1 on average, without extremes
    rows: int
    cols: int
    nulls: tuple[Null, ...]  # of each gate or place of a kernel; () where none is known


@dataclass(frozen=True, eq=False)
class Search:
    """The weights beside all copies."""

    k: int
    score: float
    labels: np.ndarray  # (neurons,)
    controls: dict[str, Control]
    gains: np.ndarray  # (hubs + 1,) by how much the weights are further above their copies without a hub, without all


def searched(
    sizes: tuple[int, ...], edges: Sequence[Sampled], ks: Sequence[int], copies: dict[str, int],
    hubs: Sequence[tuple[int, int]], seed: int,
) -> Search:  # fmt: skip
    """The best partition of the weights over all k, beside so many copies of each kind, and without (group, neuron).

    Scores of different k are not comparable, so each is taken in standard deviations of what the weights and the
    primary copies reach with that k, and the largest counts: of the weights, which gives k, and of each copy. The
    weights and their copies are treated alike, so weights without modules have any rank with the same probability.

    In one thread: products of samples are small, and where other programs keep the processors busy, threads that wait
    for each other take ten times as long. Nor does the rounding depend on the number of threads then.
    """
    with threadpool_limits(1, user_api="blas"):
        return _searched(sizes, edges, ks, copies, hubs, seed)


def _searched(
    sizes: tuple[int, ...], edges: Sequence[Sampled], ks: Sequence[int], copies: dict[str, int],
    hubs: Sequence[tuple[int, int]], seed: int,
) -> Search:  # fmt: skip
    rng = np.random.default_rng(seed)
    graph = WeightGraph(sizes, tuple((e.weights[None], e.rows, e.cols) for e in edges))
    own, labels = best_partitions(graph, ks, rng)
    found = {kind: _copies_scores(sizes, edges, ks, kind, count, rng) for kind, count in copies.items() if count}
    best = int(np.argmax(_standardised(own, found[PRIMARY])[0]))
    controls = {kind: compared(own, scores, best) for kind, scores in found.items()}
    gains = _gains_without(sizes, edges, ks[best], hubs, rng)
    return Search(ks[best], float(own[0, best]), labels[0, best].astype(np.intp), controls, gains)


def compared(own: np.ndarray, copies: np.ndarray, best: int) -> Control:
    """The weights' scores (1, ks) beside those of copies (copies, ks), also at the one k that was chosen.

    >>> compared(np.array([[0.5]]), np.linspace(0, 1, 21)[:, None], 0).percentile
    50.0
    """
    largest = _standardised(own, copies).max(1)
    rank = (largest[1:] < largest[0]).sum() + 0.5 * (largest[1:] == largest[0]).sum()
    count = len(copies)
    share = (rank + 0.5) / (count + 1)
    mean, spread = float(copies[:, best].mean()), float(copies[:, best].std(ddof=1)) if count > 1 else 0.0
    above = float(own[0, best]) - mean
    return Control(
        count,
        100 * float(share),
        100 * float(np.sqrt(share * (1 - share) / count)),
        mean,
        above / spread if spread > 0 else 0.0,
    )


def _standardised(own: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """(1 + copies, ks) in standard deviations from the mean of all of them together."""
    pool = np.concatenate([own, copies])
    spread = pool.std(0)
    return np.asarray((pool - pool.mean(0)) / np.where(spread > 0, spread, 1))


def _copies_scores(
    sizes: tuple[int, ...], edges: Sequence[Sampled], ks: Sequence[int], kind: str, count: int,
    rng: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """(copies, ks) the same search on copies of one kind, a few megabytes of them at a time."""
    size = 4 * sum(e.weights.size for e in edges)
    step = max(1, _AT_ONCE // size)
    found = []
    for start in range(0, count, step):
        some = min(step, count - start)
        drawn = tuple((_DRAWN[kind](e, some, rng), e.rows, e.cols) for e in edges)
        found.append(best_partitions(WeightGraph(sizes, drawn), ks, rng)[0])
    return np.concatenate(found)


def _gains_without(
    sizes: tuple[int, ...], edges: Sequence[Sampled], k: int, hubs: Sequence[tuple[int, int]], rng: np.random.Generator
) -> np.ndarray:
    """(hubs + 1,) what score minus chance gains, after a new search, without each hub and without all of them.

    A hub raises the score of chance as well, so it is taken out of the weights and of the primary copies alike.
    """
    if not hubs:
        return np.zeros(1)
    taken = [[], *([hub] for hub in hubs), hubs]
    left = []
    for edge in edges:
        weights = np.concatenate([edge.weights[None], _same_norms(edge, _FOR_HUBS, rng)])
        weights = np.repeat(weights[None], len(taken), 0)  # (taken out, weights and copies, rows, columns)
        for graphs, neurons in zip(weights, taken, strict=True):
            graphs[:, [n for g, n in neurons if g == edge.rows]] = 0
            graphs[:, :, [n for g, n in neurons if g == edge.cols]] = 0
        left.append((weights.reshape(-1, *edge.weights.shape), edge.rows, edge.cols))
    scores = best_partitions(WeightGraph(sizes, tuple(left)), [k], rng)[0].reshape(len(taken), -1)
    above = scores[:, 0] - scores[:, 1:].mean(1)
    return np.asarray(above[1:] - above[0])


def _same_norms(edge: Sampled, count: int, rng: np.random.Generator) -> np.ndarray:
    """Row sums times column sums, with the relative deviations of the entries from that product shuffled.

    A row's sum follows its heaviest entries, so their deviations are smaller than those of others; that is undone
    before they change places. The deviations are then scaled so that all copies scatter as much as the weights do.
    """
    weights = edge.weights.astype(np.float64)
    rows, cols = (np.flatnonzero(weights.any(axis)) for axis in (1, 0))
    weights = weights[np.ix_(rows, cols)]
    expected = _expected(weights[None])[0]
    deviations = (weights / expected - 1) / np.sqrt(np.outer(_left_over(weights.sum(1)), _left_over(weights.sum(0))))
    shuffled = np.stack([rng.permutation(deviations.ravel()).reshape(weights.shape) for _ in range(count)])
    wanted = _scatter(weights[None])
    made = expected * np.maximum(1 + shuffled, 0)
    for _ in range(2):
        shuffled *= np.sqrt(wanted / np.maximum(_scatter(made), 1e-30))[:, None, None]
        made = expected * np.maximum(1 + shuffled, 0)
    result = np.zeros((count, *edge.weights.shape), np.float32)
    result[:, rows[:, None], cols] = made
    return result


def _left_over(sums: np.ndarray) -> np.ndarray:
    """The share of each entry's variance that is left when the weighted mean of all is subtracted from them."""
    shares = sums / sums.sum()
    return np.maximum(1 - 2 * shares + (shares**2).sum(), 0.1)


def _expected(weights: np.ndarray) -> np.ndarray:
    """(copies, rows, columns) row sums times column sums, as large in all."""
    rows, cols = weights.sum(2, keepdims=True), weights.sum(1, keepdims=True)
    return np.asarray(rows * cols / weights.sum((1, 2), keepdims=True))


def _scatter(weights: np.ndarray) -> np.ndarray:
    """(copies,) χ² over the sum: how far entries are from what their row and column sums predict."""
    expected = _expected(weights)
    squares = (weights - expected) ** 2 / np.where(expected > 0, expected, 1)
    return np.asarray(squares.sum((1, 2)) / weights.sum((1, 2)))


def without_extremes(weights: np.ndarray) -> np.ndarray:
    """Magnitudes of which one in a thousand, of those above 0, is cut down to the size of the next.

    A single entry far beyond all others ties its two neurons together wherever it lies, which looks like a module.

    >>> without_extremes(np.array([[0.0, 3.0], [2.0, 1e6]])).tolist()[0]
    [0.0, 3.0]
    """
    positive = weights[weights > 0]
    if not positive.size:
        return weights
    return np.minimum(weights, np.quantile(positive, _ORDINARY, method="lower")).astype(weights.dtype)


def _shuffled(edge: Sampled, count: int, rng: np.random.Generator) -> np.ndarray:
    entries = edge.weights.ravel()
    return np.stack([rng.permutation(entries).reshape(edge.weights.shape) for _ in range(count)])


def _fresh(edge: Sampled, count: int, rng: np.random.Generator) -> np.ndarray:
    shape = (count, *edge.weights.shape)
    drawn = sum(np.abs(null.sample(shape, rng)) for null in edge.nulls)
    return np.stack([without_extremes(copy) for copy in np.asarray(drawn / np.mean(drawn)).astype(np.float32)])


_DRAWN: dict[str, Callable[[Sampled, int, np.random.Generator], np.ndarray]] = {
    PRIMARY: _same_norms,
    "shuffled": _shuffled,
    "null": _fresh,
}
