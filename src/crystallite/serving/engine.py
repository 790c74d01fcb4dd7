"""The inference tier: engines that run pieces."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import nn

from crystallite.serving.copies import can_be_copied, copy_sharing_weights
from crystallite.serving.interface import computed
from crystallite.serving.machine import usable_cores
from crystallite.serving.signature import Tensors

__all__ = ["Engine", "LocalEngine", "Unreachable"]

_LONG = 0.005  # seconds of a call, from which on a second one at the same time is worth smaller batches


class Unreachable(Exception):
    """A call that got no answer, which says nothing about the piece: another replica may answer, or the next one."""


class Engine(Protocol):
    """Runs pieces. A piece is a pure function, so a call that failed may be repeated, here or elsewhere."""

    @property
    def batches(self) -> int:
        """That are worth having under way at once, now."""

    async def run(self, piece: str, given: Tensors) -> Tensors:
        """What the piece makes of named tensors; raises `Unreachable` if no answer came, and what it raised if not."""

    async def replicas(self) -> Mapping[str, int]:
        """The number of running replicas of each piece."""

    async def close(self) -> None:
        """Finish the running calls and release the pieces."""


class LocalEngine:
    """Pieces in this process, on one thread each, up to as many threads as torch may use.

    torch's number of threads belongs to the whole process and stays as it is: with several pieces and as many cores,
    `OMP_NUM_THREADS=1` keeps them from taking each other's. Cores that this leaves compute other batches meanwhile,
    where a batch takes long; short ones are better as one. Then every thread has modules of its own, which share the
    weights: whatever a model's code keeps while it runs, no other batch sees.

    >>> async def doubled() -> Tensors:
    ...     engine = LocalEngine({"double": nn.Linear(1, 1, bias=False)})
    ...     y = await engine.run("double", {"input": torch.zeros(1, 1)})
    ...     await engine.close()
    ...     return y
    >>> asyncio.run(doubled())
    {'output': tensor([[0.]])}
    """

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        self._pieces = dict(pieces)
        threads = torch.get_num_threads()
        self._most = max(1, usable_cores() // threads) if all(map(can_be_copied, pieces.values())) else 1
        self._seconds = 0.0  # of the last call
        self._own = threading.local()  # modules of a thread
        workers = max(1, min(len(pieces), threads)) * self._most
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="crystallite-piece")

    @property
    def batches(self) -> int:
        return self._most if self._seconds >= _LONG else 1

    async def run(self, piece: str, given: Tensors) -> Tensors:
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._computed, piece, given)

    def _computed(self, piece: str, given: Tensors) -> Tensors:
        module, own = self._pieces[piece], self._own.__dict__
        if self._most > 1:
            if piece not in own:
                own[piece] = copy_sharing_weights(module)
            module = own[piece]
        began = time.perf_counter()
        answer = computed(module, given)
        self._seconds = time.perf_counter() - began
        return answer

    async def replicas(self) -> Mapping[str, int]:
        return dict.fromkeys(self._pieces, 1)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        self._pieces.clear()
