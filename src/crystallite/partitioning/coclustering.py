"""Spectral co-clustering of a non-negative matrix, with a number of modules that may be one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.linalg import qr, svd
from scipy.optimize import linear_sum_assignment

__all__ = ["Clusters", "agreement", "assign", "cocluster", "spectrum"]

# Calibrated on single-task networks (benchmarks/discovery.py): there σ₂ stays below 0.37 and the gap below 1.35.
_BULK = 0.2  # singular values below this are what any single task has
_UNSEEN = 0.3  # what is taken for σ_{k+1} if the matrix has only k rows or columns
_GAP = 1.6  # a split is proposed if σ_k is larger than what follows by this factor
_CONTROLS = 20  # shuffled matrices
_DEVIATIONS = 5  # standard deviations of their σ₂ that σ_k must lie above its mean
_EXACT = 1 - 1e-9  # singular values above this belong to parts that share nothing


class Clusters(NamedTuple):
    """Modules of rows and columns; −1 is a row or column of zeros."""

    rows: np.ndarray
    cols: np.ndarray
    spectrum: np.ndarray  # descending, σ₁ = 1
    gap: float  # σ_k / σ_{k+1} of the best k ≥ 2

    @property
    def k(self) -> int:
        return int(self.rows.max(initial=-1)) + 1


def spectrum(matrix: np.ndarray) -> np.ndarray:
    """Singular values of D_r^(−½) A D_c^(−½), descending; σ₁ = 1, and one more 1 for each further separate part.

    >>> spectrum(np.array([[2.0, 0.0], [0.0, 5.0]])).round(6).tolist(), spectrum(np.ones((2, 3))).round(6).tolist()
    ([1.0, 1.0], [1.0, 0.0])
    """
    live = _live(matrix)[0]
    return _decompose(live)[1] if live.size else np.zeros(0)


def cocluster(matrix: np.ndarray) -> Clusters:
    """Modules of the rows and columns of a non-negative matrix, numbered by their first row.

    k̂ = argmax_k σ_k / max(σ_{k+1}, 0.2) over k ≥ 2 if that gap exceeds 1.6 and σ_k is no accident, 5 standard
    deviations above the σ₂ of matrices with shuffled entries; else the number of parts that share nothing (σ = 1),
    which is 1 for most. Rows and columns of zeros belong to no module. With only k rows or columns there is no σ_{k+1}
    to compare with, and 0.3 is taken for it: two rows that use the columns differently enough count as two modules.

    >>> cocluster(np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]))[:2]
    (array([0, 1]), array([0, 1, 0]))
    """
    live, rows, cols = _live(matrix)
    row_labels, col_labels = np.full(len(matrix), -1), np.full(matrix.shape[1], -1)
    if not live.size:
        return Clusters(row_labels, col_labels, np.zeros(0), 1.0)
    left, values, right = _decompose(live)
    k, gap = _choose(live, values)
    row_labels[rows], col_labels[cols] = _labels(live, left[:, :k], right[:, :k])
    return Clusters(row_labels, col_labels, values, gap)


def assign(matrix: np.ndarray, row_labels: np.ndarray) -> np.ndarray:
    """The module each column belongs to: that whose rows have more of it than of the other columns; −1 for zeros.

    >>> assign(np.array([[9.0, 1.0, 0.0], [1.0, 1.0, 0.0]]), np.array([0, 1]))
    array([ 0,  1, -1])
    """
    k = int(row_labels.max(initial=-1)) + 1
    shares = np.stack([matrix[row_labels == b].sum(0) for b in range(k)]) if k else np.zeros((1, matrix.shape[1]))
    totals = shares.sum(1, keepdims=True)
    labels = np.argmax(shares / np.where(totals > 0, totals, 1), axis=0)
    labels[matrix.sum(0) == 0] = -1
    return labels


def agreement(found: np.ndarray, expected: np.ndarray) -> float:
    """Share of the elements with the same label, after the best renaming of the labels found; −1 only means −1.

    >>> agreement(np.array([1, 1, 0, 0]), np.array([0, 0, 1, 0]))
    0.75
    """
    if not len(found):
        return 1.0
    live = (found >= 0) & (expected >= 0)
    table = np.zeros((found.max(initial=-1) + 1, expected.max(initial=-1) + 1), int)
    np.add.at(table, (found[live], expected[live]), 1)
    matched = int(table[linear_sum_assignment(-table)].sum())
    return (matched + int(((found < 0) & (expected < 0)).sum())) / len(found)


def _live(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, cols = np.flatnonzero(matrix.sum(1)), np.flatnonzero(matrix.sum(0))
    return matrix[np.ix_(rows, cols)], rows, cols


def _decompose(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    normalised = matrix / np.sqrt(matrix.sum(1))[:, None] / np.sqrt(matrix.sum(0))
    left, values, right = svd(normalised, full_matrices=False)
    return left, values, right.T


def _choose(matrix: np.ndarray, values: np.ndarray) -> tuple[int, float]:
    if len(values) < 2:
        return 1, 1.0
    gaps = values[1:] / np.append(np.maximum(values[2:], _BULK), _UNSEEN)  # of k = 2, 3, …
    k = int(np.argmax(gaps)) + 2
    gap = float(gaps[k - 2])
    separate = int((values >= _EXACT).sum())
    split = k > separate and gap > _GAP and values[k - 1] > _chance(matrix)
    return (k if split else separate), gap


def _chance(matrix: np.ndarray) -> float:
    """What σ₂ of a matrix without modules may reach: row sums times column sums, with the deviations shuffled."""
    rng = np.random.default_rng(0)
    expected = matrix.sum(1, keepdims=True) * matrix.sum(0) / matrix.sum()
    deviations = (matrix / expected).ravel()
    found = []
    for _ in range(_CONTROLS):
        shuffled, _, _ = _live(rng.permutation(deviations).reshape(matrix.shape) * expected)
        found.append(float(_decompose(shuffled)[1][1:2].sum()))
    return float(np.mean(found) + _DEVIATIONS * np.std(found))


def _labels(matrix: np.ndarray, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k modules from the k leading singular vectors, without a random start (Damle, Minden and Ying 2019).

    The directions of rows and columns bundle around k orthogonal ones. Pivoted QR finds a member of each bundle; what
    is closest to whom is then settled by turns, rows by what they have of the columns and back.
    """
    k = left.shape[1]
    points = np.concatenate([left, right])
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    points = points / np.where(lengths > 0, lengths, 1)
    pivots = qr(points.T, mode="r", pivoting=True)[1][:k]
    u, _, v = svd(points[pivots].T)
    rows = np.argmax(np.abs(points[: len(left)] @ (u @ v)), axis=1)
    for _ in range(20):
        cols = assign(matrix, rows)
        by_columns = assign(matrix.T, cols)
        if np.array_equal(by_columns, rows) or len(np.unique(by_columns)) < k:
            break
        rows = by_columns
    first = np.unique(rows, return_index=True)[1]
    renamed = np.argsort(np.argsort(first))
    rows = renamed[np.searchsorted(np.unique(rows), rows)]
    return rows, assign(matrix, rows)
