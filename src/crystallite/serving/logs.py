"""`Entry`: the log entry of one request, written as a line of JSON."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime

__all__ = ["Entry", "current", "log", "log_json"]

# silent unless a program, or `crystallite serve --log json`, asks for its INFO lines
log = logging.getLogger("crystallite.requests")

current: ContextVar[Entry | None] = ContextVar("current", default=None)  # the request that is being answered

_IDENTIFIER = re.compile(r"[\x21-\x7e]{1,128}")
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")  # W3C Trace Context


@dataclass
class Entry:
    """One request, with the client's `x-request-id` and `traceparent` if it sent them.

    >>> entry = Entry("http", "infer", given_id="7", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    >>> entry.request_id, entry.trace_id == "a" * 32
    ('7', True)
    """

    protocol: str
    call: str
    given_id: str | None = None
    traceparent: str | None = None
    model: str | None = None
    version: str | None = None
    samples: int | None = None
    queue_seconds: float | None = None
    compute_seconds: float | None = None
    status: int = 500  # the code of HTTP in both protocols
    error: str | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def request_id(self) -> str:
        """As given, if it fits into a header; otherwise a new one."""
        if self.given_id is None or not _IDENTIFIER.fullmatch(self.given_id):
            self.given_id = uuid.uuid4().hex
        return self.given_id

    @property
    def trace_id(self) -> str | None:
        """Of the trace that the caller is in."""
        found = _TRACE.fullmatch(self.traceparent or "")
        return found and found[1]

    def write(self) -> None:
        """Log the request, with the names that OpenTelemetry has for traces."""
        if not log.isEnabledFor(logging.INFO):
            return
        trace = _TRACE.fullmatch(self.traceparent or "")
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "protocol": self.protocol,
            "call": self.call,
            "model": self.model,
            "version": self.version,
            "status": self.status,
            "samples": self.samples,
            "seconds": _rounded(time.perf_counter() - self.started),
            "queue_seconds": _rounded(self.queue_seconds),
            "compute_seconds": _rounded(self.compute_seconds),
            "request_id": self.request_id,
            "trace_id": trace and trace[1],
            "span_id": trace and trace[2],
            "error": self.error,
        }
        log.info(json.dumps({name: value for name, value in line.items() if value is not None}))


def log_json() -> None:
    """Write a line for every request to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
