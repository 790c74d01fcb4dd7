"""The transform tier: features dealt out to pieces, their calls, and the results put together."""

from __future__ import annotations

import asyncio
import time

import torch
from torch import Tensor

from crystallite.serving.engine import Engine, Unreachable
from crystallite.serving.limits import Limits
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Call, Fan, Local, Network
from crystallite.serving.refusal import Refusal

__all__ = ["Transform"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds before an unreachable piece is called a third time, and at most


class Transform:
    """Runs the steps of a network, its pieces on an engine."""

    def __init__(self, model: str, network: Network, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self._model, self._steps, self._engine = model, network.steps, engine
        self._limits, self._metrics = limits, metrics

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
        """The piece's result. It is a pure function, so it is called again when a call fails.

        A piece that fails is believed after some attempts. One that cannot be reached is asked for as long as its
        callers may wait: a replica that died is replaced within seconds.
        """
        begun = time.monotonic()
        tries = failures = 0
        while True:
            started = time.perf_counter()
            tries += 1
            try:
                y = await self._engine.run(piece, x)
            except Unreachable as error:
                reason = str(error)
                pause = min(_FIRST_PAUSE * 2 ** (tries - 2), _LONGEST_PAUSE) if tries > 1 else 0.0
                if time.monotonic() + pause - begun > self._limits.timeout:
                    break
                await asyncio.sleep(pause)
            except Exception as error:  # whatever the piece raises
                reason = f"{type(error).__name__}: {error}"
                failures += 1
                if failures == self._limits.attempts:
                    break
            else:
                elapsed = time.perf_counter() - started
                self._metrics.observe("crystallite_piece_seconds", elapsed, model=self._model, piece=piece)
                return y
            self._metrics.count("crystallite_retries_total", model=self._model, piece=piece)
        tried = f"{tries} time{'s' * (tries > 1)}"
        raise Refusal(503, f"piece {piece} of {self._model} failed {tried}, the last with {reason}", retry_after=1)


@torch.no_grad()
def _local(step: Local, x: Tensor) -> Tensor:
    return step.module(x)
