"""A rebuilt model as the page shows it: its summary, its verdict, and pictures of its layers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.analysis.matrix import channel_mask
from crystallite.core.axes import WIDTH, percent
from crystallite.core.drawing import Box, Drawing, Label, Raster, Shape
from crystallite.core.tables import abbreviated
from crystallite.models.manifest import is_saved, read_manifest
from crystallite.models.opening import open_model
from crystallite.models.record import LayerChange, record
from crystallite.models.summary import summary
from crystallite.reorganization.restore import dense_form
from crystallite.report.layer_charts import shades
from crystallite.report.picture import densities
from crystallite.structure.decompose import decompose

__all__ = ["Rebuilt", "rebuilt_model"]

Row = dict[str, Any]
_MOST_MATRICES = 6  # whose blocks are drawn
_MOST_SIZES = 24  # layers that are drawn to scale
_ACROSS = 4  # of these in a line
_SIDE, _TOP = 160, 34  # of a picture of blocks
_GRID = 64  # its cells along a side
_CELL, _SCALE = 86, 62  # of a layer that is drawn to scale: the room it has, and its longer side
_LINE = _CELL + 35  # of such layers, with their names below


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """What is known of one rebuilt model; summary and verdict as plain values."""

    name: str
    summary: Row
    verdict: Row | None = None
    pictures: Mapping[str, Drawing] = field(default_factory=dict)  # title → picture

    @property
    def passed(self) -> bool | None:
        """What validation said; None: the model was not validated."""
        return None if self.verdict is None else bool(self.verdict.get("passed"))

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-adds before and after: of the whole model for one sample where it was validated, else of layers."""
        before, after = (self.verdict or {}).get("macs_per_sample") or self.summary["macs"]
        return before, after

    @property
    def speedup(self) -> float | None:
        """Of the first batch; None where nothing was timed."""
        timed = (self.verdict or {}).get("latency") or ()
        return timed[0]["original"] / timed[0]["reorganized"] if timed else None


def rebuilt_model(name: str, source: nn.Module | str | os.PathLike[str], verdict: Row | None) -> Rebuilt:
    """What the page shows of a model, or of the folder that it was saved in, with the verdict that lies there."""
    if verdict is None and not isinstance(source, nn.Module) and is_saved(source):
        verdict = read_manifest(source).get("verdict")
    model = source if isinstance(source, nn.Module) else open_model(os.fspath(source), None)
    plain, changed = summary(model).to_json(), [c for c in record(model).changes if c.macs_after < c.macs_before]
    changed.sort(key=lambda c: c.macs_after - c.macs_before)
    return Rebuilt(name, plain, verdict, {**_matrices(model, changed), **_to_scale(changed)})


def _matrices(model: nn.Module, changed: list[LayerChange]) -> dict[str, Drawing]:
    """The weights of layers that are blocks now, in the order they had and block by block."""
    named = [change for change in changed if change.blocks > 1][:_MOST_MATRICES]
    if not named:
        return {}
    layers = dict(dense_form(model).named_modules())
    found = {}
    for change in named:
        layer = layers.get(change.name)
        edges = _nonzeros(layer)
        if edges is not None and not edges.all():
            found[change.name] = _blocks_picture(change, edges, isinstance(layer, nn.RNNBase))
    return found


def _nonzeros(layer: nn.Module | None) -> np.ndarray | None:
    """(outputs, inputs) where a layer has weights; of a recurrent layer between its units, in any gate."""
    if isinstance(layer, nn.RNNBase):
        gates = layer.get_parameter("weight_hh_l0").detach()
        return np.asarray(gates.view(-1, gates.shape[1], gates.shape[1]).ne(0).any(0).cpu())
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim < 2:
        return None
    if weight.ndim == 2:
        matrix = weight.T if type(layer).__name__ == "Conv1D" else weight  # transformers' own keeps it transposed
        return np.asarray(matrix.detach().ne(0).cpu())
    flat = np.asarray(weight.detach().ne(0).flatten(1).cpu())
    return channel_mask(flat, math.prod(weight.shape[2:]), getattr(layer, "groups", 1))


