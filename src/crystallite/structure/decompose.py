"""`decompose`: from a mask or a thresholded weight matrix to its blocks, by either engine."""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
import torch

from crystallite.core.arrays import Magnitudes, as_matrix, magnitudes
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.suggest import suggest_keywords
from crystallite.structure import boolean, strong
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.components import column_components
from crystallite.structure.directed import DirectedStructure

__all__ = ["decompose", "directed_from_words", "edge_patterns", "expand_columns"]

Threshold = float | np.ndarray | torch.Tensor | None


@overload
def decompose(
    matrix: Any,
    kind: Literal["bipartite"] = ...,
    engine: Literal["graph", "matrix"] = ...,
    *,
    threshold: Threshold = ...,
    name: str = ...,
) -> BipartiteStructure: ...


@overload
def decompose(
    matrix: Any,
    kind: Literal["directed"],
    engine: Literal["graph", "matrix"] = ...,
    *,
    threshold: Threshold = ...,
    name: str = ...,
) -> DirectedStructure: ...


@suggest_keywords
def decompose(
    matrix: Any,
    kind: Literal["bipartite", "directed"] = "bipartite",
    engine: Literal["graph", "matrix"] = "graph",
    *,
    threshold: Threshold = None,
    name: str = "matrix",
) -> BipartiteStructure | DirectedStructure:
    """The blocks of a mask, or of the entries |w| ≥ threshold of a weight matrix (nonzero entries without one).

    The graph engine needs O(rows + cols) extra memory, or one bit per entry for kind="directed".

    Args:
        matrix: NumPy (memory-mapped too) or torch, float64 to float8, of any strides.
        kind: "bipartite" for feed-forward matrices, whose rows and columns are different neurons (paper, section 7);
            "directed" for square feedback matrices, W(i, j) ≠ 0 ⇔ j → i (section 8).
        engine: "graph" streams the matrix once at memory speed; "matrix" is the paper's Boolean algebra on torch
            tensors, on whatever device the matrix is. Both give equal structures.
        threshold: one number ≥ 0, or one per column. The weights are compared where they lie: no mask is built.
        name: what errors call the matrix.

    Returns:
        A `BipartiteStructure`, or a `DirectedStructure`.

    Raises:
        InvalidOption: an option outside the values it may take.
        InvalidMatrix: NaN or infinity, a shape that does not fit the kind, or no numbers.

    Examples:
        >>> decompose([[0.9, 0.0, 0.1], [0.0, 0.7, 0.0]], threshold=0.5)
        BipartiteStructure(2×3: 2 blocks, largest 1×1, dormant 0 rows and 1 column)
    """
    array = as_matrix(matrix, name)
    if kind not in ("bipartite", "directed"):
        raise InvalidOption(f'kind must be "bipartite" or "directed", got {kind!r}')
    if engine not in ("graph", "matrix"):
        raise InvalidOption(f'engine must be "graph" or "matrix", got {engine!r}')
    if kind == "directed" and array.shape[0] != array.shape[1]:
        raise InvalidMatrix(f'{name}: kind="directed" needs a square matrix, got shape {tuple(array.shape)}')
    limits = _column_limits(threshold, array.shape[1])
    if engine == "matrix":
        edges = _boolean_mask(array, limits, name)
        return _directed_by_algebra(edges) if kind == "directed" else _bipartite_by_algebra(edges)
    if kind == "directed":
        return _directed_by_search(array, limits, name)
    return _bipartite_by_search(magnitudes(array, name), limits, name)


def edge_patterns(matrix: Magnitudes, threshold: Threshold) -> int | np.ndarray:
    """A caller's threshold, checked, as patterns of the matrix's format."""
    return _patterns(matrix, _column_limits(threshold, matrix.shape[1]))


def _column_limits(threshold: Threshold, cols: int) -> float | np.ndarray | None:
    """The threshold as one number or one per column, checked."""
    if threshold is None or (isinstance(threshold, float) and 0 <= threshold < float("inf")):
        return threshold
    try:
        limits = np.asarray(threshold.detach().cpu() if isinstance(threshold, torch.Tensor) else threshold)
    except ValueError:  # ragged
        limits = np.asarray(None)
    if limits.dtype.kind not in "fiu" or not np.all(limits >= 0) or not np.all(np.isfinite(limits)):
        raise InvalidOption(f"threshold must be a finite number ≥ 0, or one per column, got {threshold!r}")
    if limits.ndim and limits.shape != (cols,):
        raise InvalidOption(f"threshold must be one number or {cols} (one per column), got shape {limits.shape}")
    return limits.astype(np.float64) if limits.ndim else float(limits)


