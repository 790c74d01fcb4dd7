"""What the paper names, off structures: π_i, γ_i, W^r, D_ii, U_ij, (p, q), R_Y, D_Y, A⁺, A^k, the literal tables."""

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import crystallite as cx
from crystallite.structure import boolean
from tests.helpers import paper, pseudocode

masks = st.tuples(st.integers(1, 9), st.integers(1, 12)).flatmap(
    lambda shape: npst.arrays(bool, shape, elements=st.sampled_from([0, 0, 0, 1]))
)
square_masks = st.integers(1, 12).flatmap(
    lambda n: npst.arrays(bool, (n, n), elements=st.sampled_from([False] * 5 + [True]), fill=st.just(False))
)


def matrix_of(permutation):
    return np.eye(permutation.size)[permutation.source]


@given(masks)
@settings(deadline=None, max_examples=80)
def test_channels_of_feed_forward_matrices_compute_the_matrix(mask):
    """X = Q X_Input, X_i = π_i X, Y_i = W^i X_i, Y = Σ γ_i Y_i, Y_Output = P⁻¹ Y, with matrices for P and Q."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=mask.shape) * mask, rng.normal(size=mask.shape[1])
    s = cx.decompose(mask)
    assert len(s.projections) == len(s.embeddings) == s.n_blocks + 1
    inputs = [pi @ (matrix_of(s.Q) @ x) for pi in s.projections]
    outputs = [block @ part for block, part in zip(s.sub_operators(w), inputs[:-1], strict=True)]
    outputs.append(np.zeros(len(s.embeddings[-1])))  # the zero channel
    y = sum(gamma @ part for gamma, part in zip(s.embeddings, outputs, strict=True))
    np.testing.assert_allclose(matrix_of(s.P).T @ y, w @ x, atol=1e-12)
    assert not (matrix_of(s.P) @ w)[s.embeddings[-1].target].any()
    images = np.concatenate([gamma.target for gamma in s.embeddings])
    assert sorted(images) == list(range(mask.shape[0]))  # disjoint, and all


@given(square_masks)
@settings(deadline=None, max_examples=100)
def test_directed_blocks_are_those_of_the_permuted_matrix(mask):
    n = len(mask)
    w = np.arange(1.0, n * n + 1).reshape(n, n) * mask
    d = cx.decompose(mask, kind="directed")
    p = matrix_of(d.P)
    permuted = p @ w @ p.T
    graph = nx.from_numpy_array(mask.T.astype(int), create_using=nx.DiGraph)  # edge j → i for mask[i, j]
    weak = [c for c in nx.weakly_connected_components(graph) if len(c) > 1 or graph.has_edge(*[min(c)] * 2)]
    assert {frozenset(c.tolist()) for c in d.components} == {frozenset(c) for c in weak}
    start = 0
    for nodes, part in zip(d.components, d.sub_operators(w), strict=True):
        stop = start + len(nodes)
        np.testing.assert_array_equal(part, permuted[start:stop, start:stop])
        start = stop
    assert not permuted[start:].any()
    bounds = np.concatenate([[0], np.cumsum([len(b) for b in d.blocks])]).astype(int)
    found = d.communication(w)
    for i, block in enumerate(d.diagonal_blocks(w)):
        rows = slice(bounds[i], bounds[i + 1])
        np.testing.assert_array_equal(block, permuted[rows, rows])
        for j in range(len(d.blocks)):
            other = permuted[rows, bounds[j] : bounds[j + 1]]
            if j != i and other.any():
                np.testing.assert_array_equal(found.pop((i, j)), other)
                assert j < i
    assert not found
    condensed = nx.condensation(graph)
    for (independent, dependent), nodes in zip(d.frobenius_counts, d.components, strict=True):
        own = {condensed.graph["mapping"][int(v)] for v in nodes}
        assert independent == sum(condensed.in_degree(c) == 0 for c in own)
        assert independent + dependent == len(own)


@given(square_masks)
@settings(deadline=None, max_examples=120)
def test_the_literal_table_is_what_the_pseudocode_prints(mask):
    table, condensation = pseudocode.directed(mask)
    for engine in ("graph", "matrix"):
        d = cx.decompose(mask, kind="directed", engine=engine)
        np.testing.assert_array_equal(d.table(literal=True), table)
        np.testing.assert_array_equal(d.condensation, condensation)


@given(masks)
@settings(deadline=None, max_examples=80)
def test_tables_and_source_sets_are_those_of_the_pseudocode(mask):
    y, x, d_y = pseudocode.bipartite(mask)
    s = cx.decompose(mask)
    for found, expected in zip(s.tables(), (y, x), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(s.D_Y, d_y[d_y.any(1)])
    np.testing.assert_array_equal(s.D_Y, pseudocode.boolean_product(s.R_Y, mask))


def test_the_two_orders_differ_where_an_isolated_node_comes_early():
    d = cx.decompose(np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0]]), kind="directed")
    assert d.table()["Index"].tolist() == [2, 3, 1]
    assert d.table(literal=True)["Index"].tolist() == [1, 2, 3]
    example = cx.decompose(paper.M18, kind="directed")
    np.testing.assert_array_equal(example.table(), example.table(literal=True))


@given(square_masks, st.integers(0, 20))
@settings(deadline=None, max_examples=80)
def test_powers_and_closures(mask, k):
    tensor = torch.from_numpy(mask)
    walks = np.linalg.matrix_power(mask.astype(object), k) > 0
    np.testing.assert_array_equal(boolean.power(tensor, k).numpy(), walks.astype(bool))
    graph = nx.from_numpy_array(mask.astype(int), create_using=nx.DiGraph)
    plus = nx.to_numpy_array(nx.transitive_closure(graph), dtype=bool)  # paths of at least one edge
    np.testing.assert_array_equal(boolean.plus_closure(tensor).numpy(), plus)
    np.testing.assert_array_equal(boolean.closure(tensor).numpy(), plus | np.eye(len(mask), dtype=bool))


def test_the_printed_plus_closure_misses_a_cycle_through_all_nodes():
    cycle = torch.roll(torch.eye(5, dtype=torch.bool), 1, 0)
    printed = torch.stack([boolean.power(cycle, k) for k in range(1, 5)]).any(0)
    assert not printed.diagonal().any()
    assert boolean.plus_closure(cycle).diagonal().all()


@given(square_masks)
@settings(deadline=None, max_examples=100)
def test_layers_are_longest_paths(mask):
    acyclic = np.tril(mask, -1)
    graph = nx.from_numpy_array(acyclic.T.astype(int), create_using=nx.DiGraph)
    expected = np.empty(len(mask), int)
    for layer, nodes in enumerate(nx.topological_generations(graph)):
        expected[list(nodes)] = layer
    np.testing.assert_array_equal(boolean.layers(torch.from_numpy(acyclic)).numpy(), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 100, 257])
def test_layers_take_logarithmically_many_products(count, monkeypatch):
    products, multiply = [], boolean.boolean_product
    monkeypatch.setattr(boolean, "boolean_product", lambda a, b: products.append(1) or multiply(a, b))
    path = torch.diag(torch.ones(count - 1), -1).bool()
    assert boolean.layers(path).tolist() == list(range(count))
    assert len(products) <= 2 * max(count - 1, 0).bit_length()


@pytest.mark.parametrize("kind", ["bipartite", "directed"])
def test_the_matrix_engine_stays_on_the_masks_device(kind):
    """Whatever it makes without saying where would be on the meta device here, and could not meet the mask."""
    mask = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.04
    expected = cx.decompose(mask, kind)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                assert cx.decompose(mask, kind, engine="matrix") == expected
        finally:
            torch.set_default_dtype(torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8):
        assert cx.decompose(mask.to(dtype), kind, engine="matrix") == expected


@given(st.permutations(range(9)), st.permutations(range(6)))
@settings(deadline=None, max_examples=60)
def test_permuting_in_place(rows, cols):
    p, q = cx.Permutation(rows), cx.Permutation(cols)
    w = np.arange(54).reshape(9, 6)
    for kind in (np.array, lambda a: torch.from_numpy(a.copy()), np.asfortranarray):
        array = kind(w)
        assert p.rows_(array) is array
        assert q.cols_(array) is array
        np.testing.assert_array_equal(np.asarray(array), w[rows][:, cols])
    parameter = torch.nn.Parameter(torch.arange(9.0))
    np.testing.assert_array_equal(p.rows_(parameter).detach().numpy(), np.array(rows, float))
    with pytest.raises(cx.CrystalliteError, match="9 entries on the first axis"):
        p.rows_(w[:4])
