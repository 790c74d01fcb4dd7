"""Ways to cut a layer into k blocks, and the best of a few."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage

from crystallite.compression.operator_specs import Blocks, block_weights
from crystallite.partitioning.assignment import balanced_assignment, explained_variance
from crystallite.partitioning.coclustering import cocluster
from crystallite.statistics.regression import Regression

__all__ = ["best_cells"]

_DRAWS, _FEW_DRAWS = 12, 3  # random partitions of each kind that are tried; few for large matrices
_LARGE = 2**20  # weights of a matrix; in larger ones no modules are looked for
_UNEQUAL = 1.25  # blocks found in the layer may need this times the multiply-adds of equal ones


def best_cells(regression: Regression, blocks: int, seed: int) -> Blocks:
    """Balanced blocks of outputs and inputs that lose least on held-out samples.

    Tried are partitions of the inputs at random, and such that inputs which say nearly the same go to different
    blocks. Outputs then go where most of their variance is explained, all blocks being of equal size (±1). Modules that
    the layer itself has are tried too.
    """
    found = [_with_outputs(regression, labels, blocks) for labels in _input_labels(regression, blocks, seed)]
    found += _modules(regression, blocks)
    weights = (block_weights(regression.own, regression.metric, cells) for cells in found)
    errors = [regression.error(regression.whiten(weight)) for weight in weights]
    return found[int(np.argmin(errors))]


def _input_labels(regression: Regression, blocks: int, seed: int) -> Iterator[np.ndarray]:
    rng, inputs = np.random.default_rng(seed), len(regression.metric)
    draws = _DRAWS if regression.weight.numel() <= _LARGE else _FEW_DRAWS
    order = _by_correlation(regression.metric.cpu().numpy())
    for _ in range(draws):
        yield rng.permutation(np.arange(inputs) % blocks)
        labels = np.empty(inputs, np.intp)
        labels[order] = np.concatenate(
            [rng.permutation(blocks)[: inputs - start] for start in range(0, inputs, blocks)]
        )
        yield labels


def _by_correlation(metric: np.ndarray) -> np.ndarray:
    """Inputs in an order in which correlated ones stand together."""
    if len(metric) < 3:
        return np.arange(len(metric))
    scale = np.sqrt(metric.diagonal())
    distance = np.clip(1 - metric / np.outer(scale, scale), 0, 2)
    return leaves_list(linkage(distance[np.triu_indices(len(metric), 1)], "average"))


def _with_outputs(regression: Regression, labels: np.ndarray, blocks: int) -> Blocks:
    """The blocks of a partition of the inputs, each output where it is explained best, blocks being of equal size."""
    value = explained_variance(regression.metric, regression.metric @ regression.own.T, labels, blocks)
    owner = balanced_assignment(value.cpu().numpy(), blocks)
    return tuple((np.flatnonzero(owner == b), np.flatnonzero(labels == b)) for b in range(blocks))


def _modules(regression: Regression, blocks: int) -> list[Blocks]:
    """The blocks that the layer has by itself, if there are as many and none is much larger than the others."""
    weight = regression.own
    if weight.numel() > _LARGE:
        return []
    deviations = regression.metric.diagonal().sqrt()
    found = cocluster((weight * deviations).abs().cpu().numpy())
    rows, columns = found.rows, found.cols
    if found.k < blocks:
        return []
    if found.k > blocks:  # the largest first, each to the block that has least so far
        sizes = np.bincount(rows[rows >= 0], minlength=found.k) * np.bincount(columns[columns >= 0], minlength=found.k)
        room, owner = np.zeros(blocks), np.zeros(found.k, np.intp)
        for module in np.argsort(-sizes, kind="stable"):
            owner[module] = int(np.argmin(room))
            room[owner[module]] += sizes[module]
        rows, columns = (np.where(side < 0, -1, owner[side]) for side in (rows, columns))
    cells = tuple((np.flatnonzero(rows == b), np.flatnonzero(columns == b)) for b in range(blocks))
    macs = sum(len(r) * len(c) for r, c in cells)
    return [cells] if macs <= _UNEQUAL * weight.numel() / blocks else []
