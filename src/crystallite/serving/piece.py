"""`Piece`: a service of the inference tier, and its module, read from a saved model without the rest of it."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch
from torch import nn

from crystallite.models.artifact import load_mapped
from crystallite.reorganization.subnetworks import Subnetworks, as_chain
from crystallite.serving.network import fused

__all__ = ["Piece", "open_piece"]


@dataclass(frozen=True)
class Piece:
    """A service: what it holds and computes for one input vector, how long a batch should take, and how often it runs.

    Replicas are dealt out in proportion to load, so that none waits for another when all are busy.
    """

    name: str
    holds: str
    macs: int
    nbytes: int
    seconds: float
    modules: tuple[str, ...]  # of an nn.Sequential that it is made of; none: of the whole model
    subnetworks: tuple[int, ...]  # of that module, by number; none: all of it
    least: int = 1  # replicas
    most: int = 1


def open_piece(path: str | os.PathLike[str], piece: Piece, into: nn.Module | None = None) -> nn.Module:
    """The module of one piece of a saved model, in memory of its own.

    The file is mapped and only what belongs to the piece is read, so neither memory nor traffic grows with the rest of
    the model; index tables of O(n) are. The hash of all weights is not compared: compare that of the piece.
    """
    model = load_mapped(path, into)
    inside = [model.get_submodule(name) for name in piece.modules]
    if not piece.subnetworks:
        return copy.deepcopy(nn.Sequential(*inside) if inside else model).eval()
    chain = as_chain(inside[0] if inside else model)
    parts, inputs, outputs = zip(*chain.subnetworks(piece.subnetworks), strict=True)
    networks = Subnetworks(parts, inputs, outputs, torch.empty(0), nn.Sequential(), nn.Sequential())
    return fused(networks, [range(len(parts))]).parts[0].eval()
