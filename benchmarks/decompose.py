"""Components, directed structure and level profiles against one read pass and against the libraries people use.

Ratios are times divided by one `torch.sum` over the same matrix in the same run ("× read"), and peers' times divided
by ours ("× ours"). Peers start, as we do, from the dense array in memory, so building their graph counts.
"""

from __future__ import annotations

import igraph
import networkx as nx
import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse import csgraph

import crystallite as cx
from benchmarks.timing import interleaved, peak_extra_bytes, show, store

SHAPES = [(768, 3072), (4096, 4096), (4096, 16384), (16384, 16384)]
SURVIVORS = {"0.1 %": 3.2905, "1 %": 2.5758, "20 %": 1.2816}  # two-sided normal quantiles
NETWORKX_EDGES, IGRAPH_EDGES, GRAPHBLAS_EDGES = 1_000_000, 15_000_000, 15_000_000  # beyond: minutes, or no memory
SPANNING_TREE_ENTRIES = 70_000_000


def bipartite_csr(w: np.ndarray, c: float) -> sp.csr_array:
    """Adjacency of rows → columns, built the cheap way: shifted column indices, empty rows for the columns."""
    m = sp.csr_array(np.abs(w) >= c)
    rows, cols = m.shape
    indptr = np.concatenate([m.indptr, np.full(cols, m.indptr[-1])])
    return sp.csr_array((m.data, m.indices + rows, indptr), shape=(rows + cols, rows + cols))


def scipy_components(w: np.ndarray, c: float) -> int:
    return csgraph.connected_components(bipartite_csr(w, c), directed=False)[0]


def scipy_strong(w: np.ndarray, c: float) -> int:
    return csgraph.connected_components(sp.csr_array(np.abs(w) >= c), directed=True, connection="strong")[0]


def scipy_spanning_tree(w: np.ndarray) -> sp.csr_array:
    graph = bipartite_csr(w, 0.0).astype(np.float32)
    graph.data = -np.abs(w).ravel()
    return csgraph.minimum_spanning_tree(graph, overwrite=True)


def networkx_components(w: np.ndarray, c: float) -> int:
    g = nx.Graph()
    g.add_nodes_from(range(sum(w.shape)))
    rows, cols = np.nonzero(np.abs(w) >= c)
    g.add_edges_from(zip(rows.tolist(), (cols + w.shape[0]).tolist(), strict=True))
    return nx.number_connected_components(g)


def networkx_strong(w: np.ndarray, c: float) -> int:
    g = nx.DiGraph()
    g.add_nodes_from(range(len(w)))
    rows, cols = np.nonzero(np.abs(w) >= c)
    g.add_edges_from(zip(cols.tolist(), rows.tolist(), strict=True))
    return nx.number_strongly_connected_components(g)


def igraph_components(w: np.ndarray, c: float, directed: bool = False) -> int:
    rows, cols = np.nonzero(np.abs(w) >= c)
    n = len(w) if directed else sum(w.shape)
    edges = np.column_stack([rows, cols if directed else cols + w.shape[0]])
    return len(igraph.Graph(n, edges, directed=directed).connected_components("strong" if directed else "weak"))


def graphblas_components(w: np.ndarray, c: float) -> int:
    """FastSV (hook to the smallest neighbouring label, then shortcut) in python-graphblas."""
    import graphblas as gb

    rows, cols = np.nonzero(np.abs(w) >= c)
    n = sum(w.shape)
    a = gb.Matrix.from_coo(
        np.concatenate([rows, cols + w.shape[0]]), np.concatenate([cols + w.shape[0], rows]), True, nrows=n, ncols=n
    )
    label = np.arange(n)
    while True:
        f = gb.Vector.from_dense(label)
        least = gb.semiring.min_second(a @ f).new()
        merged = f.ewise_add(least, gb.binary.min).new().to_dense(n)
        hooked = label.copy()
        np.minimum.at(hooked, label, merged)
        hooked = np.minimum(hooked, merged)
        hooked = hooked[hooked]
        if np.array_equal(hooked, label):
            return len(np.unique(label))
        label = hooked


