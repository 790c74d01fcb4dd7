"""Both engines against the paper's printed tables, against each other and against networkx and scipy."""

import networkx as nx
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.csgraph
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import crystallite as cx
from crystallite.core.arrays import magnitudes
from crystallite.structure.components import column_components, marked_components
from crystallite.structure.strong import packed
from tests.helpers import paper

ENGINES = ["graph", "matrix"]


@pytest.mark.parametrize("engine", ENGINES)
class TestPaperBipartite:
    def test_tables(self, engine):
        y, x = cx.decompose(paper.M_PRIME, engine=engine).tables()
        assert np.array_equal(y, paper.Y)
        assert np.array_equal(x, paper.X)

    def test_permutations_and_reordered_matrix(self, engine):
        s = cx.decompose(paper.M_PRIME, engine=engine)
        assert np.array_equal(s.P.table()["old"], paper.P2)
        assert np.array_equal(s.Q.table()["old"], paper.Q2)
        assert np.array_equal(s.P @ paper.M_PRIME @ s.Q.T, paper.M_DOUBLE_PRIME)
        assert s.n_blocks == 3

    def test_closed_loop(self, engine):
        s = cx.decompose(paper.M_PRIME, engine=engine)
        p1, q1 = cx.Permutation(paper.P1 - 1), cx.Permutation(paper.Q1 - 1)
        assert np.array_equal(p1 @ paper.M @ q1.T, paper.M_PRIME)
        p, q = s.P @ p1, s.Q @ q1
        assert np.array_equal(p.table()["old"], paper.P2P1)
        assert np.array_equal(q.table()["old"], paper.Q2Q1)
        assert np.array_equal(p.inverse().table()["old"], paper.P2P1_INVERSE)
        assert np.array_equal(q.inverse().table()["old"], paper.Q2Q1_INVERSE)
        assert np.array_equal(p.inverse() @ paper.M_DOUBLE_PRIME @ q.T.inverse(), paper.M)


@pytest.mark.parametrize("engine", ENGINES)
def test_paper_directed(engine):
    d = cx.decompose(paper.M18, kind="directed", engine=engine)
    assert np.array_equal(d.table(), paper.V)
    assert d.n_scc == 9
    edges = {(int(p) + 1, int(q) + 1) for p, q in np.argwhere(d.condensation)}
    assert edges == paper.CONDENSATION_EDGES
    assert d.n_components == 4
    assert d.isolated.nonzero()[0].tolist() == [8]
    assert [len(b) for b in d.blocks] == [3, 2, 2, 2, 2, 2, 2, 2]


masks = st.tuples(st.integers(0, 9), st.integers(0, 70)).flatmap(
    lambda shape: npst.arrays(bool, shape, elements=st.booleans() if shape[1] < 8 else st.sampled_from([0, 0, 0, 1]))
)
square_masks = st.integers(0, 12).flatmap(
    lambda n: npst.arrays(bool, (n, n), elements=st.sampled_from([False] * 4 + [True]), fill=st.just(False))
)


@given(masks)
@settings(max_examples=150)
def test_bipartite_engines_agree_with_networkx(mask):
    graph = cx.decompose(mask)
    assert graph == cx.decompose(mask, engine="matrix")
    bipartite = nx.Graph()
    bipartite.add_nodes_from(("row", i) for i in range(mask.shape[0]))
    bipartite.add_nodes_from(("col", j) for j in range(mask.shape[1]))
    bipartite.add_edges_from((("row", i), ("col", j)) for i, j in np.argwhere(mask))
    expected = {frozenset(c) for c in nx.connected_components(bipartite) if len(c) > 1}
    found = {
        frozenset([*(("row", int(i)) for i in rows), *(("col", int(j)) for j in cols)]) for rows, cols in graph.blocks
    }
    assert found == expected
    assert set(graph.dormant_rows) == set(np.flatnonzero(~mask.any(1)))
    assert set(graph.dormant_cols) == set(np.flatnonzero(~mask.any(0)))


@given(masks)
@settings(max_examples=100)
def test_reordered_mask_is_block_diagonal(mask):
    s = cx.decompose(mask)
    assert sorted(s.P.source) == list(range(mask.shape[0]))
    assert sorted(s.Q.source) == list(range(mask.shape[1]))
    reordered = s.apply(mask)
    outside = np.ones_like(reordered)
    row = col = 0
    for rows, cols in s.blocks:
        outside[row : row + len(rows), col : col + len(cols)] = False
        row, col = row + len(rows), col + len(cols)
    assert not (reordered & outside).any()
    first_rows = [rows[0] for rows, _ in s.blocks]
    assert first_rows == sorted(first_rows)


