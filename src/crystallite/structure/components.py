"""Components of a thresholded matrix in one streaming pass: the graph engine for feed-forward matrices."""

from __future__ import annotations

import numpy as np

from crystallite.core.arrays import Magnitudes
from crystallite.core.errors import InvalidMatrix
from crystallite.core.parallel import over_rows, thread_count
from crystallite.structure import kernels
from crystallite.structure.marked_kernels import link_marked

__all__ = ["column_components", "kernel_arguments", "kernel_mask", "marked_components", "refuse_non_finite"]


def kernel_arguments(matrix: Magnitudes, threshold: int | np.ndarray) -> tuple:
    """(mask, threshold, infinity) as the kernels take them: storage integers of the matrix's own width."""
    storage = matrix.storage
    infinity = matrix.infinity if matrix.infinity <= matrix.mask else 0
    return kernel_mask(matrix), np.asarray(threshold, storage)[()], storage(infinity)


def kernel_mask(matrix: Magnitudes) -> np.integer:
    """The mask in the storage integer's width, signed if it clears the sign bit."""
    width = matrix.storage(0).itemsize
    return np.dtype(f"i{width}" if matrix.mask < 1 << (8 * width - 1) else f"u{width}").type(matrix.mask)


def refuse_non_finite(matrix: Magnitudes, row: int, name: str) -> None:
    """Raise `InvalidMatrix` if a kernel stopped at a row (it returns −1 when it did not)."""
    if row >= 0:
        entries = matrix.block(row, row + 1)[0] & matrix.storage(matrix.mask)
        col = int(np.argmax(entries >= matrix.infinity))
        where = (col, row) if matrix.transposed else (row, col)
        raise InvalidMatrix(f"{name}: expected finite numbers, got NaN or infinity at {where}")


def column_components(
    matrix: Magnitudes, threshold: int | np.ndarray, name: str = "matrix"
) -> tuple[np.ndarray, np.ndarray]:
    """Set labels of rows and columns under the survivors ≥ threshold; −1 where a row or column has none.

    A label is a column index that the set contains. O(rows · cols) reads, O(rows + cols) memory per thread.
    """
    rows, cols = matrix.shape
    mask, limit, infinity = kernel_arguments(matrix, threshold)
    anchor = np.full(rows, -1, np.int32)
    forests = np.full((thread_count(matrix), cols), -1, np.int32)
    common = np.tile(np.array([-1, 0], np.int32), (len(forests), 1))
    limits = np.empty((len(forests), cols), matrix.storage)
    floors = np.empty((len(forests), cols // 64), matrix.storage)

    def link(thread: int, first_row: int, block: np.ndarray) -> None:
        bad = kernels.link_columns(
            block, first_row, mask, limit, infinity, anchor, forests[thread], common[thread], limits[thread],
            floors[thread],
        )  # fmt: skip
        refuse_non_finite(matrix, bad, name)

    over_rows(matrix, link)
    return _labels(anchor, forests)


def marked_components(
    matrix: Magnitudes, threshold: int | np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`column_components` of a matrix of finite entries whose candidates are marked, a superset of the survivors.

    Reads the marks, one bit per entry, and the entries that they name.

    Args:
        matrix: The matrix.
        threshold: A pattern, or one per column.
        words: (rows, ⌈cols / 64⌉): bit j % 64 of [i, j // 64] is set at least where entry (i, j) survives.
    """
    rows, cols = matrix.shape
    mask, limit, _ = kernel_arguments(matrix, threshold)
    anchor = np.full(rows, -1, np.int32)
    forests = np.full((thread_count(matrix), cols), -1, np.int32)
    common = np.tile(np.array([-1, 0], np.int32), (len(forests), 1))
    settled = np.zeros((len(forests), words.shape[1]), np.uint64)

    def link(thread: int, first_row: int, block: np.ndarray) -> None:
        link_marked(block, first_row, mask, limit, words, anchor, forests[thread], common[thread], settled[thread])

    over_rows(matrix, link)
    return _labels(anchor, forests)


def _labels(anchor: np.ndarray, forests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The set of each row and column, from a column of each row's set and what each thread has joined."""
    forest = forests[0]
    for other in forests[1:]:
        kernels.merge_forest(forest, other)
    kernels.flatten_forest(forest)
    row_label = np.where(anchor >= 0, forest[anchor], -1) if len(forest) else np.full(len(anchor), -1, np.int32)
    return row_label, forest
