"""The inference tier: engines that run pieces."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

__all__ = ["Engine", "LocalEngine"]


class Engine(Protocol):
    """Runs pieces. A piece is a pure function, so a call that failed may be repeated, here or elsewhere."""

    def submit(self, piece: str, x: Tensor) -> Future[Tensor]:
        """Start piece(x); the result, or what went wrong, comes in the future."""

    def close(self) -> None:
        """Finish the calls that were started, and let go of the pieces."""


class LocalEngine:
    """Pieces in this process, on one thread each, up to as many threads as torch may use.

    torch's number of threads belongs to the whole process and stays as it is: with several pieces and as many cores,
    `OMP_NUM_THREADS=1` keeps them from taking each other's.

    >>> engine = LocalEngine({"double": nn.Linear(1, 1, bias=False)})
    >>> engine.submit("double", torch.zeros(1, 1)).result()
    tensor([[0.]])
    >>> engine.close()
    """

    def __init__(self, pieces: Mapping[str, nn.Module]) -> None:
        self._pieces = dict(pieces)
        workers = max(1, min(len(pieces), torch.get_num_threads()))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="crystallite-piece")

    def submit(self, piece: str, x: Tensor) -> Future[Tensor]:
        return self._pool.submit(self._run, self._pieces[piece], x)

    def close(self) -> None:
        self._pool.shutdown()
        self._pieces.clear()

    @staticmethod
    def _run(module: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)
