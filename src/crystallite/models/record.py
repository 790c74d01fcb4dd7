"""What was done to a model, kept on it as `model.reorganization`: for summaries, for artifacts, and to undo it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from crystallite.core.errors import CheckpointError

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

    @property
    def fitted(self) -> bool:
        """Whether layers were fitted to data: then nothing says what they were."""
        return self.options.get("method") == "fitted"

    def to_plain(self) -> dict[str, Any]:
        """The record as JSON values.

        >>> Reorganization([], [Fold(torch.tensor([1, 0]), (("a.weight", 0),))]).to_plain()["folds"]
        [{'order': '1 0', 'places': [['a.weight', 0]]}]
        """
        orders = (" ".join(map(str, fold.order.tolist())) for fold in self.folds)  # a list would be a line per neuron
        places = ([list(place) for place in fold.places] for fold in self.folds)
        return {
            "options": self.options,
            "changes": [asdict(change) for change in self.changes],
            "folds": [{"order": order, "places": where} for order, where in zip(orders, places, strict=True)],
        }

    @classmethod
    def from_plain(cls, plain: Any, source: object) -> Reorganization:
        """What `to_plain` gave, which may be hostile; `source` is where it stood, for the error."""
        try:
            changes = [LayerChange(**change) for change in plain["changes"]]
            folds = [
                Fold(_order(fold["order"]), tuple((str(name), int(axis)) for name, axis in fold["places"]))
                for fold in plain["folds"]
            ]
            return cls(changes, folds, dict(plain["options"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else f"{error!s:.200}"
            raise CheckpointError(f"{source}: expected the record of a reorganization, got {what}") from None


def _order(text: str) -> Tensor:
    order = [int(number) for number in text.split()]
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"an order of {len(order)} neurons that does not hold every index below {len(order)} once")
    return torch.tensor(order, dtype=torch.int64)
