"""Rows as lines of JSON in a file that a training may be killed over and resumed with."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crystallite.core.files import write_file, writing

__all__ = ["Journal", "read_journal"]


class Journal:
    """A JSONL file, appended to row by row and flushed after each record.

    An existing file is continued: a last line that was cut off is dropped, and so are rows from the first step written
    now on, which a training resumed from an earlier checkpoint records again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._resumed = False

    def write(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        if not self._resumed:
            self._resume(step)
            self._resumed = True
        lines = [json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def _resume(self, step: int) -> None:
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        before = [row for row in read_journal(self.path) if row["step"] < step]
        write_file(self.path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in before).encode())


def read_journal(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a journal; lines that are no rows, such as one cut off at the end, are left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
