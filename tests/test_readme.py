"""What the README shows is what happens."""

import contextlib
import io
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_example_prints_what_it_says():
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```\s*```\n(.*?)```", text, re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code[1], "README.md", "exec"), {})
    assert printed.getvalue() == code[2]


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
