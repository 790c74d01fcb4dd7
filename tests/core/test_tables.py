"""Text tables: full where there is room, and never wider than asked for."""

import pytest

from crystallite.core.tables import terminal_width, text_table

ROWS = [
    ["layer", "kept", "became"],
    ["encoder.layer.0.attention.output.dense", "100.0%", "left alone: its inputs are shared with another layer"],
    ["head", "3.1%", "4 blocks"],
]


def test_without_a_width_nothing_is_shortened():
    lines = text_table(ROWS, left=(0, 2))
    for row, line in zip(ROWS, lines, strict=True):
        assert all(cell in line for cell in row)


@pytest.mark.parametrize("width", [36, 50, 80, 99])
def test_names_and_texts_give_way(width):
    lines = text_table(ROWS, width, left=(0, 2))
    assert max(map(len, lines)) <= width
    assert all(row[1] in line for row, line in zip(ROWS, lines, strict=True))


def test_only_a_terminal_has_a_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert terminal_width() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert terminal_width() == 70
