"""The transform tier: features dealt out to pieces, their calls, and the results put together."""

from __future__ import annotations

import asyncio
import time

import torch
from torch import Tensor

from crystallite.serving.engine import Engine
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Call, Fan, Local, Network
from crystallite.serving.refusal import Refusal

__all__ = ["Transform"]


class Transform:
    """Runs the steps of a network, its pieces on an engine."""

    def __init__(self, model: str, network: Network, engine: Engine, attempts: int, metrics: Metrics) -> None:
        self._model, self._steps, self._engine = model, network.steps, engine
        self._attempts, self._metrics = attempts, metrics

    async def run(self, x: Tensor) -> Tensor:
        """The model's answer; a `Refusal` that names the piece if one failed as often as was tried."""
        for step in self._steps:
            if isinstance(step, Call):
                x = await self._call(step.piece, x)
            elif isinstance(step, Fan):
                x = await self._fan(step, x)
            else:
                x = _local(step, x)
        return x

    async def _fan(self, step: Fan, x: Tensor) -> Tensor:
        """All pieces at once. The others are waited for when one fails: nothing runs on behind its request."""
        calls = [self._call(piece, part) for piece, part in zip(step.pieces, step.deal(x), strict=True)]
        results: list[Tensor] = []
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        with torch.no_grad():
            return step.networks.join(results)

    async def _call(self, piece: str, x: Tensor) -> Tensor:
        """The piece's result. It is a pure function, so it is called again when a call fails."""
        reason = ""
        for attempt in range(self._attempts):
            if attempt:
                self._metrics.count("crystallite_retries_total", model=self._model, piece=piece)
            started = time.perf_counter()
            try:
                y = await asyncio.wrap_future(self._engine.submit(piece, x))
            except Exception as error:  # whatever the engine or the piece raises
                reason = f"{type(error).__name__}: {error}"
                continue
            elapsed = time.perf_counter() - started
            self._metrics.observe("crystallite_piece_seconds", elapsed, model=self._model, piece=piece)
            return y
        tried = f"{self._attempts} time{'s' * (self._attempts > 1)}"
        raise Refusal(503, f"piece {piece} of {self._model} failed {tried}, the last with {reason}", retry_after=1)


@torch.no_grad()
def _local(step: Local, x: Tensor) -> Tensor:
    return step.module(x)
