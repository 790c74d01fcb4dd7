"""Text tables, and small integer tables that print like the paper's and compare like arrays."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from crystallite.core.errors import InvalidOption

__all__ = ["Table", "terminal_width", "text_table"]

_LEAST = 12  # characters of a name or a text that gives way


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of integers, counted from 1 as the paper counts.

    >>> t = Table(("new", "old"), np.array([[1, 3], [2, 1]]))
    >>> print(t)
    new  old
      1    3
      2    1
    >>> t["old"].tolist(), np.asarray(t).shape
    ([3, 1], (2, 2))
    """

    columns: tuple[str, ...]
    values: np.ndarray  # (rows, columns)

    def __getitem__(self, column: str) -> np.ndarray:
        if column not in self.columns:
            raise InvalidOption(f"no column {column!r}; the table has {', '.join(self.columns)}")
        return self.values[:, self.columns.index(column)]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (tuple(row) for row in self.values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return self.columns == other.columns and np.array_equal(self.values, other.values)

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame(self.values, columns=list(self.columns))

    def __str__(self) -> str:
        return "\n".join(text_table([self.columns, *([str(v) for v in row] for row in self)], left=()))

    __repr__ = __str__


def text_table(rows: Sequence[Sequence[str]], width: int | None = None, left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table, the columns of `left` on the left and the others on the right.

    With a `width`, longer lines are shortened: names in the first column by the first letters of their parts, and a
    last column of `left` at its end.

    >>> text_table([["layer", "blocks"], ["encoder.layer.0.output", "4"]])
    ['layer                   blocks', 'encoder.layer.0.output       4']
    >>> text_table([["layer", "blocks"], ["encoder.layer.0.output", "4"]], width=24)
    ['layer             blocks', 'e.layer.0.output       4']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = 0 if width is None else max(0, sum(widths) + 2 * (len(widths) - 1) - width)
    last = len(widths) - 1
    if excess and last and last in left:  # the name and the text share what is left
        room = widths[0] + widths[last] - excess
        widths[0] = max(min(widths[0], max(room - widths[last], room // 2)), _LEAST)
        widths[last] = max(room - widths[0], _LEAST)
    elif excess:
        widths[0] = max(widths[0] - excess, _LEAST)
    return [_line(row, widths, left) for row in rows]


def terminal_width() -> int | None:
    """Columns of the terminal; None, for tables without abbreviations, where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _line(row: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = [_abbreviated(row[0], widths[0]), *row[1:]]
    cells = [c if len(c) <= w else c[: w - 1] + "…" for c, w in zip(cells, widths, strict=True)]
    aligned = [f"{c:<{w}}" if i in left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(aligned).rstrip()


def _abbreviated(name: str, width: int) -> str:
    """A name in `width` characters: the first parts by their first letter, as many as it takes; numbers stay.

    >>> _abbreviated("encoder.layer.0.attention.output.dense", 22)
    'e.l.0.a.output.dense'
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        parts[i] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    return short if len(short) <= width else "…" + short[-(width - 1) :]
