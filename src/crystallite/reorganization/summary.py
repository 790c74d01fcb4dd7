"""`summary`: what each layer became, and what that saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from crystallite.errors import InvalidOption
from crystallite.reorganization.record import LayerChange, Reorganization

__all__ = ["Summary", "summary"]


@dataclass(frozen=True)
class Summary:
    """One row per layer that was considered, and the totals."""

    changes: list[LayerChange]

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-accumulates of these layers per input vector, before and after."""
        return sum(c.macs_before for c in self.changes), sum(c.macs_after for c in self.changes)

    @property
    def parameters(self) -> tuple[int, int]:
        return sum(c.parameters_before for c in self.changes), sum(c.parameters_after for c in self.changes)

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame([vars(c) for c in self.changes])

    def __repr__(self) -> str:
        cells = [["layer", "kept", "multiply-adds", "became"]]
        for c in self.changes:
            cells.append([c.name, f"{c.kept_share:.1%}", f"{c.macs_before:,} → {c.macs_after:,}", c.became])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in cells]
        (m0, m1), (p0, p1) = self.macs, self.parameters
        total = f"multiply-adds {m0:,} → {m1:,} ({m1 / max(m0, 1):.0%}), parameters {p0:,} → {p1:,}"
        return "\n".join([*lines, "", total])


def summary(model: nn.Module) -> Summary:
    """What `reorganize` did to a model.

    >>> summary(nn.Linear(2, 2))
    Traceback (most recent call last):
    crystallite.errors.InvalidOption: this model was not made by reorganize; pass its result
    """
    record = getattr(model, "reorganization", None)
    if not isinstance(record, Reorganization):
        raise InvalidOption("this model was not made by reorganize; pass its result")
    return Summary(record.changes)
