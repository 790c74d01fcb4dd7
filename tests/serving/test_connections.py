"""Connections that never ask, never end, or never read: they go, and others are answered meanwhile."""

import logging
import os
import re
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import torch

from crystallite.serving import Limits, Listener, Service
from crystallite.serving.connections import room_for
from tests.helpers.artifacts import TOGETHER, network, saved
from tests.helpers.http_client import Slow, call, infer, request
from tests.helpers.waiting import PATIENCE, wait_for

LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def listening(folder, grpc_port=None, **limits):
    with (
        Service.load(folder, machine=TOGETHER, limits=Limits(**limits)) as service,
        Listener(service, port=0, grpc_port=grpc_port) as listener,
    ):
        yield service, listener


def connected(listener):
    return socket.create_connection(("127.0.0.1", urlsplit(listener.url).port), timeout=PATIENCE)


def received(connection):
    """All that comes until the other side closes."""
    found = b""
    try:
        while part := connection.recv(1 << 16):
            found += part
    except ConnectionError:
        pass
    return found


def closed(url, reason):
    found = re.search(rf'closed_connections_total{{reason="{reason}"}} (\d+)', call(url, "/metrics")[2])
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /v2",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n",
        b"\r\n",
        LIVE + b"GET /v2 HTTP/1.1\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half the headers", "an empty line", "a second request", "a body that nobody reads"],
)
def test_connections_that_never_finish_a_request(folder, start):
    with listening(folder, header_timeout=0.3, idle_timeout=PATIENCE) as (_, listener), connected(listener) as one:
        stop = threading.Event()

        def dribble():  # a byte now and then does not buy more time
            while not stop.wait(0.05):
                try:
                    one.send(b"\n" if start == b"\r\n" else b"x")
                except OSError:
                    return

        one.sendall(start)
        if start:
            threading.Thread(target=dribble, daemon=True).start()
        said = received(one)
        stop.set()
        assert b" 408 " in said or said == b"" or start.startswith(b"GET /v2 HTTP")
        assert closed(listener.url, "slow headers") >= 1


def test_connections_that_idle(folder):
    with listening(folder, idle_timeout=0.3) as (_, listener), connected(listener) as one:
        one.sendall(LIVE)
        assert received(one).startswith(b"HTTP/1.1 200")
        assert closed(listener.url, "idle") == 1


@pytest.mark.parametrize("pipelined", [1, 40])
def test_answers_that_nobody_reads(tmp_path, pipelined):
    """8 MB each: they would stay in memory for as long as the client likes."""
    folder = saved(network((4, 8, 64), 2, head=False), tmp_path / "small")
    content = request(torch.zeros(20_000, 4))
    head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with listening(folder, idle_timeout=0.5) as (_, listener), connected(listener) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        def send():
            try:
                for _ in range(pipelined):
                    one.sendall((head + content).encode())
            except OSError:
                pass

        sending = threading.Thread(target=send, daemon=True)
        sending.start()
        wait_for(lambda: closed(listener.url, "unread answers") == 1)
        sending.join(PATIENCE)


def test_the_one_that_waits_longest_makes_room(folder, x):
    with listening(folder, max_connections=4, header_timeout=PATIENCE) as (_, listener), ExitStack() as stack:
        kept = stack.enter_context(connected(listener))
        kept.sendall(LIVE)
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")  # it asked once, so those that never did go first
        half_open = [stack.enter_context(connected(listener)) for _ in range(30)]
        for _ in range(3):
            assert infer(listener.url, x)[0] == 200
        assert received(half_open[0]) == b""
        kept.sendall(LIVE)
        assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        assert closed(listener.url, "for another") >= 26


def test_when_all_are_answered_the_next_is_sent_away(folder, x):
    with listening(folder, max_connections=3, max_batch=1) as (service, listener), ThreadPoolExecutor(3) as pool:
        pieces = service.models["small"].engine._pieces
        pieces["model"] = piece = Slow(pieces["model"])
        busy = [pool.submit(infer, listener.url, x) for _ in range(3)]
        wait_for(lambda: piece.calls == 1 and service.models["small"].batcher.waiting == 2)
        status, headers, body = call(listener.url, "/v2")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "too many connections" in body["error"]
        piece.gate.set()
        assert [done.result()[0] for done in busy] == [200] * 3
        assert call(listener.url, "/v2")[0] == 200


def test_without_descriptors_the_rest_goes_on_and_says_so_once(folder, x, caplog):
    """The process may open no more files: connections that are there are answered, and others come later."""
    with listening(folder) as (_, listener), connected(listener) as one:
        one.sendall(LIVE)
        assert one.recv(4096)
        waiting = [socket.socket() for _ in range(20)]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        filler = []
        with caplog.at_level(logging.WARNING):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, before[1]))
            try:
                with suppress(OSError):
                    while True:
                        filler.append(os.dup(0))
                for client in waiting:
                    client.connect(("127.0.0.1", urlsplit(listener.url).port))
                wait_for(lambda: any("cannot accept" in line for line in caplog.messages))
                time.sleep(1.2)  # it tries again meanwhile
            finally:
                for file in filler:
                    os.close(file)
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
        one.close()
        assert infer(listener.url, x)[0] == 200
        for client in waiting:
            client.close()
        assert len([line for line in caplog.messages if "cannot accept" in line]) == 1


def test_the_room_is_what_the_process_may_open():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 248, before[1]))
        assert 150 <= room_for(512, 1) <= 200
        assert 75 <= room_for(512, 2) <= 100
        assert room_for(5, 2) == 5
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_grpc_connections_are_limited_too(tmp_path, x):
    grpc = pytest.importorskip("grpc", reason="needs grpcio")
    from tests.helpers import grpc_client

    folder = saved(network(), tmp_path / "f32")
    with (
        listening(folder, grpc_port=0, max_connections=5, header_timeout=0.5) as (_, listener),
        ExitStack() as stack,
    ):
        where = ("127.0.0.1", int(listener.grpc_target.rpartition(":")[2]))
        half_open = [stack.enter_context(socket.create_connection(where, timeout=PATIENCE)) for _ in range(50)]
        for connection in half_open:  # none of them ever speaks
            received(connection)
        with grpc.insecure_channel(listener.grpc_target) as channel:
            assert grpc_client.infer(channel, grpc_client.request(x))[0] == grpc.StatusCode.OK
