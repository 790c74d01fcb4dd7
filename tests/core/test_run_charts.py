"""Names at the points of a quality–cost front: all there where there is room, never over each other."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crystallite.core.drawing import Dot, Label
from crystallite.core.run_charts import front_charts

_COMPARED = [
    ("dense", 300032, 0.86, 0.974),
    ("fitted", 74112, 0.39, 0.974),
    ("magnitude", 74112, 0.35, 0.884),
    ("Wanda score", 74112, 0.35, 0.788),
    ("Torch-Pruning", 74112, 0.33, 0.884),
    ("SVD", 74700, 0.40, 0.41),
    ("random blocks", 75000, 0.40, 0.578),
    ("ONNX Runtime fp32", 300032, 1.07, 0.974),
    ("ONNX Runtime int8", 300032, 0.59, 0.974),
    ("fitted + ONNX Runtime int8", 74112, 0.29, 0.978),
    ("in-blocks", 74476, 0.39, 0.982),
]


def rows(points):
    return [{"name": n, "family": n, "macs": m, "latency_ms": t, "quality": q} for n, m, t, q in points]


def boxes(chart, names):
    """(left, top, right, bottom) of each name; letters are taken to be 5 wide and 8 high, which most are not."""
    found = {}
    for label in (shape for shape in chart.shapes if isinstance(shape, Label) and shape.text in names):
        if label.size == 10 and label.colour == "ink":
            left = label.x if label.anchor == "start" else label.x - 5 * len(label.text)
            found[label.text] = left, label.y - 8, left + 5 * len(label.text), label.y
    return found


def apart(a, b):
    return a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


@pytest.mark.parametrize("cost", ["multiply-adds", "latency, ms"])
def test_all_methods_are_named(cost):
    names = [name for name, *_ in _COMPARED]
    chart = front_charts(rows(_COMPARED))[cost]
    found = boxes(chart, names)
    assert found.keys() == set(names)
    assert all(apart(a, b) for a, b in itertools.combinations(found.values(), 2))
    dots = [shape for shape in chart.shapes if isinstance(shape, Dot)]
    assert len(dots) == len(names)
    assert all(apart(box, (dot.x - 3, dot.y - 3, dot.x + 3, dot.y + 3)) for box in found.values() for dot in dots)
    assert all(box[0] >= 0 and box[2] <= chart.width for box in found.values())


@settings(max_examples=60)
@given(points=st.lists(st.tuples(st.floats(1, 9), st.floats(0, 1)), min_size=1, max_size=16))
def test_names_are_never_over_each_other(points):
    named = [(f"a method {i}", cost, cost, quality) for i, (cost, quality) in enumerate(points)]
    found = boxes(front_charts(rows(named))["multiply-adds"], [name for name, *_ in named])
    assert found
    assert all(apart(a, b) for a, b in itertools.combinations(found.values(), 2))


def test_skipped_methods_are_no_points():
    skipped = {"name": "SVD", "family": "low rank", "macs": None, "latency_ms": None, "quality": None, "skipped": "why"}
    charts = front_charts([*rows(_COMPARED[:3]), skipped])
    assert all(sum(isinstance(shape, Dot) for shape in chart.shapes) == 3 for chart in charts.values())
    assert all("SVD" not in chart.description for chart in charts.values())
