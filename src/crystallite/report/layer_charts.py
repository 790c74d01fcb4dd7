"""Drawings of one layer: its pictures, weight histogram, weight classes and feedback graph."""

from __future__ import annotations

import numpy as np

from crystallite.analysis.matrix import MatrixAnalysis
from crystallite.core.axes import HEIGHT, WIDTH, Axis, finite, frame, legend, number, percent
from crystallite.core.drawing import Box, Drawing, Label, Line, Raster, Shape
from crystallite.report.view import Outline, View, WeightHistogram

__all__ = ["class_chart", "histogram_chart", "matrix_figure", "shades"]

_SIDE = 300  # of a matrix picture


def shades(density: np.ndarray) -> np.ndarray:
    """Densities as shades in [0, 1]: square roots relative to the densest cell, whatever is not 0 visible.

    >>> shades(np.array([[0.0, 0.01, 0.25]])).tolist()
    [[0.0, 0.2, 1.0]]
    """
    densest = density.max(initial=0.0)
    if densest == 0:
        return np.zeros_like(density)
    return np.where(density > 0, np.maximum(np.sqrt(density / densest), 0.15), 0.0)


def matrix_figure(view: View) -> Drawing:
    """The matrix as stored and as reordered, side by side, blocks and hub borders outlined."""
    row = view.row
    shapes: list[Shape] = []
    for left, title, density in ((10, "as stored", view.before), (_SIDE + 40, "reordered", view.after)):
        shapes += [Label(left, 16, title, "ink", size=13), Raster(left, 24, _SIDE, _SIDE, shades(density))]
        shapes.append(Box(left, 24, _SIDE, _SIDE, "muted", filled=False))
    for outline in view.outlines:
        shapes.append(_outlined(outline, row, _SIDE + 40, 24))
    size = f"{row.rows} outputs × {row.cols} inputs, {percent(row.kept_share)} kept"
    shapes.append(Label(10, 24 + _SIDE + 18, size))
    return Drawing(2 * _SIDE + 50, _SIDE + 52, f"{row.name}: {size}. {row.verdict}", tuple(shapes))


def _outlined(outline: Outline, row: MatrixAnalysis, left: float, top: float) -> Box:
    across, down = _SIDE / max(1, row.cols), _SIDE / max(1, row.rows)
    place = left + outline.left * across, top + outline.top * down, outline.width * across, outline.height * down
    return Box(*place, "amber" if outline.hub else "red", filled=False, stroke=1.5)


def histogram_chart(histogram: WeightHistogram, null: str) -> Drawing:
    """Weights against f0 on a logarithmic scale, where tails show; beyond the marks they are significant."""
    positive = finite(d for d in histogram.density if d > 0)
    top = max([*positive, float(histogram.null_density.max(initial=0.0)), 1e-12])
    low = min(max(min(positive, default=top), top * 1e-6), top / 50)  # two decades or more
    x = Axis(float(histogram.edges[0]), float(histogram.edges[-1]), "weight")
    y = Axis(low / 2, top * 1.5, "density (log scale)", log=True)
    shapes = frame(x, y)
    bars: list[tuple[float, float]] = [(x.x(histogram.edges[0]), y.y(y.low))]
    for left, right, density in zip(histogram.edges[:-1], histogram.edges[1:], histogram.density, strict=True):
        height = y.y(max(density, y.low))
        bars += [(x.x(left), height), (x.x(right), height)]
    bars.append((x.x(histogram.edges[-1]), y.y(y.low)))
    shapes.append(Line(tuple(bars), "blue", closed=True, opacity=0.45))
    middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
    curve = [
        (x.x(m), y.y(d)) for m, d in zip(middles, histogram.null_density, strict=True) if d > y.low
    ]  # off the chart, f0 is no line along its bottom
    if len(curve) > 1:
        shapes.append(Line(tuple(curve), "red", 2))
    for mark in (-histogram.threshold, histogram.threshold):
        if x.low < mark < x.high:
            shapes.append(Line(((x.x(mark), y.y(y.high)), (x.x(mark), y.y(y.low))), "ink", 1, dashed=True))
    cut = f"; {percent(histogram.further)} lie further out" if histogram.further > 1e-9 else ""
    entries, extra = legend([("weights", "blue"), (f"f0: {null}", "red"), (f"dashed: threshold{cut}", "ink")])
    outside = np.abs(middles) >= histogram.threshold
    width = histogram.edges[1] - histogram.edges[0]
    beyond = [float(d[outside].sum() * width) for d in (histogram.density, histogram.null_density)]
    beyond[0] += histogram.further
    text = (
        f"Histogram of the weights against {null}: about {percent(beyond[0])} lie beyond ±{number(histogram.threshold)}"
        f", where the null puts {percent(beyond[1])}."
    )
    return Drawing(WIDTH, HEIGHT + extra, text, (*shapes, *entries))


def class_chart(row: MatrixAnalysis) -> Drawing:
    """The shares of suppressed, noise-like and preferred weights as one bar."""
    parts = [
        ("suppressed", "systematically suppressed", row.suppression, "amber"),
        ("noise", "like a random walk", row.noise, "muted"),
        ("preferred", "structural preference", row.preference, "green"),
    ]
    shapes: list[Shape] = []
    left = 10.0
    for _, _, share, colour in parts:
        shapes.append(Box(left, 10, (WIDTH - 20) * share, 26, colour))
        left += (WIDTH - 20) * share
    for i, (_, meaning, share, colour) in enumerate(parts):
        shapes.append(Box(10, 50 + 18 * i, 10, 10, colour))
        shapes.append(Label(26, 59 + 18 * i, meaning, "ink"))
        shapes.append(Label(WIDTH - 10, 59 + 18 * i, percent(share), "ink", "end"))
    text = "Weight classes: " + ", ".join(f"{percent(share)} {name}" for name, _, share, _ in parts) + "."
    return Drawing(WIDTH, 110, text, tuple(shapes))
