"""Servers in processes of their own, for benchmarks: started, watched, and ended."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crystallite.serving.load import Load

__all__ = ["SERVE", "Server", "free_port", "started"]

SERVE = ["crystallite", "serve", "--port", "0", "--grpc-port", "0"]


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen
    port: int
    grpc: str = ""
    loads: list[Load] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of processor time, for each answer
    busiest: list[list[float]] = field(default_factory=list)  # the same of the three threads that took most of it

    def used(self) -> float:
        """Seconds of processor time so far."""
        numbers = self._proc("stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def used_by_thread(self) -> dict[str, float]:
        """The same for each thread, finer."""
        threads = self._proc("task").iterdir()
        return {thread.name: int((thread / "schedstat").read_text().split()[0]) / 1e9 for thread in threads}

    def resident(self) -> int:
        """Bytes of memory that it holds."""
        return int(self._proc("statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def descriptors(self) -> int:
        """Files and connections that it has open."""
        return len(os.listdir(self._proc("fd")))

    def threads(self) -> int:
        return len(os.listdir(self._proc("task")))

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.process.pid}/{name}")


@contextmanager
def started(
    words: list[str], port: int | None = None, files: int | None = None, errors: Path | None = None
) -> Iterator[Server]:
    """A program with one thread of torch, once it accepts connections.

    port: where it listens, if it does not say so itself as `crystallite serve` does. files: how many it may have open.
    errors: a file for its standard error.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command, grpc = [sys.executable, "-m", *words], ""
    with open(errors or os.devnull, "w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log if errors else None, text=True, env=environment,
            start_new_session=True,  # a busy machine shares its time out by sessions: more threads get no more of it
            preexec_fn=None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)),
        )  # fmt: skip
    try:
        if port is None:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.match(r"http://127\.0\.0\.1:(\d+)/v2/models", line):
                    port = int(found[1])
                if line.startswith("grpc://"):
                    grpc = line.removeprefix("grpc://").strip()
                if line.strip() == "ready":
                    break
        if port is None:
            raise SystemExit(f"{' '.join(words)}: the server did not start")
        _await(port)
        yield Server(process, port, grpc)
    finally:
        process.terminate()
        process.wait(60)


def _await(port: int) -> None:
    until = time.monotonic() + 180
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise SystemExit(f"no server on port {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
