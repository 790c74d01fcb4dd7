"""The paper's figures 8.2 and 8.3 of any structure: the permuted matrix with its blocks, and the condensation.

Numbers count from 1, as the paper's do. U_ij stands in block row i and column j: what D_ii hears from D_jj.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from crystallite.core.drawing import Box, Dot, Drawing, Label, Line, Raster, Shape

if TYPE_CHECKING:
    from crystallite.structure.bipartite import BipartiteStructure
    from crystallite.structure.channels import Channels
    from crystallite.structure.directed import DirectedStructure

__all__ = ["bipartite_figure", "condensation_figure", "directed_figure"]

_SMALL = 40  # rows and columns up to which lines have numbers and blocks have names
_SIDE = 360  # of the picture of a larger matrix
_PIXELS = 240  # of that picture
_MOST_REGIONS = 400  # outlined
_MOST_PARTS = 40  # of a condensation, drawn one by one
_MOST_NAMES = 16  # edges whose names are written beside them
_WIDEST = 1600  # so are those that would take more than this
_SLOT, _ROW, _RADIUS = 124, 104, 24  # of a condensation: least width of a part, height of a layer, size of a circle
_LETTER = 6.5  # width of a letter beside a circle
_SUBSCRIPTS = str.maketrans("0123456789,", "₀₁₂₃₄₅₆₇₈₉,")


class _Region(NamedTuple):
    """A rectangle of the permuted matrix, in rows and columns."""

    top: int
    left: int
    height: int
    width: int
    name: str
    colour: str
    stroke: float = 1.5
    dashed: bool = False


def bipartite_figure(structure: BipartiteStructure, w: Any = None) -> Drawing:
    """PWQᵀ with the blocks W^1 … W^m outlined and the zero block last."""
    regions = [
        _Region(int(gamma.target[0]), int(pi.source[0]), len(gamma), len(pi), f"W{_superscript(i + 1)}", "red")
        for i, (gamma, pi) in enumerate(zip(structure.embeddings[:-1], structure.projections[:-1], strict=True))
    ]
    rows, cols = structure.shape
    zero = len(structure.embeddings[-1]), len(structure.projections[-1])
    regions.append(_Region(rows - zero[0], cols - zero[1], *zero, "0", "muted", 1.5, True))
    shapes, width, height = _matrix(structure, regions, w)
    blocks = _listed([f"{a}×{b}" for a, b in structure.block_shapes.tolist()])
    text = (
        f"Permuted matrix, {rows} rows and {cols} columns: {structure.n_blocks} blocks on the diagonal ({blocks}), "
        f"then {zero[0]} dormant rows and {zero[1]} dormant columns."
    )
    return Drawing(width, height, text, tuple(shapes))


def directed_figure(structure: DirectedStructure, w: Any = None) -> Drawing:
    """PWPᵀ with its weak components, D_ii, U_ij and the isolated block; beside it the condensation."""
    regions, start = [], 0
    for nodes in structure.components:
        name = f"G{_subscript(int(structure.component[nodes[0]]) + 1)}"
        regions.append(_Region(start, start, len(nodes), len(nodes), name, "red", 2.5))
        start += len(nodes)
    firsts = np.concatenate([[0], np.cumsum([len(nodes) for nodes in structure.blocks])]).astype(int)
    if len(structure.blocks) <= _MOST_REGIONS:
        sizes = [len(nodes) for nodes in structure.blocks]
        for i, j in _communication(structure):
            name = f"U{_subscript(i + 1, j + 1)}"
            regions.append(_Region(int(firsts[i]), int(firsts[j]), sizes[i], sizes[j], name, "amber", 1))
        for i, size in enumerate(sizes):
            name = f"D{_subscript(i + 1, i + 1)}"
            regions.append(_Region(int(firsts[i]), int(firsts[i]), size, size, name, "blue"))
    left = structure.size - start
    if left:
        regions.append(_Region(start, start, left, left, "isolated", "muted", 1.5, True))
    shapes, width, height = _matrix(structure, regions, w)
    graph = condensation_figure(structure)
    moved = [_moved(shape, width + 20.0) for shape in graph.shapes]
    text = f"Permuted matrix of {structure.size} nodes in Frobenius form. {graph.description}"
    return Drawing(width + 20 + graph.width, max(height, graph.height), text, (*shapes, *moved))


def condensation_figure(structure: DirectedStructure) -> Drawing:
    """Strong components as circles, layers from top to bottom, weak components from left to right, arrows for U_ij.

    S is the number of the component, D its place on the diagonal. More than forty components are drawn as one dot for
    each layer. Isolated nodes are counted.
    """
    parts, isolated = structure.blocks, int(structure.isolated.sum())
    layers = max((int(structure.layer[nodes[0]]) for nodes in parts), default=-1) + 1
    largest = max((len(nodes) for nodes in parts), default=0)
    text = (
        f"Condensation: {_count(len(parts), 'strongly connected component')} in {_count(layers, 'layer')} and "
        f"{_count(len(structure.components), 'weak component')}, the largest with {largest} of {structure.size} nodes; "
        f"{isolated} isolated."
    )
    places, widths = _places(structure) if len(parts) <= _MOST_PARTS else ([], [np.inf])
    if sum(widths) > _WIDEST:
        return _by_layer(structure, layers, text)
    shapes: list[Shape] = []
    for layer in range(layers):
        shapes.append(Label(4, 40 + _ROW * (layer + 0.5), f"L{_subscript(layer + 1)}", "muted", size=12))
    x = 34.0
    for nodes, width in zip(structure.components, widths, strict=True):
        name = f"G{_subscript(int(structure.component[nodes[0]]) + 1)}"
        shapes.append(Label(x + width / 2, 16, name, "red", "middle", 13))
        shapes.append(Box(x + 2, 24, width - 4, _ROW * layers + 4, "rule", filled=False))
        x += width
    pairs = _communication(structure)
    for i, j in pairs:
        shapes += _arrow(places[j], places[i], f"U{_subscript(i + 1, j + 1)}" if len(pairs) <= _MOST_NAMES else "")
    for i, (nodes, (new, old)) in enumerate(zip(parts, _numbers(structure), strict=True)):
        x_i, y_i = places[i]
        shapes += [Dot(x_i, y_i, _RADIUS, "blue"), Dot(x_i, y_i, _RADIUS - 1.5, "paper")]
        shapes.append(Label(x_i, y_i - 2, f"S{_subscript(int(structure.scc[nodes[0]]) + 1)}", "ink", "middle", 13))
        shapes.append(Label(x_i, y_i + 13, f"D{_subscript(i + 1, i + 1)}", "blue", "middle", 10))
        shapes.append(Label(x_i + _RADIUS + 4, y_i - 3, new, "green", size=10))
        shapes.append(Label(x_i + _RADIUS + 4, y_i + 11, old, "muted", size=10))
    if isolated:
        names, start = _listed((np.flatnonzero(structure.isolated) + 1).tolist(), 8), structure.size - isolated + 1
        first, last = (_subscript(k, k) for k in (len(parts) + 1, len(parts) + isolated))
        place = f"new {start}, D{first}" if isolated == 1 else f"new {start}–{structure.size}, D{first} to D{last}"
        shapes.append(Label(34, 46 + _ROW * layers, f"isolated: {names} ({place})", "muted"))
    shapes.append(Label(34, 62 + _ROW * layers, "beside a circle: new numbers in green, old ones in grey", "muted"))
    edges = ", ".join(
        f"S{int(structure.scc[parts[j][0]]) + 1} → S{int(structure.scc[parts[i][0]]) + 1}" for i, j in pairs
    )
    text += f" Edges: {edges or 'none'}."
    return Drawing(max(int(x) + 6, 300), _ROW * layers + 72, text, tuple(shapes))


def _communication(structure: DirectedStructure) -> list[tuple[int, int]]:
    number = {int(structure.scc[nodes[0]]): i for i, nodes in enumerate(structure.blocks)}
    return sorted((number[p], number[q]) for p, q in np.argwhere(structure.condensation).tolist())


def _matrix(structure: Channels, regions: Sequence[_Region], w: Any) -> tuple[list[Shape], int, int]:
    """The permuted matrix with its regions, width and height; small ones with new and old numbers of their lines."""
    rows, cols = structure.shape
    small = max(rows, cols) <= _SMALL
    cell = 22.0 if small else _SIDE / max(rows, cols)
    left, top = (46.0, 40.0) if small else (4.0, 4.0)
    shapes: list[Shape] = []
    if w is not None and rows and cols:
        shapes.append(Raster(left, top, cols * cell, rows * cell, _shades(structure, w), "blue"))
    shapes.append(Box(left, top, cols * cell, rows * cell, "rule", filled=False))
    for region in sorted(regions, key=lambda r: -r.height * r.width)[:_MOST_REGIONS]:
        shapes += _outline(region, left, top, cell, small)
    if small:
        for k, old in enumerate(structure.Q.source.tolist()):
            x = left + (k + 0.5) * cell
            shapes += [
                Label(x, 14, str(k + 1), "green", "middle", 10),
                Label(x, 30, str(old + 1), "muted", "middle", 9),
            ]
        for k, old in enumerate(structure.P.source.tolist()):
            y = top + (k + 0.5) * cell + 4
            shapes += [Label(18, y, str(k + 1), "green", "end", 10), Label(40, y, str(old + 1), "muted", "end", 9)]
        shapes.append(Label(left, top + rows * cell + 18, "green: new numbers; grey: old ones", "muted"))
    return shapes, int(left + cols * cell) + 6, int(top + rows * cell) + (28 if small else 6)


def _outline(region: _Region, left: float, top: float, cell: float, named: bool) -> list[Shape]:
    x, y = left + region.left * cell, top + region.top * cell
    width, height = region.width * cell, region.height * cell
    corners = ((x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y))
    found: list[Shape] = [Line(corners, region.colour, region.stroke, region.dashed)]
    # the name of a component stands at its right end, where no block of it can be
    inside = region.colour != "red" or not region.name.startswith("G")
    if named and min(width, height) > 7 * len(region.name):
        at = (x + 3, y + 11, "start") if inside else (x + width - 3, y + 12, "end")
        found.append(Label(at[0], at[1], region.name, region.colour, at[2], 10, halo=True))
    return found


def _shades(structure: Channels, w: Any) -> np.ndarray:
    """|w| of the permuted matrix as shades; of a large one the share of entries that are not zero, by pixel."""
    array = w.detach().cpu().float().numpy() if isinstance(w, torch.Tensor) else np.asarray(w, np.float64)
    permuted = np.abs(structure.apply(array))
    rows, cols = permuted.shape
    if max(rows, cols) > _SMALL:
        edges = [np.linspace(0, n, min(n, _PIXELS), endpoint=False).astype(int) for n in (rows, cols)]
        kept = np.add.reduceat(np.add.reduceat((permuted != 0).astype(np.float32), edges[0], 0), edges[1], 1)
        sizes = [np.diff(np.append(e, n)) for e, n in zip(edges, (rows, cols), strict=True)]
        permuted = np.sqrt(kept / np.outer(*sizes))
    most = permuted.max(initial=0.0) or 1.0
    return np.where(permuted > 0, 0.25 + 0.35 * permuted / most, 0.0)


def _places(structure: DirectedStructure) -> tuple[list[tuple[float, float]], list[float]]:
    """Where the circle of each block stands, and how wide each weak component is."""
    longest = max((len(text) for pair in _numbers(structure) for text in pair), default=0)
    slot = max(_SLOT, 0.4 * _SLOT + _RADIUS + 12 + _LETTER * longest)
    places: dict[int, tuple[float, float]] = {}
    widths, start = [], 34.0
    component = [int(structure.component[nodes[0]]) for nodes in structure.blocks]
    for nodes in structure.components:
        own = [i for i, c in enumerate(component) if c == structure.component[nodes[0]]]
        by_layer: dict[int, list[int]] = {}
        for i in own:
            by_layer.setdefault(int(structure.layer[structure.blocks[i][0]]), []).append(i)
        slots = max(map(len, by_layer.values()))
        sway = 0.25 * slot * (len(by_layer) > 2)  # so that an edge past a layer does not run through its circle
        width = slots * slot + 2 * sway
        for layer, members in by_layer.items():
            first = start + sway * (2 if layer % 2 else 0) + (slots - len(members)) * slot / 2
            for k, i in enumerate(members):
                places[i] = (first + k * slot + 0.4 * _SLOT, 36 + _ROW * (layer + 0.5))
        widths.append(width)
        start += width
    return [places[i] for i in range(len(structure.blocks))], widths


def _numbers(structure: DirectedStructure) -> list[tuple[str, str]]:
    """New and old numbers of the nodes of each block."""
    stops = np.cumsum([len(nodes) for nodes in structure.blocks]).tolist()
    return [
        (f"{stop - len(nodes) + 1}–{stop}" if len(nodes) > 1 else str(stop), _listed((nodes + 1).tolist(), 3))
        for nodes, stop in zip(structure.blocks, stops, strict=True)
    ]


def _arrow(start: tuple[float, float], end: tuple[float, float], name: str) -> list[Shape]:
    """A line between two circles, its head, and a name at its middle."""
    a, b = np.array(start), np.array(end)
    along = (b - a) / max(float(np.linalg.norm(b - a)), 1e-9)
    across = np.array([-along[1], along[0]])
    a, b = a + along * (_RADIUS + 1), b - along * (_RADIUS + 1)
    head = [b, b - along * 8 + across * 4, b - along * 8 - across * 4]
    middle = a + 0.38 * (b - a) + across * 4 * (1 if across[0] > 0 else -1)
    return [
        Line((_point(a), _point(b - along * 6)), "amber", 1.2),
        Line(tuple(map(_point, head)), "amber", closed=True),
        *([Label(float(middle[0]) + 3, float(middle[1]), name, "amber", size=10, halo=True)] if name else []),
    ]


def _by_layer(structure: DirectedStructure, layers: int, text: str) -> Drawing:
    """One dot for each layer, as large as it has nodes."""
    live = ~structure.isolated
    shapes: list[Shape] = []
    targets, sources = np.nonzero(structure.condensation)
    layer_of = np.zeros(structure.n_scc, int)
    layer_of[structure.scc] = structure.layer
    width, height, y = 520, 250, 120
    x = [20 + (width - 40) * (k + 0.5) / max(layers, 1) for k in range(layers)]
    for s, t in sorted({(int(layer_of[q]), int(layer_of[p])) for p, q in zip(targets, sources, strict=True)}):
        bend = y - (y - 4) * (t - s - 1) / max(layers - 2, 1)
        shapes.append(Line(((x[s], y), ((x[s] + x[t]) / 2, bend), (x[t], y)), "muted", 1, opacity=0.5))
    for k in range(layers):
        nodes = int((live & (structure.layer == k)).sum())
        parts = sum(int(structure.layer[b[0]]) == k for b in structure.blocks)
        shapes.append(Dot(x[k], y, 4 + min(30, 200 / layers) * (nodes / max(1, structure.size)) ** 0.5, "blue"))
        if layers <= 16:
            shapes.append(Label(x[k], y + 50, str(parts), "ink", "middle", 10))
            shapes.append(Label(x[k], y + 64, str(nodes), "muted", "middle", 10))
    drawn = f"{len(structure.blocks)} components, drawn as their {layers} layers, from left to right"
    numbers = "under each: its components, its nodes; " if layers <= 16 else ""
    shapes.append(Label(10, height - 24, drawn))
    shapes.append(Label(10, height - 8, f"{numbers}{int((~live).sum())} isolated nodes not drawn"))
    return Drawing(width, height, text, tuple(shapes))


def _moved(shape: Shape, by: float) -> Shape:
    if isinstance(shape, Line):
        points = tuple((x + by, y) for x, y in shape.points)
        return Line(points, shape.colour, shape.width, shape.dashed, shape.closed, shape.opacity)
    return type(shape)(**{**vars(shape), "x": shape.x + by})


def _point(vector: np.ndarray) -> tuple[float, float]:
    return float(vector[0]), float(vector[1])


def _subscript(*numbers: int) -> str:
    """Subscripts, apart where they have more than one digit: D₁₁, U₁₀,₂."""
    return ("," if max(numbers) > 9 else "").join(map(str, numbers)).translate(_SUBSCRIPTS)


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _listed(items: Sequence[Any], most: int = 6) -> str:
    return ", ".join(map(str, items[:most])) + ("" if len(items) <= most else ", …")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
