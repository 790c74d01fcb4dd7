"""The transform tier: features dealt out to pieces, their calls, and the results put together."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from crystallite.serving.copies import Copies
from crystallite.serving.cuts.calls import Request, calls_go_to
from crystallite.serving.engine import Engine, Unreachable
from crystallite.serving.interface import computed, only
from crystallite.serving.limits import Limits
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Call, Fan, Inside, Network
from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import OUTPUT, Tensors
from crystallite.serving.tracing import span

__all__ = ["Transform"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds before an unreachable piece is called a third time, and at most
_THREADS = 64  # batches that are under way inside models; fewer ever are


class Transform:
    """Runs the steps of a network, its pieces on an engine."""

    def __init__(self, model: str, network: Network, engine: Engine, limits: Limits, metrics: Metrics) -> None:
        self._model, self._steps, self._engine = model, network.steps, engine
        self._limits, self._metrics = limits, metrics
        self._copies = {
            step: Copies(step.module) for step in network.steps if isinstance(step, Inside) and step.module is not None
        }
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="crystallite-transform")  # started when needed

    @property
    def batches(self) -> int:
        """That are worth having under way at once, now: one where code of a model cannot be copied."""
        return self._engine.batches if all(copies.are_possible for copies in self._copies.values()) else 1

    async def run(self, given: Tensors) -> Tensors:
        """The model's answer; a `Refusal` that names the piece if one failed as often as was tried."""
        for step in self._steps:
            if isinstance(step, Call):
                given = await self._call(step.piece, given)
            elif isinstance(step, Fan):
                given = {OUTPUT: await self._fan(step, only(given))}
            elif isinstance(step, Inside):
                given = await self._inside(step, given)
            else:
                given = computed(step.module, given)
        return given

    async def close(self) -> None:
        """Release the threads; nothing may run any more."""
        await asyncio.to_thread(self._pool.shutdown)

    async def _fan(self, step: Fan, x: Tensor) -> Tensor:
        """Site after site, all pieces of a site at once."""
        work = step.module.requests(x)
        with torch.no_grad():
            requests = next(work)
        while True:
            made = await self._all(requests)
            try:
                with torch.no_grad():
                    requests = work.send(made)
            except StopIteration as end:
                found: Tensor = end.value
                return found

    async def _inside(self, step: Inside, given: Tensors) -> Tensors:
        """The model's own code, in a thread that waits where it needs pieces, on a copy that no other batch uses."""
        loop, copies = asyncio.get_running_loop(), self._copies[step]

        def call(requests: Sequence[Request]) -> list[Tensors]:
            return asyncio.run_coroutine_threadsafe(self._all(requests), loop).result()

        def compute() -> Tensors:
            with calls_go_to(call), copies.lent() as module:
                return computed(module, given)

        return await loop.run_in_executor(self._pool, contextvars.copy_context().run, compute)  # spans go on

    async def _all(self, requests: Sequence[Request]) -> list[Tensors]:
        """All pieces at once. The others are waited for when one fails: nothing runs on behind its request."""
        calls = [self._call(piece, given) for piece, given in requests]
        results: list[Tensors] = []
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    async def _call(self, piece: str, given: Tensors) -> Tensors:
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
                with span("piece", model=self._model, piece=piece, attempt=tries):
                    answer = await self._engine.run(piece, given)
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
                return answer
            self._metrics.count("crystallite_retries_total", model=self._model, piece=piece)
        tried = f"{tries} time{'s' * (tries > 1)}"
        raise Refusal(503, f"piece {piece} of {self._model} failed {tried}, the last with {reason}", retry_after=1)
