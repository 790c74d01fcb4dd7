"""Co-clustering against planted blocks, components and pure noise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from crystallite.partitioning.coclustering import agreement, assign, cocluster, spectrum


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_ones_in_the_spectrum_count_components(k, seed):
    rng = np.random.default_rng(seed)
    rows, cols = rng.integers(0, k, 12), rng.integers(0, k, 15)
    matrix = (rows[:, None] == cols) * rng.uniform(0.5, 2, (12, 15))
    graph = np.zeros((27, 27))
    graph[:12, 12:] = matrix
    live = np.r_[matrix.sum(1), matrix.sum(0)] > 0
    count = connected_components(graph[np.ix_(live, live)], directed=False)[0] if live.any() else 0
    assert int((spectrum(matrix) > 1 - 1e-9).sum()) == count


@pytest.mark.parametrize("background", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_noisy_blocks_are_found(k, background):
    rng = np.random.default_rng(k)
    rows, cols = rng.permutation(np.arange(10 * k) % k), rng.permutation(np.arange(40 * k) % k)
    matrix = np.where(rows[:, None] == cols, 1.0, background) * rng.uniform(0.5, 1.5, (10 * k, 40 * k))
    matrix *= rng.lognormal(0, 1, 40 * k)  # inputs on different scales
    found = cocluster(matrix)
    assert found.k == k
    assert agreement(found.rows, rows) == agreement(found.cols, cols) == 1


def test_noise_is_one_module():
    rng = np.random.default_rng(0)
    shapes = [(2, 3), (2, 50), (3, 5), (5, 5), (10, 64), (40, 200)]
    split = [cocluster(rng.lognormal(0, 0.5, shape)).k > 1 for shape in shapes for _ in range(20)]
    assert sum(split) <= 0.02 * len(split)
    heavy = [cocluster(rng.lognormal(0, 1.5, shape)).k > 1 for shape in [(10, 64), (40, 200)] for _ in range(20)]
    assert sum(heavy) == 0


def test_modules_are_numbered_by_their_first_row_and_zeros_belong_to_none():
    matrix = np.zeros((4, 4))
    matrix[0, 3] = matrix[1, 0] = matrix[3, 0] = 1
    found = cocluster(matrix)
    assert found.rows.tolist() == [0, 1, -1, 1]
    assert found.cols.tolist() == [1, -1, -1, 0]


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (3, 0)])
def test_thin_matrices(shape):
    found = cocluster(np.ones(shape))
    assert found.k == min(1, shape[1])
    assert len(found.rows) == shape[0]


def test_a_column_goes_where_it_has_more_than_its_share():
    matrix = np.array([[100.0, 100.0, 60.0], [1.0, 1.0, 50.0]])  # the first row is louder about everything
    assert assign(matrix, np.array([0, 1])).tolist() == [0, 0, 1]


@given(st.lists(st.integers(-1, 3), min_size=1, max_size=30), st.permutations(range(4)))
def test_agreement_does_not_depend_on_names(labels, names):
    labels = np.array(labels)
    renamed = np.where(labels < 0, -1, np.array(names)[labels])
    assert agreement(labels, renamed) == agreement(renamed, labels) == 1
