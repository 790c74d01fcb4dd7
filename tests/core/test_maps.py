"""Permutation, projection and embedding: the paper's rules, on NumPy arrays and torch tensors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import crystallite as cx

permutations = st.integers(0, 20).flatmap(lambda n: st.permutations(range(n)))
KINDS = [np.asarray, torch.as_tensor]


def matrix_of(permutation):
    """The permutation matrix, as an oracle only."""
    m = np.zeros((permutation.size, permutation.size))
    m[np.arange(permutation.size), permutation.source] = 1
    return m


@given(permutations)
def test_application_equals_the_permutation_matrix(table):
    p = cx.Permutation(table)
    w = np.random.default_rng(0).standard_normal((len(table), len(table)))
    m = matrix_of(p)
    assert np.array_equal(p @ w @ p.T, m @ w @ m.T)
    assert np.array_equal(p.rows(w), m @ w)
    assert np.array_equal(p.cols(w), w @ m.T)


@given(permutations)
def test_inverse(table):
    p = cx.Permutation(table)
    identity = cx.Permutation.identity(len(table))
    assert p @ p.inverse() == p.inverse() @ p == identity
    w = np.arange(len(table))
    assert np.array_equal(p.inverse() @ (p @ w), w)
    assert np.array_equal((w[None] @ p.T) @ p.T.inverse(), w[None])


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)))))
def test_composition_follows_the_paper(tables):
    p, q = map(cx.Permutation, tables)
    assert [(p @ q).source[i] for i in range(p.size)] == [q.source[p.source[i]] for i in range(p.size)]
    x = np.random.default_rng(0).standard_normal(p.size)
    assert np.array_equal((p @ q) @ x, p @ (q @ x))
    w = np.random.default_rng(1).standard_normal((3, p.size))
    assert np.array_equal(w @ q.T @ p.T, w @ (q.T @ p.T))


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_alike(kind):
    w = kind(np.arange(12.0).reshape(3, 4))
    p, q = cx.Permutation([2, 0, 1]), cx.Permutation([3, 1, 0, 2])
    moved = p @ w @ q.T
    assert type(moved) is type(w)
    assert np.array_equal(np.asarray(moved), np.asarray(w)[[2, 0, 1]][:, [3, 1, 0, 2]])
    batch = kind(np.arange(24.0).reshape(2, 3, 4))
    assert np.array_equal(np.asarray(q.cols(batch)), np.asarray(batch)[..., [3, 1, 0, 2]])


def test_gradients_flow_through_torch():
    x = torch.arange(4.0, requires_grad=True)
    (cx.Permutation([3, 1, 0, 2]) @ x @ torch.tensor([1.0, 2, 3, 4])).backward()
    assert x.grad.tolist() == [3.0, 2.0, 4.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_projection_and_embedding_are_inverse_on_their_domains(kind):
    a = kind(np.arange(20.0).reshape(5, 4))
    rows, cols = cx.Projection([4, 1], 5), cx.Projection([0, 3, 2], 4)
    sub = rows.submatrix(a, cols)
    assert np.array_equal(np.asarray(sub), np.asarray(a)[np.ix_([4, 1], [0, 3, 2])])
    back = cols.inverse().cols(rows.inverse().rows(sub))
    expected = np.zeros((5, 4))
    expected[np.ix_([4, 1], [0, 3, 2])] = np.asarray(sub)
    assert np.array_equal(np.asarray(back), expected)
    assert np.array_equal(np.asarray(rows.inverse().inverse() @ a), np.asarray(rows @ a))
    target = kind(np.full((5, 4), -1.0))
    rows.inverse().fill(target, sub, cols.inverse())
    assert np.array_equal(np.asarray(rows.submatrix(target, cols)), np.asarray(sub))
    assert (np.asarray(target) == -1).sum() == 20 - 6


def test_projections_compose_with_permutations():
    x = np.arange(5) * 10
    p, pi = cx.Permutation([4, 2, 0, 1, 3]), cx.Projection([3, 0], 5)
    assert np.array_equal((pi @ p) @ x, pi @ (p @ x))
    gamma = cx.Embedding([1, 4], 5)
    y = np.array([7, 9])
    assert np.array_equal((p @ gamma) @ y, p @ (gamma @ y))
    assert np.array_equal((cx.Projection([1], 2) @ pi) @ x, cx.Projection([1], 2) @ (pi @ x))
    assert np.array_equal((gamma @ cx.Embedding([1], 2)) @ y[:1], gamma @ (cx.Embedding([1], 2) @ y[:1]))


def test_parallel_sub_operators_rebuild_the_product():
    """Permutation → projection → sub-operators → embedding → inverse permutation, as in the paper's figure."""
    rng = np.random.default_rng(0)
    w = np.zeros((6, 7))
    w[np.ix_([0, 3], [1, 2, 6])] = rng.standard_normal((2, 3))
    w[np.ix_([1, 2, 5], [0, 4])] = rng.standard_normal((3, 2))
    s = cx.decompose(w)
    x = rng.standard_normal(7)
    moved = s.Q @ x
    y = np.zeros(6)
    row = col = 0
    for rows, cols in s.blocks:
        pi = cx.Projection(np.arange(col, col + len(cols)), 7)
        gamma = cx.Embedding(np.arange(row, row + len(rows)), 6)
        y += gamma @ (w[np.ix_(rows, cols)] @ (pi @ moved))
        row, col = row + len(rows), col + len(cols)
    assert np.allclose(s.P.inverse() @ y, w @ x, rtol=0, atol=1e-15)


