"""`Entry`: the log entry of one request, written as a line of JSON."""

from __future__ import annotations

import json
import logging
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime

from crystallite.serving.headers import Trace, identifier

__all__ = ["Entry", "current", "log", "log_json", "server_log"]

# silent unless a program, or `crystallite serve --log json`, asks for its INFO lines
log = logging.getLogger("crystallite.requests")
server_log = logging.getLogger("crystallite.server")  # what an operator should know; on standard error by default

current: ContextVar[Entry | None] = ContextVar("current", default=None)  # the request that is being answered


@dataclass
class Entry:
    """One request, with the name that the caller gave it and its place in the caller's trace.

    >>> Entry("http", "infer", given_id="7").request_id
    '7'
    """

    protocol: str
    call: str
    given_id: str | None = None
    trace: Trace | None = None
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
        self.given_id = identifier(self.given_id) or uuid.uuid4().hex
        return self.given_id

    def write(self) -> None:
        """Log the request, with the names that OpenTelemetry has for traces."""
        if not log.isEnabledFor(logging.INFO):
            return
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
            "trace_id": self.trace and self.trace.trace_id,
            "span_id": self.trace and self.trace.span_id,
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
