"""uvicorn's HTTP/1.1 server with a limit on the size of headers, which uvicorn does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from crystallite.serving.limits import MOST_HEADER_BYTES

__all__ = ["http_server"]

_TOO_MUCH = f'{{"error": "expected at most {MOST_HEADER_BYTES} bytes before the body"}}'.encode()


def http_server(application: Any, grace: int, tls: tuple[Path, Path] | None) -> uvicorn.Server:
    """A uvicorn server of an ASGI application, without access log and proxy headers; `grace`: seconds to shut down."""
    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        application, http=_BoundedHttp, ws="none", lifespan="off", log_level="warning", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=grace, ssl_certfile=certificate,
        ssl_keyfile=key,
    )  # fmt: skip
    return uvicorn.Server(config)


class _BoundedHttp(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not end; the parser would collect them for ever."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head, self._head_bytes = False, 0

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEADER_BYTES:
                length = f"content-length: {len(_TOO_MUCH)}\r\n".encode()
                head = STATUS_LINE[431] + b"content-type: application/json\r\nconnection: close\r\n" + length
                self.transport.write(head + b"\r\n" + _TOO_MUCH)
                self.transport.close()
