"""What was done to a model, kept on it as `model.reorganization`: for summaries, for artifacts, and to undo it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Fold", "LayerChange", "Reorganization"]


@dataclass(frozen=True)
class LayerChange:
    """What became of one layer."""

    name: str
    became: str  # the new module, or why the layer was left as it was
    macs_before: int
    macs_after: int
    parameters_before: int
    parameters_after: int
    kept_share: float = 1.0
    blocks: int = 1
    kind: str = "Linear"  # the class of the layer
    role: str = ""  # "first", "second" or "gate" of the feed-forward module that was replaced as a whole


@dataclass(frozen=True)
class Fold:
    """An order of hidden neurons that now lies in the stored weights: nothing moves at run time.

    Wherever a tensor of the dense model carries these neurons, `new.select(axis, i) = old.select(axis, order[i])`.
    """

    order: Tensor  # (neurons,) int64
    places: tuple[tuple[str, int], ...]  # names of parameters and buffers of the dense model, and the axis


@dataclass(frozen=True)
class Reorganization:
    """One row per layer that was considered, the orders folded into weights, and the options that led here."""

    changes: list[LayerChange]
    folds: list[Fold] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # plain values: level, null, rule, …
