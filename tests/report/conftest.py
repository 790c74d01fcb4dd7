"""Reports, and pages of a real browser that open them."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from crystallite.compression.compress import compress
from crystallite.reorganization.rewrite import reorganize
from crystallite.report import report
from tests.helpers.browser import axe, browser
from tests.helpers.reports import Planted, front_rows, monitor_rows, sweep_rows

__all__ = ["axe", "browser"]


@pytest.fixture(scope="session")
def planted():
    return Planted()


@pytest.fixture(scope="session")
def full_report(planted):
    """Everything a report can show."""
    dense = torch.nn.Sequential(OrderedDict(first=planted.first, relu=torch.nn.ReLU(), second=planted.second))
    models = {
        "exact": reorganize(dense, rule="neyman", only_if_faster=False),
        "fitted": compress(dense, torch.randn(512, 96), budget=0.5),
    }
    failed = {"passed": False, "reasons": ["the metric fell by 0.03"], "samples": 64,
               "outcomes": [{"rule": "max_drop", "limit": 0.01, "observed": 0.03, "status": "violated"}]}  # fmt: skip
    passed = {"passed": True, "reasons": ["output: agreement 1"], "samples": 64, "macs_per_sample": [12800, 6400],
              "metric": {"name": "accuracy", "values": [0.9, 0.9]}, "parameters": [12944, 6544],
              "latency": [{"batch": 64, "original": 2e-3, "reorganized": 1e-3}]}  # fmt: skip
    runs = {"sweep": sweep_rows(), "front": front_rows(), "monitor": monitor_rows()}
    return report(
        planted, rule="neyman", reorganized=models, verdict={"exact": failed, "fitted": passed}, title="Planted", **runs
    )


@pytest.fixture(scope="session")
def page_path(full_report, tmp_path_factory):
    return full_report.save(tmp_path_factory.mktemp("report") / "report.html")


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
