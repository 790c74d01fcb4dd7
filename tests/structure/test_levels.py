"""Every level at once, against decomposing at each level and against scipy's spanning tree."""

import itertools

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import crystallite as cx
from crystallite.structure import forest

weights = st.tuples(st.integers(0, 8), st.integers(0, 70)).flatmap(
    lambda shape: npst.arrays(
        np.float32,
        shape,
        elements=st.one_of(st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5]), st.floats(-4, 4, width=32)),
    )
)


def check_against_decompose(profile, w, c):
    level, direct = profile.at(c), cx.decompose(w, threshold=c)
    assert level.n_blocks == direct.n_blocks
    assert level.largest_share == direct.largest_share
    assert level.dormant == (len(direct.dormant_cols), len(direct.dormant_rows))
    assert profile.structure(c) == direct


@pytest.mark.parametrize("shape", [(300, 900), (2000, 150), (900, 900)])
def test_the_first_pass_over_a_matrix_takes_a_few_entries_for_each_neuron(shape, monkeypatch):
    """Fewer would leave work to further passes, many more would need memory like the matrix itself."""
    taken = []
    collect = forest._collect
    monkeypatch.setattr(forest, "_collect", lambda *args: taken.append(collect(*args)) or taken[-1])
    cx.level_profile(np.random.default_rng(0).standard_normal(shape))
    assert len(taken) == 1
    assert sum(taken[0][0]) == pytest.approx(4 * sum(shape), rel=0.15)


@given(weights, st.floats(1e-6, 5))
@settings(max_examples=150)
def test_every_level_equals_decompose(w, c):
    profile = cx.level_profile(w)
    for threshold in (c, *profile.thresholds[:6], *np.nextafter(profile.thresholds[:6], 9)):
        check_against_decompose(profile, w, float(threshold))


@pytest.mark.parametrize("kind", ["normal", "skewed", "quantised", "blocks", "one heavy block", "sparse", "constant"])
@pytest.mark.parametrize("shape", [(300, 900), (500, 130), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spanning_forest_weighs_as_much_as_scipys(kind, shape, dtype):
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    if kind == "skewed":
        w *= rng.random((shape[0], 1)) ** 4 * rng.random((1, shape[1])) ** 4
    elif kind == "quantised":
        w = w.round()
    elif kind == "constant":
        w[:] = 0.25
    elif kind in ("blocks", "one heavy block"):
        rows, cols = rng.integers(0, 5, shape[0]), rng.integers(0, 5, shape[1])
        w *= rows[:, None] == cols
        if kind == "one heavy block":
            w[rows == 0] *= 1000
    elif kind == "sparse":
        w *= rng.random(shape) < 0.003
    w = torch.from_numpy(w).to(dtype)
    profile = cx.level_profile(w)
    dense = w.abs().float().numpy()
    graph = scipy.sparse.block_array(
        [[None, scipy.sparse.csr_array(dense)], [scipy.sparse.csr_array((shape[1], shape[0])), None]]
    )
    tree = scipy.sparse.csgraph.minimum_spanning_tree(-graph)
    assert np.array_equal(np.sort(-tree.data)[::-1], profile.weights)


def test_blocks_within_blocks():
    """Planted scales: four blocks at high thresholds, two at middle ones, one at the bottom."""
    w = np.full((40, 60), 0.01)
    for i in range(2):
        w[20 * i : 20 * (i + 1), 30 * i : 30 * (i + 1)] = 0.1
    for i in range(4):
        w[10 * i : 10 * (i + 1), 15 * i : 15 * (i + 1)] = 1.0
    profile = cx.level_profile(w)
    assert [profile.at(c).n_blocks for c in (2.0, 0.5, 0.05, 0.005)] == [0, 4, 2, 1]
    assert profile.thresholds.tolist() == [1.0, 0.1, 0.01]
    assert profile.largest.tolist() == [25, 50, 100]
    assert profile.effective_blocks.tolist() == [4.0, 2.0, 1.0]
    assert profile.active_share.tolist() == [1.0, 1.0, 1.0]


def test_level_zero_is_every_nonzero_entry():
    w = np.array([[1.0, 0.0], [0.0, 2.0]])
    assert cx.level_profile(w).structure(0) == cx.decompose(w)


def test_chain_of_layers_shares_neurons():
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 3, n) for n in (40, 60, 50, 10)]
    chain = [rng.uniform(1, 2, (len(o), len(i))) * (o[:, None] == i) for i, o in itertools.pairwise(groups)]
    profile = cx.level_profile(chain)
    assert profile.at(0.5).n_blocks == 3
    labels = profile.labels(0.5)
    for found, planted in zip(labels, groups, strict=True):
        assert len({(f, p) for f, p in zip(found, planted, strict=True)}) == 3
    chain[1] = chain[1] + 0.3 * (rng.random(chain[1].shape) < 0.05)  # false edges join them at a lower level only
    joined = cx.level_profile(chain)
    assert joined.at(0.5).n_blocks == 3
    assert joined.at(0.2).n_blocks == 1
    assert joined.at(0.2).largest_share == 1.0


def test_scales_make_thresholds_comparable():
    layer = np.kron(np.eye(2), np.ones((3, 3)))
    profile = cx.level_profile([layer * 0.1, layer * 10], scales=[0.1, 10])
    assert profile.thresholds == pytest.approx([1.0])
    assert profile.at(0.99).n_blocks == 2


