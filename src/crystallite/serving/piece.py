"""`Piece`: a service of the inference tier, and its module, read from a saved model without the rest of it."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from crystallite.models.opening import open_mapped
from crystallite.serving.cuts.operators import site_of
from crystallite.serving.interface import NamedModel

__all__ = ["Piece", "open_piece", "part_of"]


@dataclass(frozen=True)
class Piece:
    """A service: what it holds and computes for one sample, how long a batch should take, and how often it runs.

    Replicas are dealt out in proportion to load, so that none waits for another when all are busy.
    """

    name: str
    holds: str
    macs: int  # of a call with one sample; where no sample is known, with one vector, position or time step
    nbytes: int
    seconds: float
    modules: tuple[str, ...]  # that it is made of, or whose blocks it holds; none: the whole model
    site: str | None = None  # of an operator, whose blocks it holds; None: all of the modules
    blocks: tuple[int, ...] = ()  # of that site, by number
    least: int = 1  # replicas
    most: int = 1
    positional: tuple[str, ...] = ()  # of the whole model: inputs that go by place, not by name
    outputs: tuple[str, ...] = ()  # of the whole model: those that are chosen


def part_of(model: nn.Module, piece: Piece) -> nn.Module:
    """The module of one piece of a model, in memory of its own; of a mapped model only what belongs to it is read."""
    inside = [model.get_submodule(name) for name in piece.modules]
    if piece.site is None:
        whole = nn.Sequential(*inside) if inside else NamedModel(model, piece.positional, piece.outputs)
        return copy.deepcopy(whole).eval()
    return site_of(inside[0] if inside else model, piece.site).part(piece.blocks).eval()


def open_piece(path: str | os.PathLike[str], piece: Piece, into: nn.Module | None = None) -> nn.Module:
    """The module of one piece of a saved model, in memory of its own.

    The file is mapped and only what belongs to the piece is read, so neither memory nor traffic grows with the rest of
    the model; index tables of O(n) are. The hash of all weights is not compared: compare that of the piece.
    """
    return part_of(open_mapped(Path(path), into), piece)
