"""The page at /docs in Chromium: a request is tried, plan and live numbers are shown, nothing comes from elsewhere."""

import json
from urllib.parse import urlsplit

import pytest
import torch

from crystallite.serving import Listener, Service
from tests.helpers.artifacts import APART, network, saved
from tests.helpers.browser import browser
from tests.helpers.http_client import TOKEN, answer, call, infer
from tests.helpers.tolerance import assert_close
from tests.helpers.waiting import wait_for

__all__ = ["browser"]


@pytest.fixture
def visit(browser):
    """Opens a page; whatever it prints on the console, or asks another host for, fails the test."""
    contexts, complaints = [], []

    def open_page(url, scheme="light"):
        context = browser.new_context(color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda r: complaints.append(r.url) if not r.url.startswith(url) else None)
        page.goto(f"{url}/docs")
        return page, complaints

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def until(page, expression):
    """Wait until it holds; Playwright's own waiting evaluates strings, which the page's policy forbids."""
    wait_for(lambda: page.evaluate(expression))


def number(page, name):
    return page.locator(f'dd[data-name="{name}"]').inner_text()


def test_a_request_is_tried(visit, url, model, service):
    page, _ = visit(url)
    page.locator("#plan tr").first.wait_for()
    assert "input" in page.locator("#signature").inner_text()
    shown = page.locator("#plan").inner_text()
    assert all(piece.name in shown for piece in service.models["small"].plan.pieces)
    asked = json.loads(page.get_by_label("Request", exact=True).input_value())
    given = torch.ones(2, 12)
    asked["inputs"][0].update(shape=[2, 12], data=given.flatten().tolist())
    page.get_by_label("Request", exact=True).fill(json.dumps(asked))
    before = int(number(page, "answered"))
    page.get_by_role("button", name="Send").click()
    until(page, "document.getElementById('answer').value")
    assert page.locator("#outcome").inner_text().startswith("200 in ")
    assert_close(answer(json.loads(page.get_by_label("Answer", exact=True).input_value())), model(given).detach())
    until(page, f"Number(document.querySelector('dd[data-name=answered]').textContent) > {before}")


def test_numbers_follow_the_load(visit, url, x):
    page, _ = visit(url)
    page.locator("#plan tr").first.wait_for()
    before = int(number(page, "answered"))
    for _ in range(7):
        assert infer(url, x)[0] == 200
    until(page, f"Number(document.querySelector('dd[data-name=answered]').textContent) === {before + 7}")
    until(page, "document.querySelector('#chart polyline').getAttribute('points').includes(' ')")
    assert "ms" in number(page, "99 % within")


def test_errors_are_shown(visit, url):
    page, complaints = visit(url, "dark")
    page.locator("#plan tr").first.wait_for()
    page.get_by_label("Request", exact=True).fill("{")
    page.get_by_role("button", name="Send").click()
    until(page, "document.getElementById('answer').value.includes('JSON')")
    assert page.locator("#outcome").inner_text().startswith("400 in ")
    complaints[:] = [said for said in complaints if "400" not in said]  # Chromium's own line about it


def test_a_token_is_asked_for(visit, tmp_path):
    name = "x_.-"
    path = saved(network(), tmp_path / name)
    with Service.load(path, machine=APART) as service, Listener(service, port=0, token=TOKEN) as listener:
        page, complaints = visit(listener.url)
        until(page, "document.getElementById('state').textContent.includes('token')")
        complaints[:] = [said for said in complaints if "401" not in said]
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Use").click()
        page.locator("#plan tr").first.wait_for()
        assert page.locator("#model").input_value() == name
        complaints[:] = [said for said in complaints if "401" not in said]


def test_it_is_sent_with_a_policy(url):
    status, headers, page = call(url, "/docs")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "https://" not in page
    assert urlsplit(url).netloc not in page
