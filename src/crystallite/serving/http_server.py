"""uvicorn's HTTP/1.1 server with limits that uvicorn does not have: on connections, slow ones, and sizes of headers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from crystallite.serving.connections import Acceptor
from crystallite.serving.limits import MOST_HEADER_BYTES, Limits
from crystallite.serving.metrics import Metrics

__all__ = ["http_server"]

_AT_ONCE = 1 << 15  # bytes that the parser gets in one piece


def http_server(
    application: Any, limits: Limits, metrics: Metrics, connections: int, grace: int, tls: tuple[Path, Path] | None
) -> uvicorn.Server:
    """A uvicorn server of an ASGI application, without access log and proxy headers.

    connections: that may be open; grace: seconds to shut down.
    """
    certificate, key = tls or (None, None)

    def protocol(**options: Any) -> _LimitedHttp:
        return _LimitedHttp(limits, metrics, **options)

    config = uvicorn.Config(
        application, http=protocol, ws="none", lifespan="off", log_level="error", access_log=False,  # type: ignore[arg-type]
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=grace, ssl_certfile=certificate,
        ssl_keyfile=key,
    )  # fmt: skip
    return _Server(config, limits, metrics, connections)


class _Server(uvicorn.Server):
    """Accepts connections by itself: asyncio would go on beyond every limit, and write a line for each failure."""

    def __init__(self, config: uvicorn.Config, limits: Limits, metrics: Metrics, connections: int) -> None:
        super().__init__(config)
        self._limits, self._metrics, self._connections = limits, metrics, connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()

        def make() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        context = self.config.ssl
        tls = None if context is None else (context, self._limits.header_timeout)
        open_now: Any = self.server_state.connections
        servers: Any = [
            Acceptor(listening, make, open_now, self._connections, tls, self._metrics) for listening in sockets or ()
        ]
        self.servers = servers
        self.started = True


class _LimitedHttp(HttpToolsProtocol):
    """A connection that is closed when it sends headers too slowly or without an end, idles, or reads no answers."""

    def __init__(self, limits: Limits, metrics: Metrics, **options: Any) -> None:
        super().__init__(**options)
        self._limits, self._metrics = limits, metrics
        self.timeout_keep_alive = limits.idle_timeout  # type: ignore[assignment]
        self.answered = False  # whether it ever had a whole request
        self._in_head, self._unparsed = False, 0  # bytes since the last that came of any use
        self._since = time.monotonic()
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of answers that the client has not taken when it was last looked at

    @property
    def waiting_since(self) -> float | None:
        """Since when there is no request to answer, if there is none."""
        return None if self._is_busy or self.transport.is_closing() else self._since

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not (self.cycle.response_complete and not self.pipeline)

    def drop(self) -> None:
        self.transport.abort()

    # when it must be done

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._read_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._since = time.monotonic()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """There was no request for some time: close, but not while the client still reads the last answer."""
        if self.transport.get_write_buffer_size():
            self._expect_reading()
        elif not self.transport.is_closing():
            self._count("idle")
            self.transport.close()

    def _expect_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(self._limits.header_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        self._count("slow headers")
        if self._is_busy:  # it began another request before it had an answer: that it still gets
            self.cycle.keep_alive = False
        else:
            self._refuse(408, f"expected a request within {self._limits.header_timeout:g} s")

    def _expect_reading(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self._limits.idle_timeout, self._look_at_reading)

    def _look_at_reading(self) -> None:
        if self.transport.get_write_buffer_size() >= self._unread:
            self._count("unread answers")
            self.transport.abort()
        else:
            self._expect_reading()

    # how much it may send

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _AT_ONCE):
            if self.transport.is_closing():
                return
            part = data[start : start + _AT_ONCE]
            self._unparsed += len(part)
            super().data_received(part)
            if self._unparsed > MOST_HEADER_BYTES and not self.transport.is_closing():
                self._count("large headers")
                self._refuse(431, f"expected at most {MOST_HEADER_BYTES} bytes before the body")
        if self._in_head or not self._is_busy:
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head, self._unparsed = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self.answered = False, True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        super().on_message_complete()

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        head = f"content-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    def _count(self, reason: str) -> None:
        self._metrics.count("crystallite_closed_connections_total", reason=reason)
