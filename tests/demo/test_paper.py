"""The paper's tables as they stand in its source, and the demo that prints them beside ours."""

from pathlib import Path

import numpy as np
import pytest

from crystallite.cli.main import main
from crystallite.demo import paper as demo
from tests.helpers import paper

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "decomposable-inference.tex"
TYPED = {
    "M": paper.M, "P_1": paper.P1, "Q_1": paper.Q1, "M'": paper.M_PRIME, "Y": paper.Y, "X": paper.X, "P_2": paper.P2,
    "Q_2": paper.Q2, "M''": paper.M_DOUBLE_PRIME, "P_2P_1": paper.P2P1, "Q_2Q_1": paper.Q2Q1,
    "(P_2P_1)^-1": paper.P2P1_INVERSE, "(Q_2Q_1)^-1": paper.Q2Q1_INVERSE, "M again": paper.M, "A": paper.M18,
    "V": paper.V,
}  # fmt: skip


def test_parsed_tables_are_those_typed_by_hand():
    printed = demo.printed_tables()
    assert printed.keys() == TYPED.keys()
    for name, table in printed.items():
        np.testing.assert_array_equal(table.values, TYPED[name], err_msg=name)
    assert printed["Y"].heading == ("Index", "SubGroup", "NewIndex")
    assert printed["V"].heading == ("Index", "S_TAG", "G_TAG", "L_TAG", "I_TAG", "NewIndex")
    assert (printed["M''"].column_lines, printed["M''"].row_lines) == ({3, 6, 10}, {3, 7, 10})


def test_the_excerpt_is_the_papers_own_source():
    if not SOURCE.exists():
        pytest.skip("the paper's source is not here")
    whole = SOURCE.read_text()
    excerpt = (Path(demo.__file__).parent / "paper_tables.tex").read_text()
    for part in excerpt.split("\n%% ")[1:]:
        assert part.partition("\n")[2].rstrip("\n") in whole, part[:40]


def test_the_demo_prints_every_table_and_says_equal(capsys):
    assert main(["demo", "--paper"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\n  equal\n") == 13  # twelve printed results and figure 8.3
    assert "12 of the 12 printed results are equal; 4 tables are given." in shown
    assert "DIFFERENT" not in shown
    assert "  1   1│     │       │   " in shown  # zeros are blank, blocks have lines


@pytest.mark.parametrize("name", [name for name in TYPED if name not in ("M", "P_1", "Q_1", "A")])
def test_a_difference_is_found_wherever_it_is(name, capsys, monkeypatch):
    printed = demo.printed_tables()
    printed[name].values.flat[1] += 1
    monkeypatch.setattr(demo, "printed_tables", lambda: printed)
    if name == "V":
        printed[name].values.flat[1] -= 1
        printed[name].values[3, 1] += 1  # NewIndex and Index must stay a permutation
    assert main(["demo", "--paper"]) == 1
    assert "DIFFERENT in 1 entries" in capsys.readouterr().out
