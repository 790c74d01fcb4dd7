"""Drawings of whole runs: level sweeps, quality against cost, and the training monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from crystallite.core.drawing import SERIES, Dot, Drawing, Label, Line, Shape
from crystallite.report.axes import HEIGHT, WIDTH, Axis, finite, frame, legend, number

__all__ = ["front_charts", "monitor_charts", "sweep_charts"]

Row = dict[str, Any]
_Box = tuple[float, float, float, float]  # left, top, right, bottom
_NAMED_POINTS = 16
_LETTER, _LINE, _LINES = 6.2, 11, 12  # width of a letter of a name, height of a name, and how many heights are tried
_FRAME: _Box = (50, 14, WIDTH - 2, 180)  # names stay inside
_SWEEP = (
    ("metric", "task metric", False),
    ("agreement", "samples with the same decision", True),
    ("cosine", "cosine to the original outputs", False),
    ("mean_deviation", "mean relative deviation of the outputs", False),
    ("relative_deviation", "relative deviation of the outputs", False),
    ("kept_share", "weights kept", True),
    ("macs_share", "multiply-adds left", True),
    ("largest_share", "neurons in the largest block", True),
    ("blocks", "blocks of all layers", False),
    ("dormant", "dormant neurons", False),
)
_MONITOR = (
    ("sigma", "second singular value σ₂", False),
    ("blocks", "blocks", False),
    ("largest_share", "neurons in the largest block", True),
    ("kept_share", "weights kept", True),
)


def sweep_charts(rows: Sequence[Row]) -> dict[str, Drawing]:
    """What changes with the level, one chart per measure, one line per rule."""
    tested = [
        row
        | {"level": row.get("entry_level", row["level"])}  # "percolation" is a level too
        | {"blocks": sum(row["blocks"]) if isinstance(row.get("blocks"), Sequence) else row.get("blocks")}
        for row in rows
    ]
    return _line_charts(tested, _SWEEP, "level", "significance level x", "rule", log=True)


def monitor_charts(rows: Sequence[Row]) -> dict[str, Drawing]:
    """What changes while training, one chart per measure, one line per layer."""
    flat = [{**row, "sigma": (row.get("sigma") or [None, None])[1:2]} for row in rows]
    flat = [{**row, "sigma": row["sigma"][0] if row["sigma"] else None} for row in flat]
    return _line_charts(flat, _MONITOR, "step", "training step", "layer", log=False)


def front_charts(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Quality against multiply-adds, and against latency; the dashed line joins what nothing beats."""
    costs = (("macs", "multiply-adds"), ("latency_ms", "latency, ms"))
    return {title: _front(rows, key, title) for key, title in costs if any(finite([row.get(key)]) for row in rows)}


def _line_charts(
    rows: Sequence[Row], measures: Sequence[tuple[str, str, bool]], along: str, title: str, by: str, *, log: bool
) -> dict[str, Drawing]:
    charts = {}
    names = list(dict.fromkeys(str(row.get(by, "")) for row in rows))
    for key, label, share in measures:
        lines = {
            name: sorted(
                (float(row[along]), float(row[key]))
                for row in rows
                if str(row.get(by, "")) == name and finite([row.get(along)]) and finite([row.get(key)])
            )
            for name in names
        }
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            charts[label] = _lines(lines, title, label, share, log)
    return charts


def _lines(lines: dict[str, list[tuple[float, float]]], along: str, label: str, share: bool, log: bool) -> Drawing:
    x = Axis.over([p[0] for points in lines.values() for p in points], along, log=log)
    y = Axis.over([p[1] for points in lines.values() for p in points], label, share=share)
    colour = _colours(list(lines))
    shapes: list[Shape] = list(frame(x, y))
    for name, points in reversed(lines.items()):  # the named ones on top
        places = tuple((x.x(a), y.y(b)) for a, b in points)
        shapes.append(Line(places, colour(name), 2 if colour(name) != "muted" else 1))
        if len(places) <= 16:
            shapes += [Dot(a, b, 2.5, colour(name)) for a, b in places]
    named = [(name, colour(name)) for name in lines if colour(name) != "muted"]
    rest = [(f"{len(lines) - len(named)} more", "muted")] if len(lines) > len(named) else []
    entries, extra = legend(named + rest) if len(lines) > 1 else ([], 0)
    ends = [f"{name}: {y.text(p[0][1])} to {y.text(p[-1][1])}" for name, p in list(lines.items())[: len(SERIES)]]
    text = f"{label} over {along}, from {number(x.low)} to {number(x.high)}. " + "; ".join(ends) + "."
    return Drawing(WIDTH, HEIGHT + extra, text, (*shapes, *entries))


