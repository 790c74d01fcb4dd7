"""`Listener`: a service on a port."""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from crystallite.errors import InvalidOption
from crystallite.serving.service import Service

__all__ = ["Listener"]

_GRACE = 30  # seconds that accepted requests have after the end was asked for
_CONNECTIONS = 1024  # that may wait to be accepted


class Listener:
    """A port that answers for a service, until it is closed: `with Listener(service) as listener: listener.url`.

    Listens on this machine only; any other address needs a token, which requests carry as `Authorization: Bearer …`.
    Port 0 takes a free one.
    """

    def __init__(self, service: Service, host: str = "127.0.0.1", port: int = 8000, token: str | None = None) -> None:
        if token is not None and not (token.isascii() and token.isprintable() and len(token) >= 16):
            raise InvalidOption("token: expected at least 16 printable ASCII characters")
        if token is None and not _is_loopback(host):
            raise InvalidOption(f"{host}: listening beyond this machine needs a token")
        try:
            import uvicorn

            from crystallite.serving.app import application
        except ImportError:
            raise InvalidOption("serving over a network needs: pip install 'crystallite[serve]'") from None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
        # asyncio does it only where a socket says it is TCP; without it, half an answer may wait 40 ms for the other
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application(service, token), lifespan="off", log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=_GRACE,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._done: Future[Any] = service.start(self._server.serve([self._socket]))

    def close(self) -> None:
        """Accept nothing more, answer what was accepted, and return when that is done."""
        self._server.should_exit = True
        self._done.result()
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
