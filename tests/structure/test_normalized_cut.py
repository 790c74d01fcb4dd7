"""Normalised cuts against their definition, and modules that were planted."""

import numpy as np
import pytest

from crystallite.structure.normalized_cut import WeightGraph, best_partitions


def cut_by_definition(weights, rows, cols, k):
    """Ncut = Σ cut(V) / vol(V) of the bipartite graph, from its whole adjacency matrix."""
    m, n = weights.shape
    adjacency = np.zeros((m + n, m + n))
    adjacency[:m, m:], adjacency[m:, :m] = weights, weights.T
    labels = np.concatenate([rows, cols])
    total = 0.0
    for module in range(k):
        inside = labels == module
        total += adjacency[inside][:, ~inside].sum() / adjacency[inside].sum()
    return total


def single(weights):
    return WeightGraph(weights.shape, ((weights[None].astype(np.float32), 0, 1),))


@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_score_is_that_of_the_partition_returned(k):
    weights = np.abs(np.random.default_rng(k).normal(size=(40, 30)))
    scores, labels = best_partitions(single(weights), [k], np.random.default_rng(0))
    expected = 1 - cut_by_definition(weights, labels[0, 0, :40], labels[0, 0, 40:], k) / (k - 1)
    assert scores[0, 0] == pytest.approx(expected, abs=1e-5)


def test_the_partition_is_about_as_good_as_any_that_a_local_search_from_many_starts_finds():
    rng = np.random.default_rng(3)
    weights = np.abs(rng.normal(size=(12, 10)))
    found = best_partitions(single(weights), [2], rng)[0][0, 0]
    best = max(
        1 - cut_by_definition(weights, rows, cols, 2)
        for rows, cols in (_descend(weights, rng) for _ in range(60))
        if len({*rows, *cols}) == 2
    )
    assert found >= 0.85 * best


def _descend(weights, rng):
    """Single moves, best first, from a random partition in two."""
    labels = rng.integers(2, size=sum(weights.shape))
    height = len(weights)

    def score(labels):
        if len({*labels}) < 2:
            return -1.0
        return 1 - cut_by_definition(weights, labels[:height], labels[height:], 2)

    now = score(labels)
    while True:
        moves = []
        for i in range(len(labels)):
            labels[i] ^= 1
            moves.append(score(labels))
            labels[i] ^= 1
        if max(moves) <= now:
            return labels[:height], labels[height:]
        now = max(moves)
        labels[int(np.argmax(moves))] ^= 1


@pytest.mark.parametrize("k", [2, 4, 7])
def test_exact_blocks_score_one(k):
    weights = np.kron(np.eye(k), np.ones((6, 5)))
    weights = weights[np.random.default_rng(0).permutation(6 * k)]
    scores, labels = best_partitions(single(weights), [k], np.random.default_rng(0))
    assert scores[0, 0] == pytest.approx(1, abs=1e-6)
    assert len({*labels[0, 0]}) == k


def test_hidden_neurons_of_a_chain_have_one_module_and_feedback_one_for_both_sides():
    rng = np.random.default_rng(0)
    inputs, hidden, outputs = (np.arange(size) % 3 for size in (30, 45, 24))

    def planted(rows, cols):
        return (np.abs(rng.normal(size=(1, len(rows), len(cols)))) * np.where(rows[:, None] == cols, 3, 1)).astype("f4")

    edges = ((planted(hidden, inputs), 0, 1), (planted(outputs, hidden), 2, 0), (planted(hidden, hidden), 0, 0))
    scores, labels = best_partitions(WeightGraph((45, 30, 24), edges), [3], rng)
    found = labels[0, 0]
    expected = np.concatenate([hidden, inputs, outputs])
    assert len({*zip(found.tolist(), expected.tolist(), strict=True)}) == 3  # the same up to names
    assert 0.3 < scores[0, 0] < 0.6


def test_several_graphs_at_once_are_searched_as_each_alone():
    rng = np.random.default_rng(0)
    blocks = np.where(np.arange(40)[:, None] % 2 == np.arange(40) % 2, 4, 1)
    weights = (np.abs(rng.normal(size=(3, 40, 40))) * blocks).astype(np.float32)
    together, _ = best_partitions(WeightGraph((40, 40), ((weights, 0, 1),)), [2, 3], rng)
    alone = [best_partitions(single(w), [2, 3], rng)[0][0, 0] for w in weights]
    assert together[:, 0] == pytest.approx(alone, abs=1e-4)


def test_neurons_without_weight_do_no_harm():
    weights = np.kron(np.eye(2), np.ones((6, 5)))
    weights[3], weights[:, 7] = 0, 0
    assert best_partitions(single(weights), [2], np.random.default_rng(0))[0][0, 0] == pytest.approx(1, abs=1e-6)


def test_no_turn_makes_a_partition_worse(monkeypatch):
    graphs = [single(np.abs(np.random.default_rng(seed).normal(size=(20, 30))) ** 3) for seed in range(8)]
    turned = [best_partitions(graph, [2, 4], np.random.default_rng(0))[0] for graph in graphs]
    monkeypatch.setattr("crystallite.structure.normalized_cut._TURNS", 0)
    first = [best_partitions(graph, [2, 4], np.random.default_rng(0))[0] for graph in graphs]
    assert all((a >= b).all() for a, b in zip(turned, first, strict=True))
    assert any((a > b).any() for a, b in zip(turned, first, strict=True))
