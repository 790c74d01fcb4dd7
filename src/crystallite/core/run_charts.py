"""Charts of numbers: lines, bars, and those of whole runs: level sweeps, quality against cost, the training monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from crystallite.core.axes import HEIGHT, WIDTH, Axis, finite, frame, legend, number
from crystallite.core.drawing import SERIES, Box, Dot, Drawing, Label, Line, Raster, Shape

__all__ = [
    "bar_chart",
    "curve",
    "front_charts",
    "heat_map",
    "line_chart",
    "monitor_charts",
    "role_chart",
    "sweep_charts",
]

Row = dict[str, Any]
_Box = tuple[float, float, float, float]  # left, top, right, bottom
_NAMED_POINTS = 16
_LETTER, _LINE, _LINES = 6.2, 11, 12  # width of a letter of a name, height of a name, and how many heights are tried
_FRAME: _Box = (50, 14, WIDTH - 2, 180)  # names stay inside
_DRAWN = 200  # points of a line
_MOST_BARS, _NAME, _BARS, _BAR = (
    40,
    40,
    240,
    200,
)  # bars, letters of a name, room for names, how long a bar can be
_MOST_COLUMNS, _COLUMN = 12, 62  # of a heat map, and how wide one is
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
            charts[label] = line_chart(lines, title, label, share, log)
    return charts


def line_chart(
    lines: dict[str, list[tuple[float, float]]], along: str, label: str, share: bool = False, log: bool = False
) -> Drawing:
    """Lines by name, each through its points (x, y); `share`: y as percentages, `log`: x on a logarithmic scale."""
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


def curve(x: np.ndarray, y: np.ndarray) -> list[tuple[float, float]]:
    """Points of a line, no more than can be seen.

    >>> curve(np.arange(2), np.array([0.5, 0.25]))
    [(0.0, 0.5), (1.0, 0.25)]
    """
    shown = np.unique(np.linspace(0, len(x) - 1, _DRAWN).astype(int))
    return [(float(x[i]), float(y[i])) for i in shown] if len(x) else []


def bar_chart(bars: Sequence[tuple[str, float, str]], title: str) -> Drawing:
    """(name, share, text) one below the other: a share of the full width each, and a text behind it."""
    shapes: list[Shape] = [Label(0, 11, title, "ink")]
    shown = bars[:_MOST_BARS]
    left = min(_BARS, 10 + 6 * max((len(name) for name, *_ in shown), default=0))  # bars begin behind the names
    for place, (name, share, text) in enumerate(shown):
        top = 20 + 18 * place
        shapes.append(Label(0, top + 9, _shortened(name, _NAME), size=10))
        shapes.append(Box(left, top, _BAR, 11, "rule"))
        shapes.append(Box(left, top, _BAR * min(max(share, 0.0), 1.0), 11, "blue"))
        shapes.append(Label(left + _BAR + 6, top + 9, text, "ink", size=10))
    if len(bars) > len(shown):
        shapes.append(Label(0, 29 + 18 * len(shown), f"and {len(bars) - len(shown)} more", size=10))
    said = "; ".join(f"{name}: {text}" for name, _, text in shown[:8])
    return Drawing(left + _BAR + 110, 38 + 18 * len(shown), f"{title}. {said}.", tuple(shapes))


def role_chart(roles: Sequence[Row], metric: str | None) -> Drawing:
    """What is lost without each block: layer, block, and numbers by class, or by output where there are no classes."""
    by_class = any(role["classes"] for role in roles)
    found = [role["classes"] if by_class else role["outputs"] for role in roles]
    values = np.array([[own[key] for key in found[0]] for own in found], float)
    most = np.argsort(-np.nan_to_num(values).max(0), kind="stable")[:_MOST_COLUMNS]
    chosen = np.sort(most)  # in their order
    names = [f"{role['layer'] or 'model'}, block {role['block']}" for role in roles]
    title = f"{metric} lost without a block" if by_class else "relative change of outputs without a block"
    return heat_map(names, [list(found[0])[i] for i in chosen], values[:, chosen], title)


def heat_map(rows: Sequence[str], columns: Sequence[str], values: np.ndarray, title: str) -> Drawing:
    """values (rows, columns) as shades, 0 and below as paper and the largest darkest, each with its number."""
    rows, columns, values = rows[:_MOST_BARS], columns[:_MOST_COLUMNS], values[:_MOST_BARS, :_MOST_COLUMNS]
    largest = float(np.nanmax(values, initial=0.0)) or 1.0
    width, height = _COLUMN * len(columns), 18 * len(rows)
    shades = np.clip(np.nan_to_num(values) / largest, 0.0, 1.0)
    shapes: list[Shape] = [Label(0, 11, title, "ink"), Raster(_BARS, 36, width, height, shades)]
    for i, name in enumerate(columns):
        shapes.append(Label(_BARS + _COLUMN * (i + 0.5), 30, _shortened(name, 9), anchor="middle", size=10))
    for j, name in enumerate(rows):
        shapes.append(Label(0, 49 + 18 * j, _shortened(name, _NAME), size=10))
        for i in range(len(columns)):
            place = _BARS + _COLUMN * (i + 0.5), 49 + 18 * j
            shapes.append(Label(*place, number(float(f"{values[j, i]:.2g}")), "ink", "middle", 10, halo=True))
    strongest = [f"{name}: {columns[int(np.nanargmax(values[j]))]}" for j, name in enumerate(rows[:8])]
    return Drawing(_BARS + width, 42 + height, f"{title}. Largest for {'; '.join(strongest)}.", tuple(shapes))


def _shortened(name: str, letters: int) -> str:
    return name if len(name) <= letters else "…" + name[1 - letters :]


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
