"""The figures of a structure: blocks outlined where they are, names and arrows there, text for those who cannot see."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.core.drawing import Box, Label, Line, Raster
from tests.helpers import paper

LOOKED_AT = Path(__file__).parent / "figures"
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉⁰¹²³⁴⁵⁶⁷⁸⁹", "01234567890123456789")


def texts(drawing):
    return [shape.text.translate(SUBSCRIPTS) for shape in drawing.shapes if isinstance(shape, Label)]


def outlined(drawing, cell=22.0, left=46.0, top=40.0):
    """(top, left, height, width) in lines of the matrix, of each outlined region."""
    found = set()
    for shape in drawing.shapes:
        if isinstance(shape, Line) and len(shape.points) == 5 and not shape.closed:
            (x0, y0), _, (x1, y1), *_ = shape.points
            place = (y0 - top, x0 - left, y1 - y0, x1 - x0)
            found.add(tuple(round(v / cell) for v in place))
    return found


def test_the_12_by_12_example():
    s = cx.decompose(paper.M_PRIME)
    drawing = s.plot(paper.M_PRIME)
    assert outlined(drawing) == {(0, 0, 3, 3), (3, 3, 4, 3), (7, 6, 3, 4), (10, 10, 2, 2)}  # the lines of M″
    (raster,) = (shape for shape in drawing.shapes if isinstance(shape, Raster))
    np.testing.assert_array_equal(raster.shades > 0, paper.M_DOUBLE_PRIME > 0)
    assert {"W1", "W2", "W3", "0"} <= set(texts(drawing))
    numbers = [t for t in texts(drawing) if t.isdigit()]
    for new, old in zip(paper.Y[:, 2], paper.Y[:, 0], strict=True):
        assert str(new) in numbers
        assert str(old) in numbers
    assert "3 blocks on the diagonal (3×3, 4×3, 3×4)" in drawing.description


def test_the_18_node_example():
    d = cx.decompose(paper.M18, kind="directed")
    drawing = d.plot(paper.M18)
    components = {(0, 0, 9, 9), (9, 9, 6, 6), (15, 15, 2, 2)}
    diagonal = {(0, 0, 3, 3), *((k, k, 2, 2) for k in range(3, 17, 2))}
    communication = {(3, 0, 2, 3), (5, 0, 2, 3), (5, 3, 2, 2), (7, 3, 2, 2), (11, 9, 2, 2), (13, 11, 2, 2)}
    assert outlined(drawing) == components | diagonal | communication | {(17, 17, 1, 1)}
    named = texts(drawing)
    assert {f"D{i}{i}" for i in range(1, 9)} <= set(named)
    assert {"U21", "U31", "U32", "U42", "U65", "U76"} <= set(named)
    assert {f"S{i}" for i in (1, 2, 3, 4, 6, 7, 8, 9)} <= set(named)
    assert {"G1", "G2", "G3", "L1", "L2", "L3"} <= set(named)
    assert any("isolated: 9 (new 18, D99)" in text for text in named)
    heads = [shape for shape in drawing.shapes if isinstance(shape, Line) and shape.closed]
    assert len(heads) == len(paper.CONDENSATION_EDGES)
    for target, source in paper.CONDENSATION_EDGES:
        assert f"S{source} → S{target}" in drawing.description
    at = {s.text.translate(SUBSCRIPTS): s.y for s in drawing.shapes if isinstance(s, Label) and s.text.startswith("S")}
    for target, source in paper.CONDENSATION_EDGES:
        assert at[f"S{source}"] < at[f"S{target}"]  # layers from top to bottom


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("blocks", lambda: cx.decompose(paper.M_PRIME).plot(paper.M_PRIME)),
        ("feedback", lambda: cx.decompose(paper.M18, kind="directed").plot(paper.M18)),
        ("large_feedback", lambda: cx.decompose(np.kron(np.eye(3), np.tri(15)), kind="directed").plot()),
    ],
)
def test_figures_stay_as_they_were_looked_at(name, draw):
    """After a change that is meant: `python -m tests.structure.test_figures` draws them anew; look at them."""
    assert draw().svg() == (LOOKED_AT / f"{name}.svg").read_text()


@pytest.mark.parametrize(
    "make",
    [
        lambda: cx.decompose(np.zeros((0, 0))),
        lambda: cx.decompose(np.zeros((3, 2))),
        lambda: cx.decompose(np.eye(200)),
        lambda: cx.decompose(np.zeros((0, 0)), kind="directed"),
        lambda: cx.decompose(np.zeros((3, 3)), kind="directed"),
        lambda: cx.decompose(np.tri(60), kind="directed"),
        lambda: cx.decompose(np.eye(45), kind="directed"),
        lambda: cx.decompose(torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.004, kind="directed"),
    ],
)
def test_any_structure_can_be_drawn_and_shown(make):
    s = make()
    for drawing in (s.plot(), s.plot(np.random.default_rng(0).random(s.shape))):
        root = ET.fromstring(drawing.svg())
        assert root.attrib["aria-label"] == drawing.description
        assert drawing.width <= 2200
        for number in re.findall(r' (?:x|y|cx|cy|width|height)="([^"]*)"', drawing.svg()):
            assert np.isfinite(float(number))
    assert s._repr_html_().startswith("<svg")


def test_numbers_beside_a_circle_stay_inside_its_component():
    blocks = np.kron(np.eye(8, dtype=bool), np.ones((16, 16), bool))
    blocks[16:32, :16] = blocks[32:48, 16:32] = True
    order = np.random.default_rng(0).permutation(128)
    drawing = cx.decompose(blocks[order][:, order], kind="directed").plot()
    walls = [shape.x + shape.width for shape in drawing.shapes if isinstance(shape, Box)]
    beside = [s for s in drawing.shapes if isinstance(s, Label) and s.size == 10 and re.match(r"\d+[–,]", s.text)]
    assert len(beside) == 16
    for label in beside:
        assert label.x + 6 * len(label.text) < min(wall for wall in walls if wall > label.x)


def test_edges_past_many_layers_stay_inside_the_drawing():
    drawing = cx.decompose(np.tri(60, k=-1), kind="directed").plot()
    assert min(y for shape in drawing.shapes if isinstance(shape, Line) for _, y in shape.points) >= 0


def test_names_have_a_halo_where_they_stand_on_entries():
    s = cx.decompose(paper.M_PRIME)
    assert s.plot(paper.M_PRIME).svg().count('paint-order="stroke"') == 4  # three blocks and the zero block
    assert 'stroke="var(--paper)"' in s.plot(paper.M_PRIME).svg(page=True)


def test_files_and_notebooks(tmp_path):
    d = cx.decompose(paper.M18, kind="directed")
    assert d.plot(paper.M18).save(tmp_path / "a.svg").read_text().startswith("<svg")
    pytest.importorskip("PIL")
    assert d.plot(paper.M18).save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(cx.InvalidOption, match=r"\.svg or \.png"):
        d.plot().save(tmp_path / "a.pdf")
    a = cx.anneal(np.random.default_rng(0).normal(size=(30, 20)))
    assert "<svg" in a._repr_html_()
    assert "Annealing of matrix" in a._repr_html_()
    with pytest.raises(cx.InvalidMatrix, match="as the structure has"):
        d.plot(np.zeros((3, 3)))


if __name__ == "__main__":
    (mark,) = test_figures_stay_as_they_were_looked_at.pytestmark
    for name, draw in mark.args[1]:
        (LOOKED_AT / f"{name}.svg").write_text(draw().svg())
