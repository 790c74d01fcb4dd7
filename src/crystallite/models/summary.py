"""`summary`: what each layer became, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.tables import terminal_width, text_table
from crystallite.models.record import LayerChange, Reorganization
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear

__all__ = ["Summary", "summary"]

_SHOWN_FRAGILE = 3
_OBJECTIVES = {  # what a budget is of, where not multiply-adds
    "parameters": " of the parameters",
    "latency": " of the measured time",
    "int8": " of the measured time with 8-bit weights",
}
_MOVING = ("columns", "inputs", "outputs", "shuffle")  # index tables that are applied at run time


@dataclass(frozen=True)
class Summary:
    """One row per layer that was considered, the totals, how neurons find their places, and notes on a fitted model."""

    changes: list[LayerChange]
    order: str = ""  # of hidden neurons: how much of it lies in the weights, how much is moved at run time
    notes: tuple[str, ...] = ()  # of a fitted model: what was asked for, what it cost, what was protected and promised

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-accumulates of these layers per input vector, output position or time step, before and after."""
        return sum(c.macs_before for c in self.changes), sum(c.macs_after for c in self.changes)

    @property
    def parameters(self) -> tuple[int, int]:
        return sum(c.parameters_before for c in self.changes), sum(c.parameters_after for c in self.changes)

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame([vars(c) for c in self.changes])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layers": [vars(c) for c in self.changes],
            "macs": list(self.macs),
            "parameters": list(self.parameters),
            "order": self.order,
            "notes": list(self.notes),
        }

    def table(self, width: int | None = None) -> str:
        """The rows as text, lines no longer than `width` if there is one; names and reasons give way."""
        rows = [["layer", "kept", "multiply-adds", "became"]]
        for c in self.changes:
            macs = f"{c.macs_before:,} → {c.macs_after:,}" if c.macs_after != c.macs_before else f"{c.macs_before:,}"
            rows.append([c.name or "(model)", f"{c.kept_share:.1%}", macs, c.became])
        return "\n".join(text_table(rows, width, left=(0, 3)))

    def __repr__(self) -> str:
        (m0, m1), (p0, p1) = self.macs, self.parameters
        total = f"multiply-adds {m0:,} → {m1:,} ({m1 / max(m0, 1):.0%}), parameters {p0:,} → {p1:,}"
        return "\n".join([self.table(terminal_width()), "", total, *([self.order] if self.order else []), *self.notes])


def summary(model: nn.Module) -> Summary:
    """What `reorganize` did to a model.

    >>> summary(nn.Linear(2, 2))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: this model was not made by reorganize; pass its result
    """
    record = getattr(model, "reorganization", None)
    if not isinstance(record, Reorganization):
        raise InvalidOption("this model was not made by reorganize; pass its result")
    try:
        notes = tuple(_notes(record)) if record.fitted else ()
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # it may have been read from a file
        raise CheckpointError(f"reorganization: expected the options of a fitted model, got {error!s:.200}") from None
    return Summary(record.changes, _order(model, record), notes)


def _order(model: nn.Module, record: Reorganization) -> str:
    operators = [m for m in model.modules() if isinstance(m, (BlockLinear, BlockConv, BlockChain, BlockFeedForward))]
    if not operators:
        return ""
    moved = sum(name.rpartition(".")[2] in _MOVING for module in operators for name, _ in module.named_buffers())
    text = f"orders of neurons: {len(record.folds)} folded into the weights, {moved} moved at run time"
    reason = record.options.get("not_folded")
    return f"{text} (not folded: {reason})" if reason else text


def _notes(record: Reorganization) -> Iterator[str]:
    """Sentences on a fitted model, from its options."""
    options: dict[str, Any] = {name: value for name, value in record.options.items() if value is not None}
    error = options.get("held_out_error", float("nan"))
    asked = f"{options['blocks']} blocks" if "blocks" in options else f"a budget of {options.get('budget', 1):.0%}"
    asked += _OBJECTIVES.get(options.get("objective", "macs"), "")
    yield f"fitted to {asked}: error of the outputs {error:.2%} of their variance, on samples not fitted on"
    if fragile := options.get("fragile"):
        shown = ", ".join(f"{name or '(model)'} ({damage:.2g})" for name, damage in [*fragile.items()][:_SHOWN_FRAGILE])
        more = f" and {len(fragile) - _SHOWN_FRAGILE} more" if len(fragile) > _SHOWN_FRAGILE else ""
        yield f"kept dense, with the error that cutting them by half would cause: {shown}{more}"
    if reason := options.get("neurons_kept"):
        yield f"no hidden neurons were taken out: {reason}"
    if polish := options.get("polish"):
        yield f"polished for {polish['steps']} steps: error {polish['before']:.2%} → {polish['after']:.2%}"
    if guarantee := options.get("guarantee"):
        yield str(guarantee["text"])
