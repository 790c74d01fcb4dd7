"""The report as one HTML page: nothing loaded from elsewhere, and no text of a checkpoint ever read as markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from crystallite.analysis import Analysis, MatrixAnalysis
from crystallite.analysis.verdict import FINDINGS
from crystallite.report.advice import next_steps
from crystallite.report.axes import number, percent
from crystallite.report.layer_charts import class_chart, histogram_chart, shades
from crystallite.report.sections import Section
from crystallite.report.view import View

__all__ = ["page"]

_COLUMNS = ("Matrix", "Finding", "Blocks", "Largest", "Kept", "Dormant", "Size", "Fit", "Null f0")
_WORDS = ("Matrix", "Finding", "Null f0")
_GOOD, _SOME = ("separate",), ("hubs", "nested")
_RULES = {
    "both": "A weight that is larger than chance explains (Neyman test) and favours some outputs over others "
    "(random-walk test). Only these are drawn above.",
    "neyman": "A weight that is larger than chance explains (Neyman test). Only these are drawn above.",
}


def page(
    title: str,
    analysis: Analysis,
    views: Sequence[View],
    before: Sequence[Section],
    after: Sequence[Section],
    verdict: Mapping[str, Any] | None,
    summary: Mapping[str, Any] | None,
) -> str:
    """The whole page. Sections come before or after that of the layers."""
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    headline, _, findings = analysis.verdict.partition(": ")
    named = {"next": "Next"} | {s.anchor: s.title for s in before} | {"layers": "Layers"}
    named |= {s.anchor: s.title for s in after} | {"reading": "How to read this"}
    settings = f"level {analysis.options.level}, rule “{analysis.options.rule}”"
    rows = "\n".join(_table_row(i, row) for i, row in enumerate(analysis.rows))
    heads = "".join(
        f'<th scope="col" data-kind="{"word" if name in _WORDS else "number"}"'
        f'{" class=words" if name in _WORDS else ""}><button type="button">{escape(name)}</button></th>'
        for name in _COLUMNS
    )
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'",
        title=escape(title),
        style=style,
        script=script,
        headline=escape(headline.rstrip(".") + "."),
        findings=escape(findings[:1].upper() + findings[1:]),
        validated=_validated(verdict),
        tiles="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _tiles(analysis, summary)
        ),
        links="".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in named.items()),
        steps="".join(
            f"<li>{escape(text)}{f' <code>{escape(code)}</code>' if code else ''}</li>"
            for text, code in next_steps(analysis)
        ),
        before="\n".join(map(_section, before)),
        after="\n".join(map(_section, after)),
        caption=escape(f"{len(analysis.rows)} matrices at {settings}"),
        heads=heads,
        rows=rows,
        first=_most_telling(analysis.rows),
        rule=escape(_RULES[analysis.options.rule]),
        version=version("crystallite"),
        data="\n".join(
            f'<script type="application/json" id="layer-{i}">{_json(_layer(view))}</script>'
            for i, view in enumerate(views)
        ),
    )


def _hash(text: str) -> str:
    """What the page's policy allows to run: this text, to the letter."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """JSON that no HTML parser can leave early."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _most_telling(rows: Sequence[MatrixAnalysis]) -> int:
    """The layer to open first: the best finding; embeddings are distinguished by rows, so rather not one of them."""
    order = list(FINDINGS)
    return min(range(len(rows)), key=lambda i: (order.index(rows[i].finding), rows[i].kind == "embedding"), default=0)


