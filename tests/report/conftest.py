"""A real browser for the page; tests that need one are skipped, with the reason, where there is none.

CRYSTALLITE_REQUIRE_BROWSER=1, as in `.ci/run`, makes them fail instead.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from crystallite.reorganization.rewrite import reorganize
from crystallite.report import report
from tests.helpers.reports import Planted, front_rows, monitor_rows, sweep_rows

_ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
              "--disable-background-networking", "--disable-component-update"]  # fmt: skip


def unavailable(reason):
    if os.environ.get("CRYSTALLITE_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def planted():
    return Planted()


@pytest.fixture(scope="session")
def full_report(planted):
    """Everything a report can show."""
    small = reorganize(torch.nn.Sequential(planted.first, torch.nn.ReLU(), planted.second), rule="neyman")
    verdict = {"passed": False, "reasons": ["the metric fell by 0.03"], "samples": 64,
               "outcomes": [{"rule": "max_drop", "limit": 0.01, "observed": 0.03, "status": "violated"}]}  # fmt: skip
    runs = {"sweep": sweep_rows(), "front": front_rows(), "monitor": monitor_rows()}
    return report(planted, rule="neyman", reorganized=small, verdict=verdict, title="Planted", **runs)


@pytest.fixture(scope="session")
def page_path(full_report, tmp_path_factory):
    return full_report.save(tmp_path_factory.mktemp("report") / "report.html")


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


@pytest.fixture
def visit(browser):
    """Opens a page; whatever it prints on the console, or asks a network for, fails the test."""
    contexts, complaints = [], []

    def open_page(path, width=1280, scheme="light", height=900):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(("file:", "data:")) else None)
        page.goto(Path(path).as_uri())
        page.locator("#detail").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


@pytest.fixture(scope="session")
def axe():
    file = Path(os.environ.get("AXE_CORE") or Path(__file__).parent / "node_modules/axe-core/axe.min.js")
    if not file.is_file():
        unavailable("needs axe-core: npm ci --prefix tests/report, or name axe.min.js in AXE_CORE")
    return file.read_text(encoding="utf-8")