def _patterns(matrix: Magnitudes, limits: float | np.ndarray | None) -> int | np.ndarray:
    """Thresholds as patterns of the matrix's format; no threshold keeps whatever is not zero."""
    if limits is None:
        return 1
    if isinstance(limits, float):
        return matrix.pattern(limits)
    return matrix.patterns(limits)


def _bipartite_by_search(matrix: Magnitudes, limits: float | np.ndarray | None, name: str) -> BipartiteStructure:
    if matrix.transposed and isinstance(limits, np.ndarray):  # thresholds follow columns, the memory follows rows
        matrix = Magnitudes(matrix.bits.T, matrix.format)
    rows, cols = column_components(matrix, _patterns(matrix, limits), name)
    return BipartiteStructure.from_labels(*((cols, rows) if matrix.transposed else (rows, cols)))


def _directed_by_search(array: Any, limits: float | np.ndarray | None, name: str) -> DirectedStructure:
    matrix = magnitudes(array, name)
    if matrix.transposed:  # directions matter: read the rows of the caller's matrix
        matrix = Magnitudes(matrix.bits.T, matrix.format)
    return directed_from_words(strong.packed(matrix, _patterns(matrix, limits), name))


def directed_from_words(words: np.ndarray) -> DirectedStructure:
    """The structure of a bit matrix whose row i holds the predecessors of node i (see `strong.packed`)."""
    emitted, count = strong.strong_components(words)
    _, first = np.unique(emitted, return_index=True)
    number = np.empty(count, np.intp)  # renumber the SCCs by their first node
    number[np.argsort(first)] = np.arange(count)
    scc = number[emitted]
    largest = int(np.bincount(scc).argmax()) if count else 0
    condensed = strong.condense(words, scc, count, largest)
    layer, weak_root = strong.layers_and_weak_components(condensed, number)
    component = np.unique(weak_root, return_inverse=True)[1]  # a root is its set's first SCC, so this keeps the order
    diagonal = np.arange(len(scc))
    self_loop = (words[diagonal, diagonal // 64] >> (diagonal % 64).astype(np.uint64)) & np.uint64(1)
    return _directed(scc, component[scc], layer[scc].astype(np.intp), self_loop.astype(bool), condensed)


def expand_columns(weight: torch.Tensor, row_labels: np.ndarray) -> torch.Tensor:
    """(rows, labels · columns) every column once for each label, with the entries of the rows of that label alone.

    Rows of different labels then share no column, so `decompose` finds the blocks that are independent given the
    inputs, of which they may read the same. Column c of the weight is column c + l · columns for label l.

    >>> expand_columns(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), np.array([0, 1])).tolist()
    [[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]]
    """
    rows, columns = weight.shape
    wide = weight.new_zeros(rows, int(row_labels.max(initial=0)) + 1, columns)
    wide[torch.arange(rows, device=weight.device), torch.from_numpy(row_labels).to(weight.device)] = weight
    return wide.flatten(1)


def _directed(
    scc: np.ndarray, component: np.ndarray, layer: np.ndarray, self_loop: np.ndarray, condensed: np.ndarray
) -> DirectedStructure:
    alone = np.bincount(component)[component] == 1 if len(component) else np.zeros(0, bool)
    return DirectedStructure(scc, component, layer, alone & ~self_loop, condensed)


def _boolean_mask(array: Any, limits: float | np.ndarray | None, name: str) -> torch.Tensor:
    if isinstance(array, np.ndarray):  # copied: torch knows neither foreign byte orders nor read-only memory
        exact = array.dtype.newbyteorder("=") if array.dtype.kind in "biu" else np.float64
        array = torch.from_numpy(np.array(array, exact))
    tensor: torch.Tensor = array
    if tensor.is_floating_point():
        tensor = tensor.float() if tensor.element_size() < 4 else tensor  # float8 knows no comparison
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidMatrix(f"{name}: expected finite numbers, got NaN or infinity")
    if limits is None:
        return tensor != 0
    return tensor.double().abs() >= torch.as_tensor(limits, dtype=torch.float64, device=tensor.device)


def _bipartite_by_algebra(edges: torch.Tensor) -> BipartiteStructure:
    rows, cols = boolean.bipartite_labels(edges)
    return BipartiteStructure.from_labels(rows.cpu().numpy(), cols.cpu().numpy())


def _directed_by_algebra(edges: torch.Tensor) -> DirectedStructure:
    scc, component, layer, condensed = (t.cpu().numpy() for t in boolean.directed_labels(edges))
    words = strong.packed(magnitudes(condensed), 1)
    return _directed(scc, component, layer, edges.diagonal().cpu().numpy(), words)
