"""`Batcher`: dynamic batching: requests that arrive while a batch is computed form the next batch."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from crystallite.serving.batch_costs import BatchCosts
from crystallite.serving.joining import Joining
from crystallite.serving.limits import Limits
from crystallite.serving.logs import current
from crystallite.serving.metrics import Metrics
from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import Tensors
from crystallite.serving.statistics import Statistics
from crystallite.serving.tracing import current_span, span

__all__ = ["Batcher"]


_FILLED = 0.15  # of what a request saves by joining a batch may be spent on filling up; simulated with MiniLM's costs


@dataclass(eq=False)
class _Waiting:
    given: Tensors
    samples: int
    key: Hashable  # requests of one key may be one batch
    length: int  # of a sample, in what a batch fills up
    answer: asyncio.Future[Tensors]
    arrived: float = field(default_factory=time.monotonic)
    span: Any = field(default_factory=current_span)
    taken: float = 0.0  # when its batch began


class Batcher:
    """A bounded queue in front of a function of batches, which is called for one batch at a time, or for several.

    An idle function is called at once, or after `max_wait`; while it is busy, requests gather and become the next
    batch. Whoever has left or has waited too long is not computed. If a batch of several requests fails, each of them
    is computed alone, so that none fails for another. The oldest request is always in the next batch, with those that
    are most like it in length.
    """

    def __init__(
        self,
        model: str,
        run: Callable[[Tensors], Awaitable[Tensors]],
        joining: Joining,
        limits: Limits,
        metrics: Metrics,
        statistics: Statistics,
        batches: Callable[[], int] = lambda: 1,  # at once, as the engine sees it now
    ) -> None:
        self._model, self._run, self.joining = model, run, joining
        self._limits, self._metrics, self._statistics, self._batches = limits, metrics, statistics, batches
        self._queue: list[_Waiting] = []
        self._arrival = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = self._flushing = False
        self._batch_seconds = 0.0  # of the last batch
        self._costs = BatchCosts()

    @property
    def waiting(self) -> int:
        """Requests that are not computed yet."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing is computed."""
        return not self._queue and not self._tasks

    async def infer(self, given: Tensors, timeout: float | None = None) -> Tensors:
        """The answer for these samples, or a `Refusal`: 429 if the queue is full, 503 if closed, 504 if too late."""
        if self._closed:
            raise Refusal(503, f"{self._model} is shutting down", retry_after=1)
        if len(self._queue) >= self._limits.max_queue:
            raise Refusal(429, f"{self._model}: {len(self._queue)} requests wait already", self._retry_after())
        allowed = min(timeout or math.inf, self._limits.timeout)
        joining, given = self.joining, self.joining.completed(given)
        samples = next(iter(given.values())).shape[0]
        answer_later: asyncio.Future[Tensors] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(given, samples, joining.key(given), joining.length(given), answer_later)
        self._queue.append(waiting)
        self._arrival.set()
        if len(self._tasks) < self._batches():
            self._tasks.add(asyncio.create_task(self._work()))
        try:
            async with asyncio.timeout(allowed):
                answer = await waiting.answer
        except TimeoutError:
            raise Refusal(504, f"{self._model}: no answer within {allowed:g} s") from None
        finally:
            if waiting in self._queue:  # it has left: others may take its place
                self._queue.remove(waiting)
        if (entry := current.get()) is not None:
            entry.queue_seconds = waiting.taken - waiting.arrived
            entry.compute_seconds = time.monotonic() - waiting.taken
        return answer

    def flush(self) -> None:
        """Compute waiting requests at once from now on, without waiting for fuller batches."""
        self._flushing = True
        self._arrival.set()

    async def close(self) -> None:
        """Accept no more requests, and return when the accepted ones are answered."""
        self._closed = True
        self.flush()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _work(self) -> None:
        """Compute batch after batch until the queue is empty."""
        try:
            while self._queue:
                if self._limits.max_wait:
                    await self._gather()
                batch = self._take()
                if batch:
                    started = time.monotonic()
                    await self._answer(batch)
                    self._batch_seconds = time.monotonic() - started
        finally:
            self._tasks.discard(asyncio.current_task())

    async def _gather(self) -> None:
        """Wait for a full batch, but not longer than the first request may wait."""
        until = self._queue[0].arrived + self._limits.max_wait
        while self._queue and not self._flushing and sum(w.samples for w in self._queue) < self._limits.max_batch:
            self._arrival.clear()
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await self._arrival.wait()
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """The oldest request and others that may go with it, as many as fit into a batch, at least one.

        Those nearest in length come first, and of these the oldest. Filling up costs as much as computing, and a batch
        has costs of its own, which joining saves.
        """
        if not self._queue:
            return []
        first = self._queue[0]
        others = (waiting for waiting in self._queue if waiting is not first and waiting.key == first.key)
        batch, samples, longest = [first], first.samples, first.length
        most = _FILLED * self._costs.fixed(first.samples * first.length)
        for waiting in sorted(others, key=lambda waiting: abs(waiting.length - first.length)):
            if samples + waiting.samples > self._limits.max_batch:
                break
            together = (samples + waiting.samples) * max(longest, waiting.length)
            if together - samples * longest - waiting.samples * waiting.length <= most:
                samples, longest = samples + waiting.samples, max(longest, waiting.length)
                batch.append(waiting)
        taken = set(map(id, batch))
        self._queue = [waiting for waiting in self._queue if id(waiting) not in taken]
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        batch = [waiting for waiting in batch if not waiting.answer.done()]  # the others have left
        if not batch:
            return
        parts = [waiting.given for waiting in batch]
        samples = sum(waiting.samples for waiting in batch)
        self._metrics.observe("crystallite_batch_samples", samples, model=self._model)
        for waiting in batch:
            waiting.taken = time.monotonic()
            self._metrics.observe("crystallite_queue_seconds", waiting.taken - waiting.arrived, model=self._model)
        began = time.monotonic()
        try:
            with span("transform", [w.span for w in batch], model=self._model, samples=samples, requests=len(batch)):
                answers = self.joining.split(await self._run(self.joining.joined(parts)), parts)
            elapsed = time.monotonic() - began
            self._statistics.batch(samples, elapsed)
            self._costs.add(samples * max(waiting.length for waiting in batch), elapsed)
        except Exception as error:  # delivered to whoever asked; the queue goes on
            if len(batch) > 1:
                for waiting in batch:
                    await self._answer([waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():
                waiting.answer.set_result(answer)

    def _retry_after(self) -> int:
        """Whole seconds, at least one, after which the queue should have been worked off."""
        batches = sum(waiting.samples for waiting in self._queue) / self._limits.max_batch
        return max(1, math.ceil(batches * self._batch_seconds))
