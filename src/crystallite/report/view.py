"""What the report shows of one layer: pictures, levels, histogram and feedback graph, as plain arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crystallite.analysis.matrix import LayerAnalysis, MatrixAnalysis, channel_mask
from crystallite.annealing.anneal import Annealing
from crystallite.report.picture import NEVER, densities, level_order, share_stops
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.directed import DirectedStructure
from crystallite.structure.hubs import BorderedStructure
from crystallite.structure.levels import LevelProfile, level_profile
from crystallite.weights.layers import Layer

__all__ = ["Levels", "Outline", "View", "WeightHistogram", "view_layer"]

_FEEDBACK_STOPS = 25  # of feedback matrices: layers take one pass for each
_STOPS = 200  # of the slider; below NEVER, so that one fits a byte
_BINS = 72
_SAMPLE = 1 << 20  # weights in the histogram
_OUTLINES = 400  # beyond, rectangles are smaller than their own strokes


@dataclass(frozen=True)
class Outline:
    """A rectangle of a reordered matrix, in rows and columns: a block, or a border of hubs."""

    top: int
    left: int
    height: int
    width: int
    hub: bool = False


@dataclass(frozen=True)
class WeightHistogram:
    """The density of signed weights next to that of f0."""

    edges: np.ndarray  # (bins + 1,)
    density: np.ndarray  # (bins,)
    null_density: np.ndarray  # (bins,) mean of f0 over each bin
    threshold: float
    further: float  # the share of the weights that lies beyond the edges


@dataclass(frozen=True)
class Levels:
    """What the slider needs to show the matrix at each of its thresholds, all of it exact there.

    Feed-forward matrices have `gaps` and `is_row` (see `LevelOrder`), from which blocks and dormant neurons follow;
    feedback matrices have `counts`, read off a `DirectedProfile`.
    """

    thresholds: np.ndarray  # (stops,) descending
    null_levels: np.ndarray  # (stops,) P_f0(|w| ≥ threshold)
    kept: np.ndarray  # (stops,) entries
    entries: int
    cells: np.ndarray  # (shares, grid rows, grid cols) uint8: the first stop with that share of the cell
    gaps: np.ndarray  # (neurons − 1,) uint8: the first stop that joins two neighbours
    is_row: np.ndarray  # (neurons,)
    counts: dict[str, np.ndarray]
    start: int  # the stop at the level of the analysis


@dataclass(frozen=True)
class View:
    """Everything the report shows of one layer besides its numbers."""

    row: MatrixAnalysis
    before: np.ndarray  # (grid rows, grid cols) share of each cell that is kept
    after: np.ndarray
    outlines: list[Outline]
    histogram: WeightHistogram
    levels: Levels
    directed: DirectedStructure | None


def view_layer(found: LayerAnalysis, grid: int) -> View:
    """What the report shows of an analysed layer; grid is the most cells along a side."""
    layer, annealings, row, directed = found.layer, found.annealings, found.row, found.directed
    weights = _one_matrix(layer, annealings)
    edges, limits = _edges(layer, annealings)
    bordered = found.bordered if found.bordered is not None and found.bordered.separates else None
    stored = np.arange(row.rows), np.arange(row.cols)
    if directed is not None:
        order, outlines = (directed.P.source, directed.P.source), _diagonal([(len(b), len(b)) for b in directed.blocks])
    elif bordered is not None and bordered.n_hubs:
        order, outlines = (bordered.P.source, bordered.Q.source), _with_border(bordered)
    else:
        structure = found.structure
        order, outlines = (structure.P.source, structure.Q.source), _diagonal(structure.block_shapes.tolist())
    before, after = densities(edges, limits, [stored, order], grid)
    if directed is not None:
        levels = _feedback_levels(weights, annealings[0], order[0], grid, row)
    else:
        profile = level_profile(weights, name=row.name) if found.profile is None else found.profile
        levels = _levels(profile, weights, annealings[0], grid, row)
    return View(row, before, after, outlines, _histogram(annealings), levels, directed)


def _one_matrix(layer: Layer, annealings: Sequence[Annealing]) -> Any:
    """|w| between neurons: the largest over gates, or over the places of a kernel, where there are several."""
    if layer.feedback:
        return np.maximum.reduce([_magnitude(a.matrix) for a in annealings])
    if not layer.kernel:
        return annealings[0].matrix
    positions, groups = int(np.prod(layer.kernel)), layer.groups or 1
    weight = _magnitude(annealings[0].matrix)
    within = weight.reshape(groups, len(weight) // groups, -1, positions).max(3)  # (groups, outputs, inputs)
    spread = np.zeros((groups, within.shape[1], groups, within.shape[2]), weight.dtype)
    spread[np.arange(groups), :, np.arange(groups)] = within
    return spread.reshape(len(weight), -1)


def _edges(layer: Layer, annealings: Sequence[Annealing]) -> tuple[Any, Any]:
    """What is kept, as a matrix and its limits."""
    if layer.feedback:
        return np.logical_or.reduce([np.asarray(a.mask) for a in annealings]), 0.5
    (a,) = annealings
    if layer.kernel:
        return channel_mask(np.asarray(a.mask), int(np.prod(layer.kernel)), layer.groups or 1), 0.5
    return a.matrix, a.threshold if a.column_thresholds is None else a.column_thresholds


def _diagonal(shapes: list[Any]) -> list[Outline]:
    outlines, top, left = [], 0, 0
    for height, width in shapes:
        outlines.append(Outline(top, left, int(height), int(width)))
        top, left = top + int(height), left + int(width)
    return sorted(outlines, key=lambda o: -o.height * o.width)[:_OUTLINES]


def _with_border(bordered: BorderedStructure) -> list[Outline]:
    rows, cols = bordered.structure.shape
    below, right = len(bordered.hub_rows), len(bordered.hub_cols)
    borders = [Outline(rows - below, 0, below, cols, hub=True)] * bool(below)
    borders += [Outline(0, cols - right, rows, right, hub=True)] * bool(right)
    structure: BipartiteStructure = bordered.structure
    return _diagonal(structure.block_shapes.tolist()) + borders


def _levels(profile: LevelProfile, weights: Any, a: Annealing, grid: int, row: MatrixAnalysis) -> Levels:
    order = level_order(profile)
    every = profile.thresholds
    chosen = every[np.unique(np.linspace(0, len(every) - 1, min(len(every), _STOPS - 1)).round().astype(int))]
    thresholds = np.unique(np.append(chosen, row.threshold))[::-1]
    cells, kept = share_stops(weights, thresholds, order.row_order, order.col_order, grid)
    gaps = np.searchsorted(-thresholds, -order.gaps)  # the first threshold ≤ gap
    gaps = np.where((gaps == len(thresholds)) | (order.gaps == 0), NEVER, gaps).astype(np.uint8)
    start = int(np.flatnonzero(thresholds == row.threshold)[0])
    levels = np.asarray(a.null.tail(thresholds), float)
    return Levels(thresholds, levels, kept, row.rows * row.cols, cells, gaps, order.is_row, {}, start)


def _feedback_levels(weights: np.ndarray, a: Annealing, order: np.ndarray, grid: int, row: MatrixAnalysis) -> Levels:
    every = level_profile(weights, "directed", name=row.name).thresholds
    chosen = every[np.unique(np.linspace(0, len(every) - 1, min(len(every), _FEEDBACK_STOPS)).round().astype(int))]
    thresholds = np.unique(np.append(chosen, row.threshold))[::-1]
    profile = level_profile(weights, "directed", thresholds=thresholds.tolist(), name=row.name)
    cells, kept = share_stops(weights, thresholds, order, order, grid)
    counts = {
        "strong": profile.n_scc,
        "components": profile.n_components,
        "layers": profile.n_layers,
        "isolated": profile.isolated,
        "largest": profile.largest_scc_share,
    }
    start = int(np.flatnonzero(thresholds == row.threshold)[0])
    levels = np.asarray(a.null.tail(thresholds), float)
    nothing = np.zeros(0, np.uint8)
    return Levels(thresholds, levels, kept, row.rows * row.cols, cells, nothing, nothing.astype(bool), counts, start)


def _histogram(annealings: Sequence[Annealing]) -> WeightHistogram:
    """Signed weights of all gates, between the outermost of them and at most eight thresholds out."""
    sample = np.concatenate([s for a in annealings for s in _sampled(a.matrix, _SAMPLE // len(annealings))])
    threshold = float(np.median([a.threshold for a in annealings]))
    reach = max(float(np.abs(sample).max(initial=0.0)), 1.2 * threshold)
    reach = min(reach, 8 * threshold) if threshold > 0 else reach or 1.0
    edges = np.linspace(-reach, reach, _BINS + 1)
    counts, _ = np.histogram(sample, edges)
    width = edges[1] - edges[0]
    expected = np.mean([np.diff(a.null.cdf(edges)) for a in annealings], axis=0)
    inside = counts / max(1, len(sample))
    return WeightHistogram(edges, inside / width, expected / width, threshold, 1 - float(inside.sum()))


def _sampled(matrix: Any, most: int) -> Iterator[np.ndarray]:
    """Weights of evenly spaced rows, about `most` of them."""
    rows, cols = matrix.shape
    step = max(1, rows * cols // max(1, most))
    for start in range(0, rows, max(1, step * 256)):
        part = matrix[start : start + max(1, step * 256) : step]
        yield _signed(part).ravel()


def _signed(matrix: Any) -> np.ndarray:
    return np.asarray(matrix.detach().cpu().double() if isinstance(matrix, torch.Tensor) else matrix, np.float64)


def _magnitude(matrix: Any) -> np.ndarray:
    """|w| in a format that holds it exactly."""
    if isinstance(matrix, torch.Tensor):
        wide = matrix.detach().cpu()
        return np.abs(wide.numpy() if wide.dtype in (torch.float32, torch.float64) else wide.float().numpy())
    return np.abs(matrix)
