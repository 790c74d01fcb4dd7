"""`Listener`: a service on a port for HTTP and, if asked for, one for gRPC."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from crystallite.core.errors import InvalidOption
from crystallite.serving.connections import room_for
from crystallite.serving.headers import is_loopback
from crystallite.serving.request_guard import RequestGuard
from crystallite.serving.service import Service

if TYPE_CHECKING:
    from crystallite.serving.grpc_service import GrpcServer

__all__ = ["Listener", "check_address"]

_GRACE = 30  # seconds that accepted requests have after the end was asked for
_CONNECTIONS = 1024  # that may wait to be accepted
_MISSING = "serving over a network needs: pip install 'crystallite[serve]'"


class Listener:
    """Serves a service over HTTP and gRPC until it is closed: `with Listener(service) as listener: listener.url`.

    Listens on this machine only; any other address needs a token, which requests carry as `Authorization: Bearer …`.

    Without a token, requests to other names than this machine's, and from pages of other sites, are refused.

    - `port`: 0 takes a free one.
    - `grpc_port`: also answer gRPC, at `listener.grpc_target`.
    - `tls`: a certificate (with its chain) and its private key, PEM files, for both protocols.
    - `allow_hosts`: names under which this machine is known to others, such as a proxy's; they may be in `Host` and
      `Origin` headers.
    """

    def __init__(
        self,
        service: Service,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str | None = None,
        *,
        grpc_port: int | None = None,
        tls: tuple[Path, Path] | None = None,
        allow_hosts: Iterable[str] = (),
    ) -> None:
        check_address(host, token)
        guard = RequestGuard(service, token, allow_hosts)
        if tls is not None:
            _check_certificate(*tls)
        try:
            from crystallite.serving.app import application
            from crystallite.serving.http_server import http_server
        except ImportError:
            raise InvalidOption(_MISSING) from None
        shown = f"[{host}]" if ":" in host else host
        connections = room_for(service.limits.max_connections, 1 + (grpc_port is not None))
        self._service = service
        self._grpc: GrpcServer | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_CONNECTIONS)
        # asyncio does it only where a socket says it is TCP; without it, half an answer may wait 40 ms for the other
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            if grpc_port is not None:
                self._grpc = service.run(_started_grpc(guard, f"{shown}:{grpc_port}", tls, connections))
        except BaseException:
            self._socket.close()
            raise
        self.grpc_target = None if self._grpc is None else f"{shown}:{self._grpc.port}"
        self.url = f"http{'s' * (tls is not None)}://{shown}:{self._socket.getsockname()[1]}"
        self._server = http_server(application(guard), service.limits, service.metrics, connections, _GRACE, tls)
        self._done: Future[Any] = service.start(self._server.serve([self._socket]))

    def close(self) -> None:
        """Stop accepting requests, and return when the accepted ones are answered."""
        self._server.should_exit = True
        self._service.run(self._service.flush())
        if self._grpc is not None:
            self._service.run(self._grpc.stop(_GRACE))
        self._done.result()
        self._socket.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _started_grpc(
    guard: RequestGuard, address: str, tls: tuple[Path, Path] | None, connections: int
) -> GrpcServer:
    try:
        from crystallite.serving.grpc_service import GrpcServer
    except ImportError:
        raise InvalidOption(_MISSING) from None
    pair = None if tls is None else (tls[1].read_bytes(), tls[0].read_bytes())
    server = GrpcServer(guard, address, pair, connections)
    await server.start()
    return server


def _check_certificate(certificate: Path, key: Path) -> None:
    """Both files are read here: what a server says of bad ones, it says when the first client comes."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        wanted = "expected a certificate and its private key without a passphrase, PEM"
        raise InvalidOption(f"{certificate}, {key}: {wanted}: {error}") from None


def check_address(host: str, token: str | None) -> None:
    """Refuse a token that is too weak, and an address beyond this machine without a token."""
    if token is not None and not (token.isascii() and token.isprintable() and len(token) >= 16):
        raise InvalidOption("token: expected at least 16 printable ASCII characters")
    if token is None and not is_loopback(host):
        raise InvalidOption(f"{host}: listening beyond this machine needs a token")
