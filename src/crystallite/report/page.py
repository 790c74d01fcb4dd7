"""The report as one HTML page: nothing loaded from elsewhere, and no text of a checkpoint ever read as markup."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from crystallite.analysis import Analysis, MatrixAnalysis
from crystallite.analysis.degrees import in_words
from crystallite.analysis.verdict import FINDINGS
from crystallite.core.axes import number, percent
from crystallite.core.web import page_policy
from crystallite.report.advice import next_steps
from crystallite.report.layer_charts import class_chart, histogram_chart, shades
from crystallite.report.rebuilt import Rebuilt
from crystallite.report.sections import Section, figure
from crystallite.report.view import View

__all__ = ["page"]

_COLUMNS = ("Matrix", "Finding", "Blocks", "Largest", "Kept", "Dormant", "Size", "Fit", "Null f0")
_WORDS = ("Matrix", "Finding", "Null f0")
_GOOD, _SOME = ("separate",), ("hubs", "nested")
_TERMS = {  # what the columns of the table, and words in findings, mean
    "Blocks": "Outputs and inputs joined by kept weights. Blocks share no kept weight, so each can be computed alone.",
    "Largest": "The share of the neurons in the largest block.",
    "Kept": "Weights that pass the tests.",
    "Dormant": "Outputs or inputs without a kept weight. An output still emits its bias.",
    "Fit": "Kolmogorov–Smirnov distance between the weights and f0; small is good.",
    "Null f0": "What chance alone would have put into the matrix: its initialisation where that explains the bulk of "
    "the weights, else the bulk itself (“empirical”).",
    "Hub": "One of few rows or columns without which a large block would fall apart; drawn as a border.",
}
_RULES = {
    "both": "A weight that is larger than chance explains (Neyman test) and favours some outputs over others "
    "(random-walk test). Only these are drawn.",
    "neyman": "A weight that is larger than chance explains (Neyman test). Only these are drawn.",
}


def page(
    title: str,
    analysis: Analysis,
    views: Sequence[View],
    rebuilt: Sequence[Rebuilt],
    verdict: Mapping[str, Any] | None,
    results: Sequence[Section],
    after: Sequence[Section],
) -> str:
    """The whole page: what came of the network first, then what to do next, then what the tests say of it.

    verdict: of a model that is not among those rebuilt; results, after: sections before and after that of the layers.
    """
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    headline, _, findings = analysis.verdict.partition(": ")
    found = headline.rstrip(".") + ".", findings[:1].upper() + findings[1:]
    named = {s.anchor: s.title for s in results} if rebuilt else {}
    named |= {"next": "Next"} | {s.anchor: s.title for s in results} | {"layers": "What the tests say"}
    named |= {s.anchor: s.title for s in after}
    settings = f"level {analysis.options.level}, rule “{analysis.options.rule}”"
    rows = "\n".join(_table_row(i, row) for i, row in enumerate(analysis.rows))
    parts = [*map(_section, results), _next(next_steps(analysis, rebuilt))]
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        policy=page_policy(style, script),
        title=escape(title),
        style=style,
        script=script,
        headline=escape(_headline(rebuilt) or found[0]),
        findings=escape("" if rebuilt else found[1]),
        validated="".join(_validated(one.verdict, one.name if len(rebuilt) > 1 else "") for one in rebuilt)
        or _validated(verdict),
        tiles="".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _tiles(analysis, rebuilt)
        ),
        links="".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title in named.items()),
        top="\n".join(parts if rebuilt else [parts[-1], *parts[:-1]]),
        tested=escape(" ".join(found)) if rebuilt else "",
        after="\n".join(map(_section, after)),
        caption=escape(f"{len(analysis.rows)} matrices at {settings}"),
        heads="".join(map(_head, _COLUMNS)),
        rows=rows,
        first=_most_telling(analysis.rows),
        terms="".join(
            f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}</dd></div>"
            for term, meaning in {**_TERMS, "Kept": _RULES[analysis.options.rule]}.items()
        ),
        version=version("crystallite"),
        data="\n".join(
            f'<script type="application/json" id="layer-{i}">{_json(_layer(view))}</script>'
            for i, view in enumerate(views)
        ),
    )


def _head(name: str) -> str:
    kind, words = ("word", " class=words") if name in _WORDS else ("number", "")
    meaning = f' title="{escape(_TERMS[name])}"' if name in _TERMS else ""
    return f'<th scope="col" data-kind="{kind}"{words}><button type="button"{meaning}>{escape(name)}</button></th>'


def _next(steps: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(text)}{f' <code>{escape(code)}</code>' if code else ''}</li>" for text, code in steps)
    return (
        '<section id="next" aria-labelledby="next-title"><h2 id="next-title">What to do next</h2>'
        f'<ul class="steps">{items}</ul></section>'
    )


def _headline(rebuilt: Sequence[Rebuilt]) -> str:
    """What was gained, of several models by the best of each; "" where nothing was rebuilt."""
    if not rebuilt:
        return ""
    share = percent(min(one.macs[1] / max(1, one.macs[0]) for one in rebuilt))
    faster = max((one.speedup or 0.0 for one in rebuilt), default=0.0)
    if len(rebuilt) == 1:
        return f"{share} of the multiply-adds" + (f", {faster:.2g}× as fast." if faster else ".")
    gained = f"{len(rebuilt)} smaller models: down to {share} of the multiply-adds"
    return gained + (f", up to {faster:.2g}× as fast." if faster else ".")


def _json(value: Any) -> str:
    """JSON that no HTML parser can leave early."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _most_telling(rows: Sequence[MatrixAnalysis]) -> int:
    """The layer to open first: the best finding; embeddings are distinguished by rows, so rather not one of them."""
    order = list(FINDINGS)
    return min(range(len(rows)), key=lambda i: (order.index(rows[i].finding), rows[i].kind == "embedding"), default=0)


