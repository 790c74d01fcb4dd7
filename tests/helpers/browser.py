"""A real browser; tests that need one are skipped, with the reason, where there is none.

CRYSTALLITE_REQUIRE_BROWSER=1, as in `.ci/run`, makes them fail instead.
"""

import os
import shutil
from pathlib import Path

import pytest

_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
              "--disable-background-networking", "--disable-component-update"]  # fmt: skip


def unavailable(reason):
    if os.environ.get("CRYSTALLITE_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")  # Playwright holds an event loop, which other tests must not meet
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("needs Playwright: pip install playwright")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        unavailable("needs Chromium: apt install chromium, or name it in CHROMIUM")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe():
    """axe-core, which finds what people who do not see or point cannot use."""
    beside = Path(__file__).parents[1] / "report" / "node_modules" / "axe-core" / "axe.min.js"
    file = Path(os.environ.get("AXE_CORE") or beside)
    if not file.is_file():
        unavailable("needs axe-core: npm ci --prefix tests/report, or name axe.min.js in AXE_CORE")
    return file.read_text(encoding="utf-8")
