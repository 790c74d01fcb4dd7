"""What other stages found, as sections of the page: charts, and the numbers behind them as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crystallite.core.drawing import Drawing
from crystallite.report.run_charts import front_charts, monitor_charts, sweep_charts

__all__ = ["Row", "Section", "run_sections", "summary_section", "validation_section"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A heading with a sentence, charts by title, and tables by caption."""

    title: str
    text: str
    charts: dict[str, Drawing] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


def summary_section(summary: Mapping[str, Any]) -> Section:
    """What each layer became (`Summary.to_json`)."""
    (m0, m1), (p0, p1) = summary["macs"], summary["parameters"]
    text = f"Multiply-adds {m0:,} → {m1:,}, parameters {p0:,} → {p1:,}."
    if order := summary["order"]:
        text += f" {order[0].upper()}{order[1:]}."
    text += "".join(f" {note[:1].upper()}{note[1:]}." for note in summary.get("notes", ()))
    return Section("What was rebuilt", text, tables={"Layers that were considered": summary["layers"]})


def validation_section(verdict: Mapping[str, Any]) -> Section:
    """The original beside the reorganized network (`Verdict.to_json`)."""
    tables = {
        "Rules": verdict.get("outcomes"),
        "Outputs": verdict.get("outputs"),
        "Slices": verdict.get("slices"),
        "Seconds for one batch": verdict.get("latency"),
        "Samples that differ most": verdict.get("worst"),
        "Comparisons": verdict.get("comparisons"),
    }
    shown = {caption: [_flat(row) for row in rows] for caption, rows in tables.items() if rows}
    samples = f" on {verdict['samples']:,} samples" if verdict.get("samples") else ""
    return Section("Validation", f"The original and the reorganized network side by side{samples}.", tables=shown)


def run_sections(sweep: Sequence[Row], front: Sequence[Row], monitor: Sequence[Row]) -> list[Section]:
    """One section for each of the three that has rows."""
    found = [
        ("Level sweep", "What changes with the significance level.", sweep_charts, sweep),
        ("Quality and cost", "The dashed line joins what nothing cheaper beats.", front_charts, front),
        ("Training monitor", "The structure while it forms.", monitor_charts, monitor),
    ]
    return [
        Section(title, text, charts(rows), {title: [_flat(row) for row in rows]})
        for title, text, charts, rows in found
        if rows
    ]


def _flat(row: Mapping[str, Any]) -> Row:
    """A row whose nested values have columns of their own; lists of rows are left out."""
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}": part for inner, part in value.items()}
        elif not (isinstance(value, Sequence) and any(isinstance(part, Mapping) for part in value)):
            flat[key] = value
    return flat
