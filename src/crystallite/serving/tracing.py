"""OpenTelemetry spans of requests, batches and pieces, in programs that have set up its SDK."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from crystallite.serving.headers import Trace

__all__ = ["current_span", "span", "span_of_request"]


def span_of_request(name: str, trace: Trace | None, **attributes: Any) -> AbstractContextManager[Any]:
    """A request, as a part of the caller's trace if it named one."""
    api = _api()
    if api is None:
        return nullcontext()
    context = None
    if trace is not None:
        flags = api.TraceFlags(int(trace.flags, 16))
        remote = api.SpanContext(int(trace.trace_id, 16), int(trace.span_id, 16), is_remote=True, trace_flags=flags)
        context = api.set_span_in_context(api.NonRecordingSpan(remote))
    return _tracer(api).start_as_current_span(
        name, context, kind=api.SpanKind.SERVER, attributes=_given(attributes), record_exception=False
    )


def current_span() -> Any:
    """What is done now; None where nothing is traced."""
    api = _api()
    return None if api is None else api.get_current_span()


def span(name: str, of: Sequence[Any] | None = None, **attributes: Any) -> AbstractContextManager[Any]:
    """A part of what is done now, or of several spans: of the first, with links to the others."""
    api = _api()
    if api is None:
        return nullcontext()
    spans = [one for one in of or () if one is not None]
    context = api.set_span_in_context(spans[0]) if spans else None
    links = [api.Link(one.get_span_context()) for one in spans[1:]]
    return _tracer(api).start_as_current_span(name, context, attributes=_given(attributes), links=links)


def _api() -> Any:
    """OpenTelemetry's interface, if the program has loaded its SDK; without that, spans would go nowhere."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    return trace


def _tracer(api: Any) -> Any:
    return api.get_tracer("crystallite.serving")


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"crystallite.{name}": value for name, value in attributes.items() if value is not None}
