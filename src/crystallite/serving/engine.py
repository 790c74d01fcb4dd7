"""The inference tier: engines that run pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import nn

from crystallite.serving.interface import computed
from crystallite.serving.signature import Tensors

__all__ = ["Engine", "LocalEngine", "Unreachable"]


class Unreachable(Exception):
    """A call that got no answer, which says nothing about the piece: another replica may answer, or the next one."""


class Engine(Protocol):
    """Runs pieces. A piece is a pure function, so a call that failed may be repeated, here or elsewhere."""

    batches: int  # that are worth having under way at once

    async def run(self, piece: str, given: Tensors) -> Tensors:
        """What the piece makes of named tensors; raises `Unreachable` if no answer came, and what it raised if not."""

    async def replicas(self) -> Mapping[str, int]:
        """The number of running replicas of each piece."""

    async def close(self) -> None:
        """Finish the running calls and release the pieces."""


class LocalEngine:
    """Pieces in this process, on one thread each, up to as many threads as torch may use.

    torch's number of threads belongs to the whole process and stays as it is: with several pieces and as many cores,
    `OMP_NUM_THREADS=1` keeps them from taking each other's.

    >>> async def doubled() -> Tensors:
    ...     engine = LocalEngine({"double": nn.Linear(1, 1, bias=False)})
    ...     y = await engine.run("double", {"input": torch.zeros(1, 1)})
    ...     await engine.close()
    ...     return y
    >>> asyncio.run(doubled())
    {'output': tensor([[0.]])}
    """

    batches = 1  # a second one would only take cores from the first

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        self._pieces = dict(pieces)
        workers = max(1, min(len(pieces), torch.get_num_threads()))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="crystallite-piece")

    async def run(self, piece: str, given: Tensors) -> Tensors:
        return await asyncio.get_running_loop().run_in_executor(self._pool, computed, self._pieces[piece], given)

    async def replicas(self) -> Mapping[str, int]:
        return dict.fromkeys(self._pieces, 1)

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        self._pieces.clear()
