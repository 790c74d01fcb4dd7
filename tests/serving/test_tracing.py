"""Spans of requests, batches and pieces, in the caller's trace, where OpenTelemetry's SDK is set up."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks.serving_forms import FORMS, save_form

from crystallite.serving import Limits, Listener, Service
from tests.helpers.artifacts import APART
from tests.helpers.http_client import call, infer, request
from tests.helpers.waiting import wait_for

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans(monkeypatch):
    """What was exported; a provider of the test's own, as a program would set one up."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter.get_finished_spans
    provider.shutdown()


def test_a_request_is_a_tree_of_spans_in_the_caller_s_trace(folder, spans, x):
    with Service.load(folder, machine=APART) as service, Listener(service, port=0) as listener:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "seven"}
        assert call(listener.url, "/v2/models/small/infer", request(x), headers=headers)[0] == 200
        wait_for(lambda: len(spans()) == 6)
    named = {}
    for span in spans():
        named.setdefault(span.name, []).append(span)
        assert f"{span.context.trace_id:032x}" == TRACE
    ((asked,), (batch,), pieces) = named["infer"], named["transform"], named["piece"]
    assert f"{asked.parent.span_id:016x}" == SPAN
    assert asked.attributes["crystallite.request_id"] == "seven"
    assert batch.parent.span_id == asked.context.span_id
    assert batch.attributes["crystallite.samples"] == 5
    assert {span.parent.span_id for span in pieces} == {batch.context.span_id}
    assert {span.attributes["crystallite.piece"] for span in pieces} == {f"1.{i}" for i in range(4)}


def test_a_batch_of_several_requests_is_linked_to_all(folder, spans, x):
    limits = Limits(max_wait=600, max_batch=15)  # until three requests are there
    with Service.load(folder, limits=limits) as service, Listener(service, port=0) as listener:
        with ThreadPoolExecutor(3) as pool:
            assert [status for status, _, _ in pool.map(lambda _: infer(listener.url, x), range(3))] == [200] * 3
        wait_for(lambda: len(spans()) == 5)
    (batch,) = (span for span in spans() if span.name == "transform")
    asked = {span.context.span_id for span in spans() if span.name == "infer"}
    assert {batch.parent.span_id, *(link.context.span_id for link in batch.links)} == asked
    assert len(asked) == 3


def test_without_the_sdk_nothing_is_traced(url, x, monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace", raising=False)
    assert infer(url, x)[0] == 200


def test_pieces_that_a_model_calls_by_itself_are_spans_of_its_batch(spans, tmp_path):
    path, model = save_form("encoder", tmp_path / "small"), FORMS["encoder"].build()
    with Service.load(path, into=model, machine=APART) as service:
        service.infer(FORMS["encoder"].inputs(2))
        wait_for(lambda: len(spans()) == 9)
    (batch,) = (span for span in spans() if span.name == "transform")
    pieces = [span for span in spans() if span.name == "piece"]
    assert len(pieces) == FORMS["encoder"].pieces
    assert all(span.parent.span_id == batch.context.span_id for span in pieces)
