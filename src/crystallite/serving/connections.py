"""`Connections`: how many a service may have open, and which one goes when there is no room for another."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from crystallite.serving.logs import server_log
from crystallite.serving.metrics import Metrics

__all__ = ["Acceptor", "Connection", "room_for"]

_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE = 0.5  # seconds until another connection is accepted after there was no descriptor for one
_SILENCE = 60.0  # seconds between two lines about it
_SPARE_FILES = 48  # descriptors for everything else: files of a new version, libraries, logs
_FULL = b'{"error": "too many connections are open; try again"}'
_REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


class Connection(Protocol):
    """A connection that knows whether somebody waits for its answer."""

    waiting_since: float | None  # for a request; None: one is being read or answered
    answered: bool  # whether it ever had a whole request

    def drop(self) -> None:
        """End it at once."""


def room_for(wanted: int, protocols: int) -> int:
    """Connections that each of some protocols may have open: as many as wanted, or as the process may open files.

    >>> room_for(1, 2)
    1
    """
    try:
        import resource
    except ImportError:  # not on Windows, whose limit is far away
        return wanted
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError):
        used = len(os.listdir("/proc/self/fd"))
        return max(1, min(wanted, (most - used - _SPARE_FILES) // protocols))
    return max(1, min(wanted, (most - 2 * _SPARE_FILES) // protocols))


class Acceptor:
    """Accepts connections while there is room, and makes room.

    Where there is none, the connection goes that has waited longest for a request: first those that never had one. If
    all are being answered, the new one is told to come again. When the process has no descriptors left, nothing is
    accepted for a moment, and a line a minute says so.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], asyncio.Protocol],
        open_now: Iterable[Connection],
        most: int,
        tls: tuple[ssl.SSLContext, float] | None,
        metrics: Metrics,
    ) -> None:
        """`open_now`: the connections that `make` has made and that are not closed; `tls`: also seconds to agree."""
        self._listening, self._make, self._open_now, self._most = listening, make, open_now, most
        self._tls, self._metrics = tls, metrics
        self._beginning: dict[asyncio.Task[None], socket.socket] = {}  # connections that agree on encryption
        self._last_line = -_SILENCE
        listening.setblocking(False)
        self._task = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more."""
        self._task.cancel()

    async def wait_closed(self) -> None:
        """Return when nothing is accepted any more."""
        await asyncio.wait([self._task, *self._beginning])

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # else the client has left already
                if error.errno in _OUT_OF_FILES:
                    self._say(error)
                    self._make_room()
                    await asyncio.sleep(_PAUSE)
                continue
            if self._is_full() and not self._make_room():
                self._metrics.count("crystallite_closed_connections_total", reason="full")
                with suppress(OSError):
                    accepted.setblocking(False)
                    if self._tls is None:
                        accepted.send(_REFUSED)
                accepted.close()
                continue
            if self._tls is None:
                await self._begin(accepted)
            else:
                task = asyncio.create_task(self._begin(accepted))
                self._beginning[task] = accepted
                task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        accepted = self._beginning.pop(task)
        if task.cancelled():
            accepted.close()

    async def _begin(self, accepted: socket.socket) -> None:
        loop, (context, patience) = asyncio.get_running_loop(), self._tls or (None, None)
        try:
            await loop.connect_accepted_socket(
                self._make, accepted, ssl=context, ssl_handshake_timeout=patience if context else None
            )
        except OSError:  # it left, or what it sent was no handshake
            accepted.close()

    def _is_full(self) -> bool:
        return len(list(self._open_now)) + len(self._beginning) >= self._most

    def _make_room(self) -> bool:
        """End the connection that is missed least; whether there was one."""
        waiting = [c for c in self._open_now if c.waiting_since is not None]
        self._metrics.count("crystallite_closed_connections_total", int(bool(waiting)), reason="for another")
        if waiting:
            min(waiting, key=lambda c: (c.answered, c.waiting_since)).drop()
        elif self._beginning:
            next(iter(self._beginning)).cancel()
        return bool(waiting or self._beginning)

    def _say(self, error: OSError) -> None:
        now = time.monotonic()
        if now - self._last_line >= _SILENCE:
            self._last_line = now
            connections = len(list(self._open_now))
            server_log.warning(
                "cannot accept connections: %s; %d are open (--max-connections, ulimit -n)", error, connections
            )