def _front(rows: Sequence[Row], cost: str, title: str) -> Drawing:
    points = [row for row in rows if finite([row.get(cost)]) and finite([row.get("quality")])]
    x = Axis.over([row[cost] for row in points], title, log=True)
    y = Axis.over([row["quality"] for row in points], "quality")
    colour = _colours(list(dict.fromkeys(str(row.get("family", "")) for row in points)))
    best, quality = [], float("-inf")
    for row in sorted(points, key=lambda r: (r[cost], -r["quality"])):
        if row["quality"] > quality:
            best.append(row)
            quality = row["quality"]
    shapes: list[Shape] = list(frame(x, y))
    if len(best) > 1:
        shapes.append(Line(tuple((x.x(r[cost]), y.y(r["quality"])) for r in best), "muted", 1.5, dashed=True))
    dots = [(x.x(row[cost]), y.y(row["quality"])) for row in points]
    names = [str(row.get("name", ""))[:28] for row in points]
    if len(points) <= _NAMED_POINTS:
        shapes += _named(dots, names)
    shapes += [Dot(*at, 4.5, colour(str(row.get("family", "")))) for at, row in zip(dots, points, strict=True)]
    families = dict.fromkeys(str(row.get("family", "")) for row in points)
    entries, extra = legend([(name, colour(name)) for name in families if name])
    unbeaten = ", ".join(f"{row.get('name', '')} ({number(row[cost])}: {number(row['quality'])})" for row in best[:8])
    text = f"Quality against {title} of {len(points)} variants. Not beaten by a cheaper one: {unbeaten}."
    return Drawing(WIDTH, HEIGHT + extra, text, (*shapes, *entries))


def _named(dots: Sequence[tuple[float, float]], names: Sequence[str]) -> list[Shape]:
    """A name at every dot, on the side and at the height nearest to it where it covers no dot and no other name."""
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in dots]
    shapes: list[Shape] = []
    for (x, y), name in sorted(zip(dots, names, strict=True), key=lambda pair: pair[0][1]):
        places = _places(x, y, _LETTER * len(name))
        found = next((box for box in places if not any(_overlap(box, other) for other in taken)), None)
        if found is None:  # better none than two over each other
            continue
        taken.append(found)
        left, top, right, bottom = found
        side, anchor, near = (left, "start", left - 2) if left > x else (right, "end", right + 2)
        if (top + bottom) / 2 != y or abs(near - x) > 10:
            shapes.append(Line(((x, y), (near, (top + bottom) / 2)), "muted", 0.75))
        shapes.append(Label(side, bottom - 2, name, "ink", anchor, 10))
    return shapes


def _places(x: float, y: float, width: float) -> Iterator[_Box]:
    """Where the name of a dot may stand inside the frame, the nearest place first."""
    for line in sorted(range(-_LINES, _LINES + 1), key=lambda k: (abs(k), -k)):
        for left in (x + 9, x - 9 - width, x + 24, x - 24 - width):
            box = left, y + (line - 0.5) * _LINE, left + width, y + (line + 0.5) * _LINE
            if box[0] >= _FRAME[0] and box[1] >= _FRAME[1] and box[2] <= _FRAME[2] and box[3] <= _FRAME[3]:
                yield box


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _colours(names: list[str]) -> Callable[[str], str]:
    """A colour of its own for each of the first names, a common one for the rest."""
    own = dict(zip(names, SERIES, strict=False))
    return lambda name: own.get(name, "muted")