def components(w: torch.Tensor, share: str, c: float) -> dict:
    array = w.numpy()
    edges = int(w.numel() * float(share.split()[0]) / 100)
    calls = {"read": lambda: torch.sum(w), "ours": lambda: cx.decompose(w, threshold=c)}
    calls["scipy"] = lambda: scipy_components(array, c)
    if edges <= NETWORKX_EDGES:
        calls["networkx"] = lambda: networkx_components(array, c)
    if edges <= IGRAPH_EDGES:
        calls["igraph"] = lambda: igraph_components(array, c)
    if edges <= GRAPHBLAS_EDGES:
        calls["graphblas"] = lambda: graphblas_components(array, c)
    expected = scipy_components(array, c)
    s = cx.decompose(w, threshold=c)
    assert s.n_blocks + len(s.dormant_rows) + len(s.dormant_cols) == expected
    return _row("components", w, share, interleaved(calls), peak_extra_bytes(lambda: cx.decompose(w, threshold=c)))


def directed(w: torch.Tensor, share: str, c: float) -> dict:
    array = w.numpy()
    edges = int(w.numel() * float(share.split()[0]) / 100)
    calls = {"read": lambda: torch.sum(w), "ours": lambda: cx.decompose(w, "directed", threshold=c)}
    calls["scipy"] = lambda: scipy_strong(array, c)
    if edges <= NETWORKX_EDGES:
        calls["networkx"] = lambda: networkx_strong(array, c)
    if edges <= IGRAPH_EDGES:
        calls["igraph"] = lambda: igraph_components(array, c, directed=True)
    assert cx.decompose(w, "directed", threshold=c).n_scc == scipy_strong(array, c)
    memory = peak_extra_bytes(lambda: cx.decompose(w, "directed", threshold=c))
    return _row("directed", w, share, interleaved(calls), memory)


def profile(w: torch.Tensor) -> dict:
    array = w.numpy()
    calls = {"read": lambda: torch.sum(w), "ours": lambda: cx.level_profile(w)}
    if w.numel() <= SPANNING_TREE_ENTRIES:
        calls["scipy"] = lambda: scipy_spanning_tree(array)
        tree = np.sort(-scipy_spanning_tree(array).data)[::-1]
        assert np.array_equal(tree, cx.level_profile(w).weights)
    else:
        cx.level_profile(w)
    return _row("level_profile", w, "all", interleaved(calls), peak_extra_bytes(lambda: cx.level_profile(w)))


def _row(task: str, w: torch.Tensor, share: str, best: dict[str, float], memory: int) -> dict:
    row = {"task": task, "shape": f"{w.shape[0]}×{w.shape[1]}", "survivors": share, "ms": best["ours"] * 1e3}
    row["× read"] = best["ours"] / best["read"]
    for peer in ("scipy", "igraph", "graphblas", "networkx"):
        row[f"{peer} × ours"] = best[peer] / best["ours"] if peer in best else None
    row["extra memory"] = f"{memory / w.nbytes:.1%}"
    return row


def growth() -> list[dict]:
    """Time against size: the rows are doubled again and again."""
    rows: list[dict] = []
    for n in (2048, 4096, 8192, 16384):
        w = torch.randn(n, 8192)
        tasks = {
            "components": lambda w=w: cx.decompose(w, threshold=2.5758),
            "level_profile": lambda w=w: cx.level_profile(w),
        }
        best = interleaved({"read": lambda w=w: torch.sum(w), **tasks}, repeats=9)
        row = {"shape": f"{n}×8192", **{f"{k} ms": v * 1e3 for k, v in best.items()}}
        if rows:
            for task in tasks:
                row[f"{task} growth"] = row[f"{task} ms"] / rows[-1][f"{task} ms"]
        rows.append(row)
    return rows


def main() -> None:
    torch.manual_seed(0)
    measured: list[dict] = []
    for shape in SHAPES:
        w = torch.randn(shape)
        measured += [components(w, share, c) for share, c in SURVIVORS.items()]
        if shape[0] == shape[1]:
            measured += [directed(w, share, c) for share, c in SURVIVORS.items()]
        measured.append(profile(w))
        show("decompose (float32; × read: time over one torch.sum of the same matrix)", measured[-7:])
    grown = growth()
    show("growth: the matrix doubles", grown)
    store("decompose", measured + grown)