def _tiles(analysis: Analysis, rebuilt: Sequence[Rebuilt]) -> list[tuple[str, str]]:
    """The figures on top: of what was rebuilt, else of the analysis."""
    if len(rebuilt) == 1:
        (one,), verdict = rebuilt, rebuilt[0].verdict or {}
        metric, size = verdict.get("metric"), verdict.get("parameters") or one.summary["parameters"]
        tiles = [(metric["name"], " → ".join(map(figure, metric["values"])))] if metric else []
        tiles.append(("multiply-adds left", percent(one.macs[1] / max(1, one.macs[0]))))
        tiles += [("as fast", f"{one.speedup:.2f}×")] if one.speedup else []
        return [*tiles, ("parameters left", percent(size[1] / max(1, size[0])))]
    if rebuilt:
        return []
    rows = analysis.rows
    weights = sum(row.rows * row.cols * row.matrices for row in rows)
    kept = sum(row.kept_share * row.rows * row.cols * row.matrices for row in rows)
    return [
        ("matrices", str(len(rows))),
        ("weights", number(weights)),
        ("kept as significant", percent(kept / max(1, weights))),
        ("fall into blocks", f"{sum(row.finding == 'separate' for row in rows)} of {len(rows)}"),
    ]


def _validated(verdict: Mapping[str, Any] | None, name: str = "") -> str:
    if verdict is None:
        return ""
    passed = bool(verdict.get("passed"))
    text = "Validation passed." if passed else "Validation did not pass."
    said = [*(verdict.get("reasons") or ()), *filter(None, [verdict.get("guarantee")])]
    reasons = " ".join(str(reason).rstrip(".") + "." for reason in said)
    which = f"{escape(name)}: " if name else ""
    return f'<p class="outcome{" passed" * passed}"><strong>{which}{text}</strong> {escape(reasons)}</p>'


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
    tables = "".join(_table(rows, caption, section.title) for caption, rows in section.tables.items())
    if tables and drawn:
        tables = f"<details><summary>The numbers as a table</summary>{tables}</details>"
    return (
        f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title">'
        f'<h2 id="{section.anchor}-title">{escape(section.title)}</h2>'
        f"<p>{escape(section.text)}</p>{figures}{tables}</section>"
    )


def _table(rows: Sequence[Mapping[str, Any]], title: str, section: str) -> str:
    if not rows:
        return ""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    heads = "".join(
        f'<th scope="col"{" class=words" * any(_is_words(row.get(key)) for row in rows)}>'
        f"{escape(str(key).replace('_', ' '))}</th>"
        if str(key).strip()
        else "<td></td>"  # a corner without a name is no header
        for key in keys
    )
    body = "".join(f"<tr>{''.join(_cell(row.get(key), key) for key in keys)}</tr>" for row in rows)
    return (
        f'<div class="scroll tall" role="region" aria-label="{escape(f"{title}, {section}")}" tabindex="0"><table>'
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
    if row.modularity is not None:
        facts.append(("In degrees", in_words(row.modularity)))
        facts.append(("Heaviest neurons", _heavy(row.modularity)))
    if row.n_scc is not None:
        facts.append(("Feedback", f"{row.n_scc} strong parts, {row.n_components} components, {row.n_layers} layers"))
    return facts


def _heavy(found: Mapping[str, Any]) -> str:
    """Hubs of the modules, and what score minus chance gains without each of them."""
    sides = ("row", "column") if len(found["sizes"]) > 1 else ("unit", "unit")
    named = [f"{sides[hub['group']]} {hub['neuron']} ({hub['gain']:+.3f})" for hub in found["hubs"]]
    return ", ".join(named) or "none stands out"


def _some(indices: Iterable[int]) -> str:
    listed = list(indices)
    return (", ".join(map(str, listed[:8])) + (" …" if len(listed) > 8 else "")) or "none"