@given(masks, st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_relabelling_neurons_relabels_blocks(mask, random):
    p, q = (np.array(random.sample(range(n), n), int) for n in mask.shape)
    s, t = cx.decompose(mask), cx.decompose(mask[p][:, q])

    def as_sets(structure, rows, cols):
        return {(frozenset(rows[r]), frozenset(cols[c])) for r, c in structure.blocks}

    assert as_sets(t, p, q) == as_sets(s, np.arange(mask.shape[0]), np.arange(mask.shape[1]))


@given(square_masks)
@settings(max_examples=200)
def test_directed_engines_agree_with_networkx(mask):
    d = cx.decompose(mask, kind="directed")
    assert d == cx.decompose(mask, kind="directed", engine="matrix")
    n = len(mask)
    g = nx.DiGraph()
    g.add_nodes_from(range(n))
    g.add_edges_from((int(j), int(i)) for i, j in np.argwhere(mask))  # W(i, j) ≠ 0 ⇔ j → i

    def classes(label):
        return {frozenset(np.flatnonzero(label == k).tolist()) for k in np.unique(label)}

    assert classes(d.scc) == set(map(frozenset, nx.strongly_connected_components(g)))
    assert classes(d.component) == set(map(frozenset, nx.weakly_connected_components(g)))
    condensed = nx.condensation(g)
    for layer, members in enumerate(nx.topological_generations(condensed)):
        for c in members:
            assert (d.layer[list(condensed.nodes[c]["members"])] == layer).all()
    assert set(np.flatnonzero(d.isolated)) == set(nx.isolates(g))  # networkx: a self-loop is not isolated


@given(square_masks)
@settings(max_examples=150)
def test_frobenius_form(mask):
    d = cx.decompose(mask, kind="directed")
    reordered = d.apply(mask)
    n, dormant = len(mask), int(d.isolated.sum())
    assert d.isolated[d.P.source[n - dormant :]].all()
    assert not reordered[n - dormant :].any()
    assert not reordered[:, n - dormant :].any()
    start = 0
    for block in d.blocks:
        stop = start + len(block)
        assert not reordered[start:stop, stop:].any()  # nothing above the diagonal
        inner = nx.from_numpy_array(reordered[start:stop, start:stop].astype(int), create_using=nx.DiGraph)
        assert nx.is_strongly_connected(inner)  # irreducible
        start = stop
    assert not (d.condensation & np.eye(d.n_scc, dtype=bool)).any()


@pytest.mark.parametrize("engine", ENGINES)
class TestEdgeCases:
    @pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (1, 1), (3, 2)])
    def test_all_zero(self, engine, shape):
        s = cx.decompose(np.zeros(shape), engine=engine)
        assert (s.n_blocks, len(s.dormant_rows), len(s.dormant_cols)) == (0, *shape)
        y, x = s.tables()
        assert len(y) == shape[0]
        assert len(x) == shape[1]

    @pytest.mark.parametrize("shape", [(1, 1), (1, 70), (70, 1), (64, 128), (3, 65)])
    def test_all_one(self, engine, shape):
        s = cx.decompose(np.ones(shape), engine=engine)
        assert s.n_blocks == 1
        assert s.macs == shape[0] * shape[1]
        assert s.largest_share == 1.0

    @pytest.mark.parametrize("n", [0, 1, 2, 3])
    def test_directed_without_edges(self, engine, n):
        d = cx.decompose(np.zeros((n, n)), kind="directed", engine=engine)
        assert d.n_scc == d.n_components == n
        assert d.isolated.all()
        assert d.blocks == []

    def test_a_self_loop_is_a_block(self, engine):
        d = cx.decompose(np.array([[0, 0], [0, 1]]), kind="directed", engine=engine)
        assert d.isolated.tolist() == [True, False]
        assert [b.tolist() for b in d.blocks] == [[1]]
        assert d.P.source.tolist() == [1, 0]  # isolated last, whatever its component number

    def test_two_node_cycle(self, engine):
        d = cx.decompose(np.array([[0, 1], [1, 0]]), kind="directed", engine=engine)
        assert (d.n_scc, d.n_layers, d.n_components) == (1, 1, 1)


@pytest.mark.parametrize("side", ["source", "image"])
@given(mask=masks)
@settings(max_examples=60)
def test_co_source_and_co_image_give_the_same_blocks(side, mask):
    from crystallite.structure.boolean import bipartite_labels

    rows, cols = bipartite_labels(torch.from_numpy(mask), side)
    assert cx.BipartiteStructure.from_labels(rows.numpy(), cols.numpy()) == cx.decompose(mask)


DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int32", "uint8"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["bipartite", "directed"])
def test_dtypes_are_compared_exactly(dtype, kind):
    torch.manual_seed(0)
    w = (torch.randn(130, 130) * 3).clamp(-100, 100)
    w = (w.abs() if dtype == "uint8" else w).to(getattr(torch, dtype))
    for threshold in (None, 0.0, 2.0, 6.3, float(w.double().abs().max())):
        kept = w.double() != 0 if threshold is None else w.double().abs() >= threshold
        assert cx.decompose(w, kind, threshold=threshold) == cx.decompose(kept, kind)


def test_threshold_boundary_is_inclusive_for_every_float():
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        w = torch.tensor([[0.1]], dtype=dtype)
        value = float(w.double())
        assert cx.decompose(w, threshold=value).n_blocks == 1
        assert cx.decompose(w, threshold=np.nextafter(value, 1)).n_blocks == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_minus_zero_is_a_threshold_of_zero(engine):
    w = np.eye(2)
    for zero in (-0.0, np.array([-0.0, -0.0])):
        assert cx.decompose(w, threshold=zero, engine=engine) == cx.decompose(w, threshold=0.0)


@given(npst.arrays(np.float32, (5, 70), elements=st.floats(-2, 2, width=32)), st.data())
@settings(max_examples=50)
def test_thresholds_per_column(w, data):
    limits = np.array(data.draw(st.lists(st.floats(0, 2), min_size=70, max_size=70)))
    expected = cx.decompose(np.abs(w.astype(float)) >= limits)
    assert cx.decompose(w, threshold=limits) == expected
    assert cx.decompose(np.asfortranarray(w), threshold=limits) == expected
    assert cx.decompose(w, threshold=limits, engine="matrix") == expected


def _layouts(w, tmp_path):
    yield "column-major", np.asfortranarray(w)
    yield "reversed", w[::-1, ::-1][::-1, ::-1]
    yield "strided", np.repeat(np.repeat(w, 2, 0), 3, 1)[::2, ::3]
    yield "torch transpose", torch.from_numpy(w.T.copy()).T
    yield "big-endian", w.astype(">f4")
    path = tmp_path / "w.bin"
    w.tofile(path)
    yield "memory-mapped", np.memmap(path, np.float32, "r", shape=w.shape)
    yield "list", w.tolist()


def test_any_memory_layout(tmp_path):
    rng = np.random.default_rng(0)
    w = (rng.random((150, 150)) < 0.01) * rng.standard_normal((150, 150)).astype(np.float32)
    bipartite, directed = cx.decompose(w), cx.decompose(w, kind="directed")
    for layout, same in _layouts(w.astype(np.float32), tmp_path):
        for engine in ENGINES:
            assert cx.decompose(same, engine=engine) == bipartite, layout
            assert cx.decompose(same, kind="directed", engine=engine) == directed, layout


def test_threads_and_blocks_do_not_change_the_result(monkeypatch):
    rng = np.random.default_rng(1)
    mask = rng.random((700, 900)) < 0.0006
    wanted = cx.decompose(mask, engine="matrix")
    before = torch.get_num_threads()
    monkeypatch.setattr("crystallite.core.parallel._BYTES_PER_THREAD", 1)
    monkeypatch.setattr("crystallite.core.arrays._BLOCK_BYTES", 2000)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert cx.decompose(mask) == wanted
            assert cx.decompose(np.asfortranarray(mask)) == wanted
            assert cx.decompose(np.repeat(mask, 2, 1)[:, ::2]) == wanted
    finally:
        torch.set_num_threads(before)


