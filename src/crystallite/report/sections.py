"""What other stages found, as sections of the page: charts, and the numbers behind them as tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from crystallite.analysis.degrees import ChainAnalysis, chain_cells
from crystallite.core.axes import number, percent
from crystallite.core.drawing import Drawing
from crystallite.core.run_charts import front_charts, monitor_charts, role_chart, sweep_charts
from crystallite.report.rebuilt import Rebuilt, Row

__all__ = [
    "Section",
    "figure",
    "layers_section",
    "result_section",
    "roles_section",
    "run_sections",
    "validation_section",
]


@dataclass(frozen=True)
class Section:
    """A heading with a sentence, charts by title, and tables by caption."""

    title: str
    text: str
    charts: dict[str, Drawing] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def anchor(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def result_section(found: Sequence[Rebuilt]) -> Section:
    """The original beside every rebuilt model: quality, size, time."""
    names = ["original", *(one.name for one in found)]
    rows: list[list[str]] = []
    judged = [one.verdict or {} for one in found]
    metric = next((v["metric"] for v in judged if v.get("metric")), None)
    if metric:
        values = [v["metric"]["values"][1] if v.get("metric") else None for v in judged]
        rows.append([metric["name"], *map(figure, [metric["values"][0], *values])])
    agreed = [[o["agreement"] for o in v.get("outputs") or () if o.get("agreement") is not None] for v in judged]
    if any(agreed):
        which = ", of the output that has the fewest" if max(map(len, agreed)) > 1 else ""
        same = [percent(min(some)) if some else "–" for some in agreed]
        rows.append([f"same decision as the original{which}", "", *same])
    for title, pairs in (
        (
            "parameters",
            [v.get("parameters") or one.summary["parameters"] for v, one in zip(judged, found, strict=True)],
        ),
        (_counted(judged), [one.macs for one in found]),
    ):
        rows.append([title, f"{pairs[0][0]:,}", *(f"{after:,} ({percent(after / max(1, b))})" for b, after in pairs)])
    timed = [(v.get("latency") or [None])[0] for v in judged]
    if first := next(filter(None, timed), None):
        times = [f"{t['reorganized'] * 1e3:.3g} ms ({_faster(t)})" if t else "–" for t in timed]
        rows.append([f"time for a batch of {first['batch']}", f"{first['original'] * 1e3:.3g} ms", *times])
    outcome = {True: "passed", False: "did not pass", None: "not done"}
    rows.append(["validation", "", *(outcome[one.passed] for one in found)])
    table = [dict(zip(["", *names], row, strict=True)) for row in rows]
    samples = next((v["samples"] for v in judged if v.get("samples")), None)
    text = f"All on the same {samples:,} samples." if samples else ""
    return Section("Before and after", text, tables={"The original and what was made of it": table})


def _counted(judged: Sequence[Row]) -> str:
    return (
        "multiply-adds for one sample" if any(v.get("macs_per_sample") for v in judged) else "multiply-adds of layers"
    )


def figure(value: Any) -> str:
    """A figure of quality: shares as percentages."""
    return "–" if value is None else f"{100 * value:.1f}%" if 0 <= value <= 1 else number(value)


def _named(row: Row) -> Row:
    """The row with the page's word for what was made of the model."""
    return {"rebuilt" if key == "reorganized" else key: value for key, value in row.items()}


def _faster(timed: Mapping[str, float]) -> str:
    return f"{timed['original'] / timed['reorganized']:.2f}×"


def layers_section(found: Rebuilt, alone: bool) -> Section:
    """What each layer became, in pictures and in a table."""
    (m0, m1), (p0, p1) = found.summary["macs"], found.summary["parameters"]
    text = (
        f"These layers keep {m1 / max(m0, 1):.1%} of their multiply-adds and {p1 / max(p0, 1):.1%} of their parameters."
    )
    if order := found.summary["order"]:
        text += f" {order[0].upper()}{order[1:]}."
    text += "".join(f" {note[:1].upper()}{note[1:]}." for note in found.summary.get("notes", ()))
    rows = [{title: _layer_cell(row, title) for title in _LAYER_COLUMNS} for row in found.summary["layers"]]
    title = "Layers that were rebuilt" + f": {found.name}" * (not alone)
    return Section(title, text, dict(found.pictures), {"Layers that were considered": rows})


_LAYER_COLUMNS = ("layer", "weights kept", "multiply-adds", "became")


def _layer_cell(row: Row, title: str) -> str:
    if title == "layer":
        return row["name"] or "(model)"
    if title == "weights kept":
        return percent(row["kept_share"])
    if title == "multiply-adds":
        before, after = row["macs_before"], row["macs_after"]
        return f"{before:,} → {after:,}" if before != after else f"{before:,}"
    return str(row["became"])


def validation_section(verdict: Mapping[str, Any], name: str = "") -> Section:
    """The original beside the rebuilt network (`Verdict.to_json`)."""
    latency = [
        {
            "batch": t["batch"],
            "original": f"{t['original'] * 1e3:.3g} ms",
            "rebuilt": f"{t['reorganized'] * 1e3:.3g} ms",
            "speed-up": _faster(t),
        }
        for t in verdict.get("latency") or ()
    ]
    tables = {
        "Rules": verdict.get("outcomes"),
        "Outputs": verdict.get("outputs"),
        "Slices": verdict.get("slices"),
        "Time for one batch": latency,
        "Samples that differ most": verdict.get("worst"),
        "Comparisons": verdict.get("comparisons"),
    }
    shown = {caption: [_named(_flat(row)) for row in rows] for caption, rows in tables.items() if rows}
    samples = f" on {verdict['samples']:,} samples" if verdict.get("samples") else ""
    title = "Validation" + f": {name}" * bool(name)
    return Section(title, f"The original and the rebuilt network side by side{samples}.", tables=shown)


def roles_section(verdict: Mapping[str, Any], name: str = "") -> Section | None:
    """What each block is for, where blocks were switched off (`BlockRoles.to_json`)."""
    found = verdict.get("block_roles")
    if not found:
        return None
    rows = [
        {key: role[key] for key in ("layer", "block", "weights")}
        | {f"{found['metric']} lost, {label}": lost for label, lost in role["classes"].items()}
        | {f"change of {output}": change for output, change in role["outputs"].items()}
        | ({"tokens": ", ".join(role["tokens"])} if role["tokens"] else {})
        for role in found["roles"]
    ]
    text = f"One block at a time was switched off on {found['samples']:,} samples; the darker, the more it is needed."
    if found["left_out"]:
        text += f" {found['left_out']} smaller blocks were left on."
    title = "What blocks are for" + f": {name}" * bool(name)
    return Section(title, text, {"loss": role_chart(found["roles"], found["metric"])}, {"Without one block": rows})


def chains_section(chains: Sequence[ChainAnalysis]) -> Section | None:
    """How modular layers are together that share the neurons between them."""
    if not chains:
        return None
    head, *cells = chain_cells(chains)
    rows = [dict(zip(head, row, strict=True)) for row in cells]
    text = "One partition for all neurons of a chain, beside copies with the same row and column norms."
    return Section("Chains of layers in degrees", text, tables={"Normalised cuts of chains": rows})


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
