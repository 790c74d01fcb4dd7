"""docs/paper.md: every line runs, every function and every test that it names is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in PAGE.partition("## Where the paper is ambiguous")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| paper")
]


@pytest.fixture(scope="module")
def names():
    space = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/paper.md", "exec"), space)
    return space


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_line_runs(row, names):
    assert len(row) == 4, row
    result = eval(compile(row[3].strip("`"), row[0], "eval"), names)
    if "==" in row[3]:
        assert result is True


def test_every_test_that_is_named_exists():
    named = {cell.strip("`") for row in ROWS for cell in [row[2]] if cell != "same"}
    assert len(named) > 15
    for name in named:
        path, _, function = name.partition("::")
        assert (ROOT / path).exists(), name
        if function:
            found = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
            assert function in found, name
