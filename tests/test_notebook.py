"""What notebooks show: every result has a short text, a table or a picture, and none of it can be read as markup."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import crystallite as cx

HOSTILE = "<img src=x onerror=alert(1)>"


class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(16, 16))

    def forward(self, x):
        return self.get_submodule(HOSTILE)(x)


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    model, x = Hostile().eval(), torch.randn(64, 16)
    layer = model.get_submodule(HOSTILE)
    with torch.no_grad():
        layer.weight[:8, 8:] = layer.weight[8:, :8] = 0
    small = cx.reorganize(model, level=None, only_if_faster=False)
    monitor = cx.StructureMonitor(model, every=1)
    monitor.step(0)
    monitor.step(1)
    weight = layer.weight.detach()
    return {
        "analysis": cx.analyze({HOSTILE: weight}),
        "annealing": cx.anneal(weight),
        "structure": cx.decompose(weight),
        "directed": cx.decompose(weight, kind="directed"),
        "profile": cx.level_profile(weight),
        "summary": cx.summary(small),
        "verdict": cx.validate(model, small, x),
        "sweep": cx.sweep(model, x, [0.1, 0.01]),
        "monitor": monitor,
    }


NAMES = ["analysis", "annealing", "structure", "directed", "profile", "summary", "verdict", "sweep", "monitor"]


@pytest.mark.parametrize("name", NAMES)
def test_results_show_themselves_in_notebooks(results, name):
    shown = results[name]._repr_html_()
    assert "<img" not in shown
    assert "<" in shown


@pytest.mark.parametrize("name", NAMES)
def test_results_can_be_plotted_and_the_picture_says_what_it_shows(results, name):
    drawing = results[name].plot()
    assert len(drawing.description) > 15
    root = ElementTree.fromstring(drawing.svg())
    assert len(root) > 2
    assert drawing.width > 0
    assert drawing.height > 0


def test_an_analysis_is_a_sequence_of_its_rows_with_scalar_columns(results):
    analysis = results["analysis"]
    assert len(analysis) == 1
    assert [row.name for row in analysis] == [HOSTILE]
    assert analysis[0] is analysis[HOSTILE] is analysis.rows[0]
    assert len(repr(analysis[0])) < 120
    frame = analysis.to_pandas()
    assert not frame.map(lambda value: isinstance(value, (dict, list))).any(axis=None)
    assert analysis.verdict.partition(":")[0] in analysis._repr_html_()
    columns = analysis.table().splitlines()[0].split()
    assert analysis._repr_html_().count("<th ") == len(columns)


def test_pictures_stand_side_by_side_where_they_stood_alone():
    from crystallite.core.drawing import Box, Dot, Drawing, Label, Line, Raster, side_by_side

    shapes = (Line(((0, 0), (1, 1))), Box(1, 2, 3, 4), Dot(5, 6, 1), Label(7, 8, "a"),
              Raster(1, 1, 2, 2, torch.zeros(2, 2).numpy()))  # fmt: skip
    one = Drawing(50, 40, "one", shapes)
    both = side_by_side([one, one, one], across=2)
    assert (both.width, both.height) == (100, 80)
    line, box, dot, label, raster = both.shapes[-5:]  # the third: in the second line
    assert line.points == ((0, 40), (1, 41))
    assert [(shape.x, shape.y) for shape in (box, dot, label, raster)] == [(1, 42), (5, 46), (7, 48), (1, 41)]
