"""`crystallite demo --paper`: both worked examples of the paper, from the matrix to the last table, beside ours."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from crystallite.core.maps import Permutation
from crystallite.structure.decompose import decompose

__all__ = ["PrintedTable", "printed_tables", "run"]

_GAP = "   │   "


@dataclass(frozen=True)
class PrintedTable:
    """One table of the paper: its numbers, blanks as zeros, and the lines it has between blocks."""

    name: str
    heading: tuple[str, ...]  # names of the columns, where it has some
    values: np.ndarray
    column_lines: frozenset[int]  # a line before these columns
    row_lines: frozenset[int]  # a line before these rows

    def lines(self, values: np.ndarray, blank: bool) -> list[str]:
        """Numbers in the form of this table, zeros blank where it is a matrix."""
        cells = [["" if blank and v == 0 else str(v) for v in row] for row in values.tolist()]
        cells = [list(self.heading), *cells] if self.heading else cells
        widths = [max(1, *map(len, column)) for column in zip(*cells, strict=True)]
        text = []
        for k, row in enumerate(cells):
            number = k - bool(self.heading)
            line = ""
            for j, cell in enumerate(row):
                line += ("│" if j in self.column_lines else " ") * (j > 0) + cell.rjust(widths[j])
            if number in self.row_lines and k:
                ruled = [("┼" if j in self.column_lines else "─") * (j > 0) + "─" * w for j, w in enumerate(widths)]
                text.append("".join(ruled))
            text.append(line)
        return text


def printed_tables() -> dict[str, PrintedTable]:
    """The tables of both examples by name, parsed from the lines of the paper's source.

    >>> printed_tables()["P_1"].values.tolist()
    [8, 12, 4, 11, 9, 5, 10, 2, 1, 7, 3, 6]
    """
    source = files("crystallite.demo").joinpath("paper_tables.tex").read_text(encoding="utf-8")
    parts = re.split(r"^%% (.*)$", source, flags=re.MULTILINE)[1:]
    return {name: _parsed(name, body) for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _parsed(name: str, body: str) -> PrintedTable:
    begin = re.search(r"\\begin\{(?:array|tabular)\}\{((?:[^{}]|\{[^{}]*\})*)\}", body)
    assert begin is not None, name
    inside = re.split(r"\\end\{(?:array|tabular)\}", body[begin.end() :])[0]
    columns = re.sub(r"\*\{\d+\}", "", begin[1])
    rows, row_lines = list[list[str]](), set[int]()
    for row in inside.split(r"\\"):
        if r"\hline" in row:
            row_lines.add(len(rows))
        plain = re.sub(r"\\hline|\\text|[{}$ \n]", "", row)
        if plain:
            rows.append(plain.split("&"))
    bars = {m.start() - i for i, m in enumerate(re.finditer(r"\|", columns))}
    if rows[0][0] == "new":  # a permutation, printed in two lines
        return PrintedTable(name, (), np.array([int(v) for v in rows[1][1:]]), frozenset(), frozenset())
    heading: tuple[str, ...] = ()
    if not rows[0][-1].isdigit() or not rows[0][0].isdigit():
        heading, rows, row_lines = tuple(rows[0]), rows[1:], {line - 1 for line in row_lines}
    values = np.array([[int(v or 0) for v in row] for row in rows])
    if name in ("A", "V"):  # the first column numbers the lines
        values, heading, bars = values[:, 1:], heading[1:], {b - 1 for b in bars if b > 1}
        heading = () if name == "A" else heading
    return PrintedTable(name, heading, values, frozenset(bars), frozenset(line for line in row_lines if line >= 0))


def run() -> bool:
    """Print every table of both examples beside ours; whether all are equal."""
    printed = printed_tables()
    found = _computed(printed)
    equal: dict[str, bool] = {}
    print("The paper on the left, crystallite on the right; numbers count from 1, zeros of matrices are blank.")
    for title, names in _SECTIONS:
        print(f"\n{title}\n{'=' * len(title)}")
        for name in names:
            equal[name] = _shown(printed[name], np.asarray(found[name]))
    compared = [same for name, same in equal.items() if name not in _GIVEN and name != "PAP^T"]
    figure = "is equal" if equal["PAP^T"] else "differs"
    print(f"\n{sum(compared)} of the {len(compared)} printed results are equal; {len(_GIVEN)} tables are given.")
    print(f"Figure 8.3, whose image is not in the paper's source, is built from its table V and {figure}.")
    return all(equal.values())


_SECTIONS = (
    ("Feed-forward example (section 7.5)", ("M", "P_1", "Q_1", "M'", "Y", "X", "P_2", "Q_2", "M''", "P_2P_1", "Q_2Q_1",
                                            "(P_2P_1)^-1", "(Q_2Q_1)^-1", "M again")),
    ("Feedback example (section 8.5)", ("A", "V", "PAP^T")),
)  # fmt: skip


def _computed(printed: dict[str, PrintedTable]) -> dict[str, Any]:
    """What we make of the two matrices and the two random permutations that the paper starts from."""
    m = printed["M"].values
    p1, q1 = (Permutation(printed[name].values - 1) for name in ("P_1", "Q_1"))
    scrambled = p1 @ m @ q1.T
    s = decompose(scrambled)
    y, x = s.tables()
    p, q = s.P @ p1, s.Q @ q1
    a = printed["A"].values
    d = decompose(a, kind="directed")
    order = printed["V"].values[:, 0] - 1
    bounds = np.cumsum([len(nodes) for nodes in d.components])
    lines = frozenset(bounds.tolist())
    printed["PAP^T"] = PrintedTable("PAP^T", (), a[np.ix_(order, order)], lines, lines)
    return {
        "M": m, "P_1": p1.source + 1, "Q_1": q1.source + 1, "M'": scrambled, "Y": y, "X": x,
        "P_2": s.P.source + 1, "Q_2": s.Q.source + 1, "M''": s.apply(scrambled),
        "P_2P_1": p.source + 1, "Q_2Q_1": q.source + 1,
        "(P_2P_1)^-1": p.inverse().source + 1, "(Q_2Q_1)^-1": q.inverse().source + 1,
        "M again": p.inverse() @ s.apply(scrambled) @ q.T.inverse(),
        "A": a, "V": d.table(), "PAP^T": d.apply(a),
    }  # fmt: skip


_GIVEN = {"M", "P_1", "Q_1", "A"}
_MEANING = {
    "M": "the original matrix (given)",
    "P_1": "P₁, a random permutation (given)",
    "Q_1": "Q₁, a random permutation (given)",
    "M'": "M′ = P₁ M Q₁ᵀ, the input of the algorithm",
    "Y": "table Y",
    "X": "table X",
    "P_2": "P₂ = ⟨Y.NewIndex, Y.Index⟩",
    "Q_2": "Q₂ = ⟨X.NewIndex, X.Index⟩",
    "M''": "M″ = P₂ M′ Q₂ᵀ",
    "P_2P_1": "P₂P₁",
    "Q_2Q_1": "Q₂Q₁",
    "(P_2P_1)^-1": "(P₂P₁)⁻¹",
    "(Q_2Q_1)^-1": "(Q₂Q₁)⁻¹",
    "M again": "(P₂P₁)⁻¹ M″ ((Q₂Q₁)ᵀ)⁻¹ = M",
    "A": "the adjacency matrix, an edge j → i in row i and column j (given)",
    "V": "the node table V",
    "PAP^T": "P A Pᵀ as in figure 8.3: left by the paper's NewIndex, right by our P; lines between weak components",
}


def _shown(table: PrintedTable, ours: np.ndarray) -> bool:
    print(f"\n{_MEANING[table.name]}")
    values = table.values
    if values.ndim == 1:
        print(f"  paper        {' '.join(f'{v:>2}' for v in values)}")
        if table.name not in _GIVEN:
            print(f"  crystallite  {' '.join(f'{v:>2}' for v in ours)}")
    else:
        blank = not table.heading
        left = table.lines(values, blank)
        right = (
            table.lines(ours, blank) if table.name not in _GIVEN and values.shape == ours.shape else [""] * len(left)
        )
        width = max(map(len, left))
        for a, b in zip(left, right, strict=True):
            print(f"  {a:<{width}}{_GAP if b or table.name not in _GIVEN else ''}{b}".rstrip())
    if table.name in _GIVEN:
        return True
    same = np.array_equal(values, ours)
    print(f"  {'equal' if same else _difference(values, ours)}")
    return same


def _difference(paper: np.ndarray, ours: np.ndarray) -> str:
    if paper.shape != ours.shape:
        return f"DIFFERENT: the paper's has shape {paper.shape}, ours {ours.shape}"
    places = np.argwhere(paper != ours)
    where = ", ".join(str(tuple((place + 1).tolist())) for place in places[:5])
    return f"DIFFERENT in {len(places)} entries, the first at {where}"