def as_matrix(map_):
    """Any map as a 0/1 matrix, as an oracle only."""
    columns = map_.size if isinstance(map_, (cx.Permutation, cx.Projection)) else len(map_)
    return map_ @ np.eye(columns)


MAPS = [
    cx.Permutation([2, 0, 1]),
    cx.Permutation([1, 2, 0]),
    cx.Permutation([3, 1, 0, 2]),
    cx.Projection([3, 0, 1], 4),
    cx.Projection([1], 3),
    cx.Embedding([3, 0, 1], 4),
    cx.Embedding([2], 3),
]


@pytest.mark.parametrize("left", MAPS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_transposes_and_maps_on_the_right_are_those_of_matrices(left, kind):
    m = as_matrix(left)
    tall, wide = (kind(np.random.default_rng(0).standard_normal(shape)) for shape in ((len(m), 2), (2, len(m))))
    assert np.array_equal(np.asarray(left.T @ tall), m.T @ np.asarray(tall))
    assert np.array_equal(np.asarray(wide @ left), np.asarray(wide) @ m)


@pytest.mark.parametrize("left", MAPS, ids=repr)
@pytest.mark.parametrize("right", MAPS, ids=repr)
def test_every_composition_that_exists_is_the_product(left, right):
    a, b = as_matrix(left), as_matrix(right)
    if {type(left), type(right)} == {cx.Projection, cx.Embedding}:
        with pytest.raises(TypeError):  # neither a projection nor an embedding
            left @ right
    elif a.shape[1] != b.shape[0]:
        with pytest.raises(cx.InvalidMap, match="cannot compose"):
            left @ right
    else:
        assert np.array_equal(as_matrix(left @ right), a @ b)


def test_a_structure_is_undone_with_transposes():
    w = np.random.default_rng(0).standard_normal((5, 7)) * (np.arange(5)[:, None] % 2 == np.arange(7) % 2)
    s = cx.decompose(w)
    assert np.array_equal(s.P.T @ (s.P @ w @ s.Q.T) @ s.Q, w)


def test_a_map_that_keeps_nothing_is_still_a_map():
    m, nothing = np.ones((4, 4)), cx.Projection([], 4)
    assert cx.Projection([0, 1], 4).submatrix(m, nothing).shape == (2, 0)
    assert np.array_equal(cx.Embedding([0], 4).fill(m.copy(), np.zeros((1, 0)), nothing.inverse()), m)


def test_tables_name_their_columns():
    with pytest.raises(cx.InvalidOption, match="no column 'x'; the table has new, old"):
        cx.Permutation([0]).table()["x"]


def test_tables_own_their_memory():
    source = np.array([1, 0])
    p = cx.Permutation(source)
    source[:] = 0
    assert p.source.tolist() == [1, 0]
    assert len({p, cx.Permutation([1, 0]), cx.Permutation([0, 1])}) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cx.Permutation([0, 0]), "appears 2 times"),
        (lambda: cx.Permutation([0, 2]), "0…1, got 2"),
        (lambda: cx.Permutation([[0, 1]]), "1-D"),
        (lambda: cx.Permutation([0.0, 1.0]), "integer"),
        (lambda: cx.Permutation([[0], [1, 2]]), "list of indices"),
        (lambda: cx.Projection([-1], 3), "got -1"),
        (lambda: cx.Projection([1], -3), "size"),
        (lambda: cx.Embedding([3], 3), "got 3"),
        (lambda: cx.Permutation([0, 1]) @ cx.Permutation([0]), "sizes 2 and 1"),
        (lambda: cx.Permutation([0, 1]) @ np.ones(3), "2 entries on the first axis"),
        (lambda: np.ones((2, 3)) @ cx.Permutation([0, 1]).T, "2 entries on the last axis"),
        (lambda: cx.Embedding([1], 2).fill(np.ones((2, 2)), np.ones((2, 2))), "block of shape"),
    ],
)
def test_bad_maps_are_refused(make, message):
    with pytest.raises(cx.InvalidMap, match=message):
        make()