BAD = {
    "NaN": ([[1.0, np.nan]], {}, "finite"),
    "infinity": (torch.tensor([[1.0], [-np.inf]]), {}, "finite"),
    "NaN in the last columns": (np.pad([[np.nan]], ((0, 0), (70, 0))), {"threshold": 9.0}, "finite"),
    "NaN in bfloat16": (torch.tensor([[np.nan]], dtype=torch.bfloat16), {"threshold": 3}, "finite"),
    "complex": (np.ones((2, 2), complex), {}, "complex"),
    "strings": ([["a", "b"]], {}, "real numbers"),
    "objects": ([[None]], {}, "real numbers"),
    "ragged": ([[1, 2], [3]], {}, "rectangular"),
    "3-D": (np.ones((2, 2, 2)), {}, "2-D"),
    "1-D": (np.ones(3), {}, "2-D"),
    "sparse tensor": (torch.eye(3).to_sparse(), {}, "to_dense"),
    "sparse matrix": (scipy.sparse.eye_array(3), {}, "toarray"),
    "nothing": (None, {}, "NoneType"),
    "no numbers": (torch.empty(2, 2, device="meta"), {}, "meta"),
    "extended precision": (np.ones((2, 2), np.longdouble), {}, "float64, 32"),
    "ragged thresholds": (np.ones((2, 3)), {"threshold": [[1], [1, 2]]}, "threshold"),
    "not square": (np.ones((2, 3)), {"kind": "directed"}, "square"),
    "negative threshold": (np.ones((2, 3)), {"threshold": -1.0}, "threshold"),
    "NaN threshold": (np.ones((2, 3)), {"threshold": np.nan}, "threshold"),
    "text threshold": (np.ones((2, 3)), {"threshold": "1"}, "threshold"),
    "thresholds of another matrix": (np.ones((2, 3)), {"threshold": np.ones(2)}, "one per column"),
    "threshold above the type": (np.ones((2, 3), np.uint8), {"threshold": 300}, "uint8"),
    "unknown kind": (np.ones((2, 2)), {"kind": "undirected"}, "kind"),
    "unknown engine": (np.ones((2, 2)), {"engine": "gpu"}, "engine"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_clear_error(case, engine):
    matrix, options, message = BAD[case]
    if engine == "matrix" and case == "threshold above the type":
        pytest.skip("the matrix engine compares in float64")
    with pytest.raises(cx.CrystalliteError, match=message):
        cx.decompose(matrix, **{"engine": engine, **options})


def test_the_error_names_the_tensor_and_the_entry():
    w = np.zeros((200, 90), np.float32)
    w[150, 80] = np.nan
    for array, where in ((w, r"\(150, 80\)"), (np.asfortranarray(w), r"\(150, 80\)")):
        with pytest.raises(cx.InvalidMatrix, match=rf"encoder\.0: .*{where}"):
            cx.decompose(array, name="encoder.0")


def test_structures_are_frozen():
    s = cx.decompose(paper.M_PRIME)
    with pytest.raises(AttributeError):
        s.n_blocks = 2
    with pytest.raises(ValueError, match="read-only"):
        s.row_block[0] = 9


def test_printing():
    assert repr(cx.decompose(paper.M_PRIME)) == (
        "BipartiteStructure(12×12: 3 blocks, largest 4×3, dormant 2 rows and 2 columns)"
    )
    assert repr(cx.decompose(paper.M18, kind="directed")) == (
        "DirectedStructure(18 nodes: 9 SCCs, largest 3; 4 weak components, 3 layers, 1 isolated)"
    )


@pytest.mark.parametrize("columns", [False, True], ids=["one threshold", "one per column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_set_that_most_rows_are_in(dtype, columns):
    """Rows of the common set skip columns that are known; others, and what joins it late, must not be lost."""
    rng = np.random.default_rng(0)
    w = rng.uniform(0, 0.5, (400, 640))
    common = rng.permutation(400)[:300]
    w[common[:, None], rng.integers(0, 560, (300, 6))] = 1  # one set, and 80 columns that it never meets
    others = np.setdiff1d(np.arange(400), common)
    w[others[:50], 560 + np.arange(50)] = 1
    w[others[50:60, None], [600, 601]] = 1
    w[common[-1], 600] = 1  # the last one brings these into it
    limits = rng.uniform(0.6, 0.9, 640) if columns else 0.75
    tensor = torch.tensor(w).to(dtype)
    found = cx.decompose(tensor, threshold=limits)
    mask = tensor.double().numpy() >= limits
    n = sum(mask.shape)
    edges = np.argwhere(mask) + np.array([0, 400])
    graph = scipy.sparse.coo_array((np.ones(len(edges)), edges.T), shape=(n, n))
    count, labels = scipy.sparse.csgraph.connected_components(graph, directed=False)
    assert found.n_blocks + len(found.dormant_rows) + len(found.dormant_cols) == count
    both = np.concatenate([found.row_block, found.col_block])
    for block in range(found.n_blocks):
        assert len(np.unique(labels[both == block])) == 1
    tensor[common[-1], 3] = float("inf")
    with pytest.raises(cx.InvalidMatrix, match="finite"):
        cx.decompose(tensor, threshold=limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.002, 0.01, 0.2])
def test_marked_entries_join_what_all_entries_join(dtype, share):
    """Rows and columns without a survivor are in no set, whatever the marks say of them."""
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    w[5, 0] = 9.0
    w[100:103] = w[:, 50:53] = 0.001
    matrix = magnitudes(w)
    limit = matrix.patterns(np.full(200, float(w.float().abs().quantile(1 - share))))  # one for each column
    everything, survivors = packed(matrix, np.zeros_like(limit)), packed(matrix, limit)
    expected = column_components(matrix, limit)
    assert (expected[0][100:103] == -1).all()
    assert (expected[1][50:53] == -1).all()
    for words in (everything, survivors):
        for found, wanted in zip(marked_components(matrix, limit, words), expected, strict=True):
            assert np.array_equal(found < 0, wanted < 0)
            pairs = set(zip(found[found >= 0].tolist(), wanted[found >= 0].tolist(), strict=True))
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
