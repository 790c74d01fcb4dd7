"""`Machine`: measured rates: multiply-adds, memory bandwidth, and the cost of a call to another worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

__all__ = ["Machine", "measure_machine", "usable_cores"]

_SIDE = 2048  # of the matrix that is read: 16 MB, more than most caches hold
_HOPS = 200
_RUNS = 5


@dataclass(frozen=True)
class Machine:
    """Rates by which `plan` decides which pieces become services of their own."""

    hop: float  # seconds to hand a call to the inference tier and get its result back
    macs_per_second: float
    bytes_per_second: float

    def seconds(self, macs: int, nbytes: int, batch: int) -> float:
        """What a call should take at least: its products, or reading its weights once, whichever is longer.

        >>> Machine(1e-4, 1e9, 1e9).seconds(macs=1000, nbytes=4000, batch=1)
        4e-06
        >>> Machine(1e-4, 1e9, 1e9).seconds(macs=1000, nbytes=4000, batch=10)
        1e-05
        """
        return max(macs * batch / self.macs_per_second, nbytes / self.bytes_per_second)


def measure_machine() -> Machine:
    """The rates of this machine, from about a tenth of a second of work; the hop is that of the in-process engine.

    >>> measure_machine().hop > 0
    True
    """
    weight, vector, square = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE), torch.ones(512, 512)
    reading = _best(lambda: weight @ vector)
    multiplying = _best(lambda: square @ square)
    with ThreadPoolExecutor(1) as apart:  # the caller may be inside an event loop of its own, as notebooks are
        hop = apart.submit(lambda: asyncio.run(_hop())).result()
    return Machine(hop, square.numel() * 512 / multiplying, weight.nbytes / reading)


def usable_cores() -> int:
    """The cores that this process may run on.

    >>> usable_cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


async def _hop() -> float:
    """The median of some calls of a worker that does nothing."""
    loop, times = asyncio.get_running_loop(), []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(_HOPS):
            started = time.perf_counter()
            await loop.run_in_executor(pool, time.perf_counter)
            times.append(time.perf_counter() - started)
    return sorted(times)[_HOPS // 2]
