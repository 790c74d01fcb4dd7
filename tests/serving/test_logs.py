"""One line of JSON per request, with the caller's names for it."""

import json
import logging

import pytest

from crystallite.serving.logs import log
from tests.helpers.http_client import call, infer, request
from tests.helpers.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(json.loads(record.getMessage()))


@pytest.fixture
def lines():
    handler = Lines()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler.found
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def test_an_answer(url, service, lines, x):
    headers = {"X-Request-Id": "seven", "traceparent": f"00-{TRACE}-{SPAN}-01"}
    status, given, _ = call(url, "/v2/models/small/infer", request(x), headers=headers)
    assert (status, given["x-request-id"]) == (200, "seven")
    wait_for(lambda: lines)
    (line,) = lines
    known = {"protocol": "http", "call": "infer", "model": "small", "status": 200, "samples": 5, "request_id": "seven"}
    assert known.items() <= line.items()
    assert line["version"] == service.models["small"].version
    assert (line["trace_id"], line["span_id"]) == (TRACE, SPAN)
    assert 0 <= line["queue_seconds"] <= line["seconds"]
    assert 0 < line["compute_seconds"] <= line["seconds"]
    assert line["time"].endswith("+00:00")


def test_a_refusal(url, lines, x):
    status, given, _ = infer(url, x[:, :3], id="mine")
    assert status == 400
    wait_for(lambda: lines)
    assert lines[0]["status"] == 400
    assert "expected shape" in lines[0]["error"]
    assert lines[0]["request_id"] == given["x-request-id"]
    assert call(url, "/v2/models/other")[0] == 404
    wait_for(lambda: len(lines) == 2)
    assert (lines[1]["call"], lines[1]["status"]) == ("metadata", 404)


def test_the_request_s_own_id_is_its_name(url, lines, x):
    assert infer(url, x, id="mine")[1]["x-request-id"] == "mine"
    wait_for(lambda: lines)
    assert lines[0]["request_id"] == "mine"


@pytest.mark.parametrize("name", ["two words", "x" * 129, "ü", "\x7f"])
def test_names_that_do_not_fit_are_replaced(url, lines, x, name):
    assert len(infer(url, x, id=name)[1]["x-request-id"]) == 32
    headers = {"traceparent": "00-nothing-of-this-01"}
    call(url, "/v2/models/small/infer", request(x), headers=headers)
    wait_for(lambda: len(lines) == 2)
    assert "trace_id" not in lines[1]


def test_nothing_is_written_unless_asked(url, x, capfd):
    assert infer(url, x)[0] == 200
    assert capfd.readouterr().err == ""


def test_grpc(service, lines, x):
    grpc = pytest.importorskip("grpc", reason="needs grpcio")
    from crystallite.serving import Listener
    from tests.helpers.grpc_client import infer as ask
    from tests.helpers.grpc_client import request as asked

    metadata = (("x-request-id", "eight"), ("traceparent", f"00-{TRACE}-{SPAN}-01"))
    with Listener(service, port=0, grpc_port=0) as listener, grpc.insecure_channel(listener.grpc_target) as channel:
        _, _, trailing = ask(channel, asked(x, "small"), metadata=metadata)
        assert trailing["x-request-id"] == "eight"
        _, _, trailing = ask(channel, asked(x[:, :3], "small"), metadata=metadata)
        assert trailing["x-request-id"] == "eight"
    assert [(line["protocol"], line["status"], line["trace_id"]) for line in lines] == [
        ("grpc", 200, TRACE),
        ("grpc", 400, TRACE),
    ]
