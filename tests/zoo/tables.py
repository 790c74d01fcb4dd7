"""Outcomes as text: one line for each model, and what went wrong, grouped by cause."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

__all__ = ["OUTCOMES", "Table", "causes", "known_outcomes", "overview", "problems", "store_outcomes"]

OUTCOMES = Path(__file__).with_name("outcomes.json")

Table = dict[str, dict[str, dict[str, Any]]]  # model → verb → outcome
_KEPT = 200  # characters of a refusal
SIGNS = {"works": "✓", "refused": "r", "crash": "CRASH", "wrong": "WRONG", "nothing": "NOTHING", "n/a": "·"}


def overview(table: Table) -> str:
    """A line for each model, a column for each verb, counts below."""
    verbs = list(dict.fromkeys(verb for cells in table.values() for verb in cells))
    rows = [["model", *verbs, "share", "error", "seconds"]]
    for name, cells in table.items():
        numbers = cells.get("compress", {}).get("numbers", {})
        share, error = (f"{numbers[name]:.3f}" if name in numbers else "" for name in ("share", "error"))
        seconds = f"{sum(cell['seconds'] for cell in cells.values()):.0f}"
        rows.append([name, *(SIGNS[cells[v]["status"]] if v in cells else "" for v in verbs), share, error, seconds])
    for status in SIGNS:
        counts = [sum(cells.get(v, {}).get("status") == status for cells in table.values()) for v in verbs]
        rows.append([status, *(str(n or "") for n in counts), "", "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines[: -len(SIGNS)], "", *lines[-len(SIGNS) :]])


def causes(table: Table) -> str:
    """Cells that do not work, grouped by what was said, most frequent first."""
    groups = defaultdict[tuple[str, str, str], list[tuple[str, dict[str, Any]]]](list)
    for name, cells in table.items():
        for verb, cell in cells.items():
            if cell["status"] not in ("works", "n/a"):
                groups[verb, cell["status"], _shape(cell["text"])].append((name, cell))
    lines = []
    for (verb, status, _), found in sorted(groups.items(), key=lambda item: -len(item[1])):
        names = ", ".join(name for name, _ in found)
        lines += [f"{len(found):3} × {verb} {status}: {found[0][1]['text']}", f"      {names}"]
        frames = Counter(" < ".join(reversed(cell["frames"])) for _, cell in found if cell["frames"])
        lines += [f"      at {frames.most_common(1)[0][0]}"] if frames else []
    return "\n".join(lines)


def _shape(text: str) -> str:
    """What is the same in messages about different models."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", text)
    text = re.sub(r"[\w]+(\.[\w]+)+", "…", text)
    return re.sub(r"[A-Z]\w*(For|Model|LM)\w*|-?\d[\d.e,%-]*", "#", text)[:90]


def problems(name: str, cells: dict[str, dict[str, Any]], known: dict[str, dict[str, str]]) -> list[str]:
    """Cells that crash, are wrong or do nothing, and those that came out, or are refused, otherwise than is known."""
    found = []
    for verb, cell in cells.items():
        before = known.get(verb, cell)
        changed = cell["status"] != before["status"] or (
            cell["status"] == "refused" and _shape(cell["text"][:_KEPT]) != _shape(before["text"])
        )
        if changed or cell["status"] not in ("works", "refused", "n/a"):
            expected = f"{before['status']} {before.get('text', '')}" if verb in known else "works or a reason"
            came = f"{cell['status']}: {cell['text']} {cell['frames']}"
            found.append(f"{name} × {verb}: expected {expected}, got {came}")
    return found


def known_outcomes() -> dict[str, dict[str, dict[str, str]]]:
    """What every cell came to when it was last run: model → verb → status and, of a refusal, its text."""
    found: dict[str, dict[str, dict[str, str]]] = json.loads(OUTCOMES.read_text())
    return found


def store_outcomes(table: Table) -> None:
    """Keep what cells came to, beside those that were not run."""
    known = known_outcomes() if OUTCOMES.exists() else {}
    for name, cells in table.items():
        short = {
            verb: {"status": cell["status"]} | ({"text": cell["text"][:_KEPT]} if cell["status"] == "refused" else {})
            for verb, cell in cells.items()
        }
        known[name] = known.get(name, {}) | short
    OUTCOMES.write_text(json.dumps(known, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
