"""`summary`: what each layer became, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from torch import nn

from crystallite.core.axes import error_share
from crystallite.core.drawing import Drawing
from crystallite.core.run_charts import bar_chart
from crystallite.core.suggest import suggest_keywords
from crystallite.core.tables import by_expert, html_table, span, terminal_width, text_table
from crystallite.models.familiarity import unfamiliar
from crystallite.models.record import OUTSIDE_EXPERTS, TOO_FEW, CompressedOptions, LayerChange, Record, record
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear

__all__ = ["Summary", "summary"]

_SHOWN_SENSITIVE = 3
_OBJECTIVES = {  # what a budget is of, where not multiply-adds
    "parameters": " of the parameters",
    "latency": " of the measured time",
    "int8": " of the measured time with 8-bit weights",
}
_FORMS = {"dense": " with ordinary layers only", "uniform": " with ordinary layers of the same sizes throughout"}
_MOVING = ("columns", "inputs", "outputs", "shuffle")  # index tables that are applied at run time


@dataclass(frozen=True)
class Summary:
    """One row per layer that was considered, the totals, how neurons find their places, and notes on a fitted model."""

    changes: tuple[LayerChange, ...]
    order: str = ""  # of hidden neurons: how much of it lies in the weights, how much is moved at run time
    counted: str = "each weight used once"  # what multiply-adds are of
    notes: tuple[str, ...] = ()  # what was taken off the model before; of a fitted model: what was asked for, what it
    # cost, what was protected and promised

    @classmethod
    def of(cls, found: Record) -> Summary:
        """Of a record alone, where the model is not in memory."""
        options = found.options
        if not isinstance(options, CompressedOptions):
            return cls(found.changes, notes=found.prepared)
        notes = (*found.prepared, *_fitted(options), *_unreached(found))
        return cls(found.changes, counted=options.counted or cls.counted, notes=notes)

    @property
    def macs(self) -> tuple[int, int]:
        """Multiply-accumulates of these layers for what `counted` says, before and after."""
        return sum(c.macs_before for c in self.changes), sum(c.macs_after for c in self.changes)

    @property
    def parameters(self) -> tuple[int, int]:
        return sum(c.parameters_before for c in self.changes), sum(c.parameters_after for c in self.changes)

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame([c.to_row() for c in self.changes])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layers": [c.to_row() for c in self.changes],
            "macs": list(self.macs),
            "parameters": list(self.parameters),
            "counted": self.counted,
            "order": self.order,
            "notes": list(self.notes),
        }

    def table(self, width: int | None = None) -> str:
        """The rows as text, lines no longer than `width` if there is one; names and reasons give way.

        The same layer of several experts is one line, with what they cost together.
        """
        return "\n".join(text_table(self._cells(), width, left=(0, 3)))

    def plot(self) -> Drawing:
        """A picture of what is left of the multiply-adds of each layer."""
        shares = [(c.name or "(model)", c.macs_after / max(c.macs_before, 1), c.macs_after) for c in self.changes]
        bars = [(name, share, f"{share:.0%}, {after:,}") for name, share, after in shares]
        return bar_chart(bars, "multiply-adds left of each layer")

    def _cells(self) -> list[list[str]]:
        rows = [["layer", "kept", "multiply-adds", "became"]]
        for name, places in by_expert([c.name for c in self.changes]):
            some = [self.changes[place] for place in places]
            before, after = sum(c.macs_before for c in some), sum(c.macs_after for c in some)
            macs = f"{before:,} → {after:,}" if after != before else f"{before:,}"
            kept, became = (span(texts) for texts in ([f"{c.kept_share:.1%}" for c in some], [c.became for c in some]))
            rows.append([name or "(model)", kept, macs, became])
        return rows

    @property
    def _notes(self) -> list[str]:
        (m0, m1), (p0, p1) = self.macs, self.parameters
        macs = f"multiply-adds {m0:,} → {m1:,} ({m1 / max(m0, 1):.0%})"
        total = f"these layers, {self.counted}: {macs}, parameters {p0:,} → {p1:,}"
        return [total, *([self.order] if self.order else []), *self.notes]

    def __repr__(self) -> str:
        return "\n".join([self.table(terminal_width()), "", *self._notes])

    def _repr_html_(self) -> str:
        return html_table(self._cells(), left=(0, 3)) + "".join(f"<p>{escape(note)}</p>" for note in self._notes)


@suggest_keywords
def summary(model: nn.Module, data: Any = None) -> Summary:
    """What `reorganize`, `compress` or `upgrade` did to a model.

    Args:
        model: what one of them returned.
        data: batches of inputs as for `validate`, if it shall say how many are unlike those that the model was fitted
            on.

    Returns:
        A `Summary`, which prints as a table: one line for each layer, and the cost before and after.

    Raises:
        InvalidOption: a model that none of them made.

    Examples:
        >>> summary(nn.Linear(2, 2))
        Traceback (most recent call last):
        crystallite.core.errors.InvalidOption: this model was not made by reorganize, compress or upgrade; pass their
        result
    """
    found = record(model)
    base, seen = Summary.of(found), None if data is None else unfamiliar(model, data)
    return replace(base, order=_order(model, found), notes=(*base.notes, *([str(seen)] if seen else [])))


def _order(model: nn.Module, found: Record) -> str:
    operators = [m for m in model.modules() if isinstance(m, (BlockLinear, BlockConv, BlockChain, BlockFeedForward))]
    if not operators:
        return ""
    moved = sum(name.rpartition(".")[2] in _MOVING for module in operators for name, _ in module.named_buffers())
    text = f"orders of neurons: {len(found.folds)} folded into the weights, {moved} moved at run time"
    return f"{text} (not folded: {found.not_folded})" if found.not_folded else text


def _fitted(options: CompressedOptions) -> Iterator[str]:
    """Sentences on a compressed model."""
    asked = f"a budget of {options.budget:.0%}" if options.budget is not None else f"{options.blocks} blocks"
    asked += _OBJECTIVES.get(options.objective, "") + _FORMS.get(options.form, "")
    error = f"error of the outputs {error_share(options.held_out_error)} of their variance, on samples not fitted on"
    yield f"fitted to {asked}: {error}"
    if options.data is not None:
        yield str(options.data)
    if sensitive := options.sensitive:
        worst = [*sensitive.items()][:_SHOWN_SENSITIVE]
        shown = ", ".join(f"{name or '(model)'} ({own:.2g})" for name, own in worst)
        more = f" and {len(sensitive) - _SHOWN_SENSITIVE} more" if len(sensitive) > _SHOWN_SENSITIVE else ""
        yield f"kept dense, with the error that cutting them by half would cause: {shown}{more}"
    if options.neurons_kept:
        yield f"no hidden neurons were taken out{_but_experts(options.neurons_kept)}"
    if options.heads_kept:
        for reason in dict.fromkeys(options.heads_kept.values()):
            where = [name for name, why in options.heads_kept.items() if why == reason]
            more = f" and {len(where) - 1} more" if len(where) > 1 else ""
            yield f"whole heads stay: {where[0]}{more}: {reason}"
    if polish := options.polish:
        yield f"polished for {polish.steps} steps: error {error_share(polish.before)} → {error_share(polish.after)}"
    if options.guarantee:
        yield str(options.guarantee)


def _but_experts(reason: str) -> str:
    """Why neurons were kept, everywhere or outside experts, after "were taken out"."""
    return f" {reason}" if reason.startswith(OUTSIDE_EXPERTS) else f": {reason}"


def _unreached(found: Record) -> Iterator[str]:
    """Which layers of experts are as they were because the data said too little about them."""
    names = [c.name for c in found.changes if any(o.reason.startswith(TOO_FEW) for o in c.operators)]
    if names:
        shown = ", ".join(names[:_SHOWN_SENSITIVE]) + " …" * (len(names) > _SHOWN_SENSITIVE)
        yield f"{len(names)} layers of experts left dense, as too few positions reach them ({shown}): pass more data"