def _tiles(analysis: Analysis, summary: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    rows = analysis.rows
    weights = sum(row.rows * row.cols * row.matrices for row in rows)
    kept = sum(row.kept_share * row.rows * row.cols * row.matrices for row in rows)
    tiles = [
        ("matrices", str(len(rows))),
        ("weights", number(weights)),
        ("kept as significant", percent(kept / max(1, weights))),
        ("fall into blocks", f"{sum(row.finding == 'separate' for row in rows)} of {len(rows)}"),
    ]
    if summary is not None:
        macs_before, macs_after = summary["macs"]
        tiles.append(("multiply-adds left", percent(macs_after / max(1, macs_before))))
    return tiles


def _validated(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None:
        return ""
    passed = bool(verdict.get("passed"))
    text = "Validation passed." if passed else "Validation did not pass."
    said = [*(verdict.get("reasons") or ()), *filter(None, [verdict.get("guarantee")])]
    reasons = " ".join(str(reason).rstrip(".") + "." for reason in said)
    return f'<p class="outcome{" passed" * passed}"><strong>{text}</strong> {escape(reasons)}</p>'


def _table_row(index: int, row: MatrixAnalysis) -> str:
    tone = " good" if row.finding in _GOOD else " some" if row.finding in _SOME else ""
    name = f'<th scope="row" data-value="{escape(row.name)}"><button type="button">{escape(row.name)}</button></th>'
    dormant = row.dormant_rows + row.dormant_cols
    cells = [
        (row.n_blocks, f"{row.n_blocks:,}"),
        (row.largest_share, percent(row.largest_share)),
        (row.kept_share, percent(row.kept_share)),
        (dormant, f"{dormant:,}"),
        (row.rows * row.cols * row.matrices, f"{row.rows}×{row.cols}" + f"·{row.matrices}" * (row.matrices > 1)),
        (row.null_fit, f"{row.null_fit:.3f}"),
    ]
    numbers = "".join(f'<td data-value="{value!r}">{text}</td>' for value, text in cells)
    null = f'<td class="words" data-value="{escape(row.null)}">{escape(row.null)}</td>'
    finding = (
        f'<td class="words" data-value="{list(FINDINGS).index(row.finding):02d}">'
        f'<span class="finding{tone}">{escape(row.finding)}</span></td>'
    )
    return f'<tr data-layer="{index}">{name}{finding}{numbers}{null}</tr>'


def _section(section: Section) -> str:
    drawn = "".join(f"<figure>{chart.svg(page=True)}</figure>" for chart in section.charts.values())
    figures = f'<div class="figures charts">{drawn}</div>' if drawn else ""
    tables = "".join(_table(rows, caption) for caption, rows in section.tables.items())
    if tables and drawn:
        tables = f"<details><summary>The numbers as a table</summary>{tables}</details>"
    return (
        f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">'
        f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>'
        f"<p>{escape(section.text)}</p>{figures}{tables}</section>"
    )


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    heads = "".join(
        f'<th scope="col"{" class=words" * any(_is_words(row.get(key)) for row in rows)}>'
        f"{escape(str(key).replace('_', ' '))}</th>"
        for key in keys
    )
    body = "".join(f"<tr>{''.join(_cell(row.get(key), key) for key in keys)}</tr>" for row in rows)
    return (
        f'<div class="scroll tall" role="region" aria-label="{escape(title)}" tabindex="0"><table>'
        f"<caption>{escape(title)}</caption><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any, key: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, (int, float)):
        text = (
            percent(value) if str(key).endswith("share") else f"{value:,}" if isinstance(value, int) else number(value)
        )
        return f"<td>{text}</td>"
    text = ", ".join(map(_short, value)) if isinstance(value, (list, tuple)) else str(value)
    return f'<td class="{"long" if len(text) > 40 else "words"}">{escape(text)}</td>'


def _is_words(value: Any) -> bool:
    return value is not None and not isinstance(value, (int, float))


def _short(value: Any) -> str:
    return number(value) if isinstance(value, (int, float)) else str(value)


def _layer(view: View) -> dict[str, Any]:
    row, levels = view.row, view.levels
    charts = [("Weights against f0", histogram_chart(view.histogram, row.null)), ("Weight classes", class_chart(row))]
    if view.directed is not None:
        charts.append(("Frobenius form and condensation of the feedback", view.directed.plot()))
    return {
        "name": row.name,
        "verdict": row.verdict,
        "size": [row.rows, row.cols],
        "grid": list(view.before.shape),
        "before": _bytes(255 * shades(view.before)),
        "after": _bytes(255 * shades(view.after)),
        "outlines": [[o.top, o.left, o.height, o.width, o.hub] for o in view.outlines],
        "order": _order(view),
        "key": "Darker cells keep more of their weights: the darkest of the first picture "
        f"{percent(view.before.max(initial=0.0))}, of the second {percent(view.after.max(initial=0.0))}.",
        "note": _note(view),
        "charts": [(title, chart.svg(page=True)) for title, chart in charts],
        "facts": _facts(row),
        "levels": {
            "thresholds": levels.thresholds.tolist(),
            "null_levels": [float(f"{x:.4g}") for x in levels.null_levels],
            "kept": levels.kept.tolist(),
            "entries": levels.entries,
            "cells": _bytes(levels.cells),
            "gaps": _bytes(levels.gaps),
            "sides": _bytes(levels.is_row),
            "counts": {name: counts.tolist() for name, counts in levels.counts.items()} or None,
            "start": levels.start,
        },
    }


def _bytes(array: np.ndarray) -> str:
    whole = array.round() if array.dtype.kind == "f" else array
    return base64.b64encode(whole.astype(np.uint8).tobytes()).decode()


def _order(view: View) -> str:
    blocks = sum(not outline.hub for outline in view.outlines)
    outlined = f"{blocks} block{'s' * (blocks != 1)} outlined"
    if view.directed is not None:
        return f"by component, layer and strongly connected part; {outlined}"
    if any(outline.hub for outline in view.outlines):
        return f"{outlined} in red, hubs as a border in amber"
    return f"block by block, dormant neurons last; {outlined}"


def _note(view: View) -> str:
    text = "Every stop is exact: the numbers are those of level_profile at this threshold. "
    if view.directed is not None:
        text += "An edge is kept where any gate keeps it; the order is that of the analysed level."
    else:
        text += "One order of the neurons keeps the blocks of all levels together. "
        text += "The slider asks for size alone (|w| ≥ threshold)."
    return text


def _facts(row: MatrixAnalysis) -> list[tuple[str, str]]:
    facts: list[tuple[str, Any]] = [
        ("Kind", row.kind + (f", {row.matrices} gates" if row.matrices > 1 else "")),
        ("Finding", f"{row.finding}: {FINDINGS[row.finding]}"),
        ("Format", row.dtype),
        ("Null f0", row.null + (" (measured)" if row.null_is_measured else "")),
        ("Fit of the null", f"{row.null_fit:.4f}" + ("" if row.null_fits else ", poor")),
        ("Level and threshold", f"{row.level:.3g}, |w| ≥ {row.threshold:.4g}"),
        ("Kept", f"{row.kept:,} ({percent(row.kept_share)}); by chance {number(row.expected_false_edges)}"),
        ("Blocks", f"{row.n_blocks:,}, as many as {row.effective_blocks:.2f} equal ones"),
        ("Largest block", f"{percent(row.largest_share)} of the neurons"),
        ("Dormant", f"{row.dormant_rows:,} outputs, {row.dormant_cols:,} inputs"),
        ("Percolation level", f"{row.percolation_level:.3g}: above it, noise alone is one block"),
    ]
    if row.shuffled is not None:
        count = row.shuffled["n_blocks"]
        rng = f"{count:,} block{'s' * (count != 1)}, the largest {percent(row.shuffled['largest_share'])}"
        facts.append(("The same in random places", rng))
    if row.hubs is not None and row.hubs["separates"] and row.hubs["count"]:
        hubs = f"rows {_some(row.hubs['rows'])}; columns {_some(row.hubs['cols'])}"
        facts.append(("Hubs", f"{row.hubs['count']}: {hubs}; without them {row.hubs['n_blocks']} blocks"))
    if row.n_scc is not None:
        facts.append(("Feedback", f"{row.n_scc} strong parts, {row.n_components} components, {row.n_layers} layers"))
    return facts


def _some(indices: Iterable[int]) -> str:
    listed = list(indices)
    return (", ".join(map(str, listed[:8])) + (" …" if len(listed) > 8 else "")) or "none"