def test_chain_equals_union_graph_components():
    rng = np.random.default_rng(3)
    chain = [rng.standard_normal((30, 20)), rng.standard_normal((25, 30))]
    profile = cx.level_profile(chain)
    for c in (1.5, 2.0, 2.5, 3.0):
        total = 20 + 30 + 25
        union = np.zeros((total, total))
        union[20:50, :20], union[50:, 20:50] = (np.abs(w) >= c for w in chain)
        _, label = scipy.sparse.csgraph.connected_components(scipy.sparse.csr_array(union), directed=False)
        sizes = np.bincount(label)
        assert profile.at(c).n_blocks == (sizes > 1).sum()
        assert sum(profile.at(c).dormant) == (sizes == 1).sum()
        assert profile.at(c).largest_share == (sizes[sizes > 1].max() if (sizes > 1).any() else 0) / total


def test_directed_profile_equals_decompose_on_its_grid():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((60, 60))
    profile = cx.level_profile(w, kind="directed")
    assert len(profile.thresholds) > 10
    for k, c in enumerate(profile.thresholds):
        d = cx.decompose(np.abs(w) >= c, kind="directed")
        assert (profile.n_scc[k], profile.n_components[k]) == (d.n_scc, d.n_components)
        assert (profile.n_layers[k], profile.isolated[k]) == (d.n_layers, d.isolated.sum())
    assert profile.n_scc[0] > profile.n_scc[-1] == 1
    assert list(cx.level_profile(w, kind="directed", thresholds=[1.0]).thresholds) == [1.0]


def test_profiles_print_and_tabulate():
    profile = cx.level_profile(np.eye(3))
    assert repr(profile) == "LevelProfile(3 + 3 neurons, 1 levels: up to 3 blocks; largest reaches 33% of the neurons)"
    assert profile.to_pandas().columns.tolist() == [
        "threshold", "blocks", "largest_share", "dormant columns", "dormant rows",
    ]  # fmt: skip
    assert len(cx.level_profile(np.eye(3), kind="directed").to_pandas()) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cx.level_profile(np.array([[np.nan]])), "finite"),
        (lambda: cx.level_profile([np.ones((2, 3)), np.ones((2, 3))]), r"matrix\[1\]: expected 2 columns"),
        (lambda: cx.level_profile([np.ones((2, 3))], scales=[0.0]), "scales"),
        (lambda: cx.level_profile(np.ones((2, 3)), scales=[1.0, 1.0]), "scales"),
        (lambda: cx.level_profile(np.ones((2, 3)), kind="directed"), "square"),
        (lambda: cx.level_profile(np.ones((2, 2)), thresholds=[1.0]), "every level"),
        (lambda: cx.level_profile(np.ones((2, 2)), kind="directed", scales=[1.0]), "scales"),
        (lambda: cx.level_profile(np.ones((2, 2))).at(-1), "threshold"),
        (lambda: cx.level_profile(np.ones((2, 2))).at("1"), "threshold"),
        (lambda: cx.level_profile([np.ones((2, 2))] * 2).structure(1), "chain"),
        (lambda: cx.level_profile(np.ones((2, 2)), kind="x"), "kind"),
    ],
)
def test_bad_input_gets_one_clear_error(call, message):
    with pytest.raises(cx.CrystalliteError, match=message):
        call()


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_level_of_a_feedback_matrix_is_exact(seed, nodes, ties):
    """Against networkx at every distinct weight and between them, with ties, self-loops, zeros and negative weights."""
    rng = np.random.default_rng(seed)
    w = rng.integers(-4, 5, (nodes, nodes)).astype(float) if ties else rng.normal(size=(nodes, nodes))
    w *= rng.random(w.shape) < 0.6
    profile = cx.level_profile(w, kind="directed")
    assert profile.is_exact
    values = np.unique(np.abs(w[w != 0]))
    states = []
    for c in [*values, *(values[:-1] + values[1:]) / 2, 99.0]:
        graph = nx.from_numpy_array((np.abs(w) >= c).T.astype(int), create_using=nx.DiGraph)
        strong = list(nx.strongly_connected_components(graph))
        expected = (
            len(strong),
            nx.number_weakly_connected_components(graph) if nodes else 0,
            max(map(len, strong), default=0) / max(nodes, 1),
            len(list(nx.isolates(graph))),
        )
        assert profile.at(float(c))[1:] == pytest.approx(expected), c
    for c in values[::-1]:
        at = profile.at(float(c))
        if not states or states[-1][1] != at[1:]:
            states.append((c, at[1:]))
    assert profile.thresholds.tolist() == [c for c, _ in states if c]  # no more levels than there are changes
    layers = [cx.decompose(w, "directed", threshold=float(c)).n_layers for c in profile.thresholds]
    assert profile.n_layers.tolist() == layers
    assert len(profile.to_pandas()) == len(profile.thresholds)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_feedback_levels_of_larger_matrices(dtype, turned):
    w = torch.randn(150, 150, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = w.T if turned else w
    profile = cx.level_profile(w, kind="directed")
    assert profile.n_scc[-1] == 1
    for k in range(0, len(profile.thresholds), max(1, len(profile.thresholds) // 12)):
        c = float(profile.thresholds[k])
        for threshold in (c, np.nextafter(c, 99)):
            d = cx.decompose(w, "directed", threshold=threshold)
            found = profile.at(threshold)
            assert found[1:3] == (d.n_scc, d.n_components)
            assert found[3:] == pytest.approx((d.largest_share, int(d.isolated.sum())))


def test_a_profile_of_chosen_thresholds_knows_no_others():
    profile = cx.level_profile(np.array([[0.0, 2.0], [1.0, 0.0]]), kind="directed", thresholds=[2.0, 1.0])
    assert profile.at(1.0).n_scc == 1
    with pytest.raises(cx.InvalidOption, match="only the thresholds"):
        profile.at(1.5)
    assert (
        repr(cx.level_profile(np.eye(3), kind="directed"))
        == "DirectedProfile(3 nodes, 1 levels: 3 to 3 strong components)"
    )
