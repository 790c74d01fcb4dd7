"""Outcomes as text: one line for each model, and what went wrong, grouped by cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

from tests.zoo.entry import Entry

__all__ = ["Table", "causes", "overview", "problems"]

Table = dict[str, dict[str, dict[str, Any]]]  # model → verb → outcome
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


def problems(entry: Entry, cells: dict[str, dict[str, Any]]) -> list[str]:
    """Cells that came out otherwise than the registry says."""
    found = []
    for verb, cell in cells.items():
        expected = entry.expected(verb)
        reason = entry.refused.get(verb, "")
        if cell["status"] != expected or (expected == "refused" and reason not in cell["text"]):
            came = f"{cell['status']}: {cell['text']} {cell['frames']}"
            found.append(f"{entry.name} × {verb}: expected {expected} {reason}, got {came}")
    return found
