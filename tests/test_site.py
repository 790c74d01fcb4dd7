"""The site that `make docs` builds: everybody can read and use its pages, on phone and desktop, in light and dark."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.browser import axe, browser

__all__ = ["axe", "browser"]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="needs pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("page", ["index", "quickstart", "files/examples/first_hour", "api/verbs"])
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_accessible(site, browser, axe, page, width, scheme):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        opened = context.new_page()
        opened.goto((site / f"{page}.html").as_uri())
        opened.locator(".md-code__nav").first.wait_for(state="attached")  # the theme's own script has run
        opened.evaluate(axe)
        found = opened.evaluate("axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
        assert found == []
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        context.close()
