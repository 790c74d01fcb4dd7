"""A load generator: some clients, each of which sends the next request as soon as the last one is answered.

Runs as a program of its own, so that it takes nothing from the server but its share of the machine, and imports
nothing: `python load.py` reads an `Ask` as JSON and prints a `Load`.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial


@dataclass(frozen=True)
class Ask:
    """Where to send which requests, from how many clients, and for how long."""

    host: str
    port: int
    requests: list[tuple[str, str]]  # request line and headers, without the empty line; the body, hexadecimal
    clients: int
    seconds: float
    warmup: float = 0.5  # seconds before anything is counted


@dataclass(frozen=True)
class Load:
    """What came back: answers, errors by status, and the seconds that each answer took, in order of size."""

    seconds: float
    latencies: list[float]
    refused: dict[str, int]

    @property
    def per_second(self) -> float:
        """
        >>> Load(2.0, [0.5] * 6, {}).per_second
        3.0
        """
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        """The seconds within which a share of the answers came.

        >>> Load(2.0, [0.1, 0.2, 0.3], {}).quantile(0.5)
        0.2
        """
        return self.latencies[min(int(share * len(self.latencies)), len(self.latencies) - 1)]


class _Client(asyncio.Protocol):
    """One connection that sends one request after the other."""

    def __init__(self, requests: Iterator[bytes], until: float) -> None:
        self.requests, self.until = requests, until
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers: list[tuple[float, float, str]] = []  # when, how long, status
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._started = time.perf_counter()
        self._transport.write(next(self.requests))  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        _, _, rest = head.lower().partition(b"\r\ncontent-length:")  # answers in binary have a longer name that ends so
        if len(body) < int(rest.split(b"\r\n", 1)[0] or 0):
            return
        now = time.perf_counter()
        self.answers.append((now, now - self._started, head[9:12].decode()))
        self._received = b""
        if now < self.until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if time.perf_counter() < self.until:
            self.answers.append((time.perf_counter(), 0.0, "lost"))
        if not self.done.done():
            self.done.set_result(None)


def _same(client: _Client) -> _Client:
    return client


async def run(ask: Ask) -> Load:
    """The load, from this process."""
    loop, requests = asyncio.get_running_loop(), []
    for head, text in ask.requests:
        body = bytes.fromhex(text)
        requests.append(f"{head}\r\nHost: {ask.host}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    counted = time.perf_counter() + ask.warmup
    until = counted + ask.seconds
    clients = []
    for i in range(ask.clients):
        first = i * len(requests) // ask.clients  # each begins elsewhere
        client = _Client(itertools.cycle(requests[first:] + requests[:first]), until)
        await loop.create_connection(partial(_same, client), ask.host, ask.port)
        clients.append(client)
    await asyncio.wait([client.done for client in clients], timeout=ask.warmup + ask.seconds + 60)
    answers = [answer for client in clients for answer in client.answers if answer[0] >= counted]
    refused: dict[str, int] = {}
    for _, _, status in answers:
        if status != "200":
            refused[status] = refused.get(status, 0) + 1
    last = max((when for when, _, _ in answers), default=until)
    return Load(last - counted, sorted(seconds for _, seconds, status in answers if status == "200"), refused)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(Ask(**json.load(sys.stdin)))))))
