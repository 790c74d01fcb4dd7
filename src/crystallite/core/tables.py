"""Text tables, and small integer tables that print like the paper's and compare like arrays."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from crystallite.core.errors import InvalidOption

__all__ = ["Table", "abbreviated", "by_expert", "html_table", "html_text", "span", "terminal_width", "text_table"]

_LEAST = 12  # characters of a name or a text that gives way
_EXPERT = re.compile(r"(.*\bexperts)(?:\.(\d+)((?:\.[^\[\]]*)?)|(\.[^\[\]]+)\[(\d+)\])")  # experts.3.up, experts.up[3]
_MANY = 3  # experts that share a line
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?%?")


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


def html_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """The same as HTML, for notebooks; the first row is the heading.

    >>> html_table([["<a>"]])
    '<table><thead><tr><th style="text-align: left">&lt;a&gt;</th></tr></thead><tbody></tbody></table>'
    """

    def line(cells: Sequence[str], kind: str) -> str:
        sides = ("left" if place in left else "right" for place in range(len(cells)))
        shown = zip(cells, sides, strict=True)
        return "".join(f'<{kind} style="text-align: {side}">{escape(cell)}</{kind}>' for cell, side in shown)

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{line(rows[0], 'th')}</tr></thead><tbody>{body}</tbody></table>"


def html_text(text: str, style: str = "") -> str:
    """Lines of text as HTML, for notebooks, whose own style sheets may take the fixed width from a plain <pre>.

    >>> html_text("a  <b>")
    '<pre style="font-family: monospace; ">a  &lt;b&gt;</pre>'
    """
    return f'<pre style="font-family: monospace; {style}">{escape(text)}</pre>'


def by_expert(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Lines of a table: a name and the places of the rows it stands for, where the same layers of experts share one.

    >>> by_expert(["q", *(f"mlp.experts.{i}.{layer}" for i in range(4) for layer in ("up", "down"))])
    [('q', [0]), ('mlp.experts.0…3.up', [1, 3, 5, 7]), ('mlp.experts.0…3.down', [2, 4, 6, 8])]
    >>> by_expert(["mlp.experts.up[0]", "mlp.experts.up[1]", "mlp.experts.up[2]"])
    [('mlp.experts.up[0…2]', [0, 1, 2])]
    """
    found: dict[str, list[int]] = {}
    numbers: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        match = _EXPERT.fullmatch(name)
        key = name
        if match:
            head, number, tail, stack, inside = match.groups()
            key = f"{head}.*{tail}" if number else f"{head}{stack}[*]"
            numbers.setdefault(key, []).append(int(number or inside))
        found.setdefault(key, []).append(place)
    lines: list[tuple[str, list[int]]] = []
    for key, places in found.items():
        if key in numbers and len(places) >= _MANY:
            lines.append((key.replace("*", f"{min(numbers[key])}…{max(numbers[key])}"), places))
        else:
            lines += [(names[place], [place]) for place in places]
    return lines


def span(texts: Sequence[str]) -> str:
    """Texts that differ in their numbers as one, in which ranges stand for them; others after each other, counted.

    >>> span(["8 of 64 inputs, error 9.5%", "16 of 64 inputs, error 12%"])
    '8…16 of 64 inputs, error 9.5%…12%'
    >>> span(["noise", "blocks", "noise"])
    '2: noise; 1: blocks'
    """
    alike: dict[str, list[list[str]]] = {}
    for text in texts:
        alike.setdefault(_NUMBER.sub("#", text), []).append(_NUMBER.findall(text))
    merged = []
    for skeleton, numbers in alike.items():
        ranges = [_range(column) for column in zip(*numbers, strict=True)]
        between = skeleton.split("#")
        merged.append((len(numbers), between[0] + "".join(map("".join, zip(ranges, between[1:], strict=True)))))
    return merged[0][1] if len(merged) == 1 else "; ".join(f"{count}: {text}" for count, text in merged)


def _range(numbers: Sequence[str]) -> str:
    ordered = sorted(numbers, key=lambda number: float(number.rstrip("%").replace(",", "")))
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}…{ordered[-1]}"


def terminal_width() -> int | None:
    """Columns of the terminal; None, for tables without abbreviations, where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _line(row: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    cells = [abbreviated(row[0], widths[0]), *row[1:]]
    cells = [c if len(c) <= w else c[: w - 1] + "…" for c, w in zip(cells, widths, strict=True)]
    aligned = [f"{c:<{w}}" if i in left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  ".join(aligned).rstrip()


def abbreviated(name: str, width: int) -> str:
    """A name in `width` characters: the first parts by their first letter, as many as it takes; numbers stay.

    >>> abbreviated("encoder.layer.0.attention.output.dense", 22)
    'e.l.0.a.output.dense'
    """
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= width:
            break
        parts[i] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    return short if len(short) <= width else "…" + short[-(width - 1) :]