def _blocks_picture(change: LayerChange, edges: np.ndarray, feedback: bool) -> Drawing:
    if feedback:
        directed = decompose(edges, kind="directed")
        order, sizes = (directed.P.source, directed.P.source), [(len(b), len(b)) for b in directed.blocks]
    else:
        structure = decompose(edges)
        order, sizes = (structure.P.source, structure.Q.source), structure.block_shapes.tolist()
    orders = [(np.arange(edges.shape[0]), np.arange(edges.shape[1])), order]
    shapes: list[Shape] = [Label(0, 12, _short(change.name, 50), "ink")]
    left = 0.0
    for title, density in zip(("as stored", "block by block"), densities(edges, 0.5, orders, _GRID), strict=True):
        shapes += [Label(left, 28, title), Raster(left, _TOP, _SIDE, _SIDE, shades(density))]
        shapes.append(Box(left, _TOP, _SIDE, _SIDE, "muted", filled=False))
        left += _SIDE + 20
    top, across = float(_TOP), _SIDE + 20.0
    for height, width in sizes:
        tall, wide = height * _SIDE / edges.shape[0], width * _SIDE / edges.shape[1]
        shapes.append(Box(across, top, wide, tall, "red", filled=False, stroke=1.5))
        top, across = top + tall, across + wide
    share = change.macs_after / change.macs_before
    size = f"{edges.shape[0]} × {edges.shape[1]}: {change.blocks} blocks, {percent(share)} of the multiply-adds"
    shapes.append(Label(0, _TOP + _SIDE + 16, size))
    return Drawing(WIDTH, _TOP + _SIDE + 24, f"{change.name}, {size}", tuple(shapes))


def _to_scale(changed: list[LayerChange]) -> dict[str, Drawing]:
    """Layers that have fewer neurons or a low rank now: what is left of each, drawn to scale."""
    sized = [(change, operator) for change in changed for operator in _sized(change)]
    if not sized:
        return {}
    shown = sized[:_MOST_SIZES]
    shapes: list[Shape] = [
        Label(0, 12, "outlined: as it was; filled: what is left, of a low rank its two factors", size=10)
    ]
    for place, (change, operator) in enumerate(shown):
        x, y = place % _ACROSS * (_CELL + 4), 22 + place // _ACROSS * _LINE
        (rows, tall), (cols, wide) = operator.outputs, operator.inputs
        unit = _SCALE / max(tall, wide)
        if operator.rank:
            strip = operator.rank * unit
            shapes += [Box(x, y, min(strip, wide * unit), tall * unit, "blue"), Box(x, y, wide * unit, strip, "blue")]
        else:
            shapes.append(Box(x, y, cols * unit, rows * unit, "blue"))
        shapes.append(Box(x, y, wide * unit, tall * unit, "muted", filled=False))
        name = f"{change.name}.{operator.part}" if operator.part else change.name
        lines = [(text, "muted") for text in _in_lines(name, 14)] + [(percent(_left(change, operator)), "ink")]
        shapes += [Label(x, y + _SCALE + 14 + 13 * i, *line, size=10) for i, line in enumerate(lines)]
    height = 22 + -(-len(shown) // _ACROSS) * _LINE
    more = f" The {len(shown)} that save most of {len(sized)} are drawn." if len(sized) > len(shown) else ""
    text = f"Layers drawn to scale: the outline is the layer as it was, filled what is left of it.{more}"
    return {"What is left of each layer": Drawing(WIDTH, height, text, tuple(shapes))}


def _left(change: LayerChange, operator: Any) -> float:
    """The share of the multiply-adds that is left, of a layer or of one product of a recurrent layer."""
    if not operator.part:
        return change.macs_after / change.macs_before
    (rows, tall), (cols, wide) = operator.outputs, operator.inputs
    return (operator.rank * (rows + cols) if operator.rank else rows * cols) / (tall * wide)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else "…" + name[1 - most :]


def _in_lines(name: str, most: int) -> list[str]:
    """A name in one line or two, cut at a dot; of what is longer, the first parts are letters, and numbers stay.

    >>> _in_lines("blocks.2.channels.0", 14), _in_lines("encoder.layer.1.attention.self.query", 14)
    (['blocks.2.', 'channels.0'], ['e.l.1.a.self.', 'query'])
    """
    name = abbreviated(name, most + 7)
    if len(name) <= most:
        return [name]
    cut = name.rfind(".", len(name) - most - 1, most) + 1  # behind the last dot that leaves two lines
    cut = cut or len(name) - most
    return [_short(name[:cut], most), name[cut:]]


def _sized(change: LayerChange) -> Iterator[Any]:
    """Operators of a layer of which sizes are known, and smaller than they were."""
    for operator in change.operators:
        if operator.outputs and operator.inputs and operator.blocks <= 1 and operator.kind != "left alone":
            yield operator
