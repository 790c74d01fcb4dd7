"""`Trial`: a model and the original it was made from, side by side on the same requests (paper, section 5, live)."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.suggest import check_choice
from crystallite.data.batch import Batch
from crystallite.models.manifest import attach_verdict, check_source, check_weights, source_sha256
from crystallite.models.preparing import prepared
from crystallite.serving.batching import Batcher
from crystallite.serving.engine import LocalEngine
from crystallite.serving.limits import Limits
from crystallite.serving.live_comparison import Compared, LiveComparison
from crystallite.serving.logs import Entry, current, server_log
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source, check_verdict
from crystallite.serving.network import Network
from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import Tensors
from crystallite.validation.cost import count_macs, count_parameters
from crystallite.validation.rules import Rules
from crystallite.validation.verdict import Verdict

__all__ = ["SYSTEMS", "Trial", "TrialOptions", "in_trial"]

SYSTEMS = ("original", "reorganized")
_MOST_WAITING = 64  # requests that wait for their second answer
_QUIET = 0.1  # seconds that a second answer waits for the system that answers clients to be idle
_LOOK = 0.002  # seconds between two looks


@dataclass(frozen=True)
class TrialOptions:
    """The original to compare with, after how many requests a verdict is given, by which rules, and whether it is kept.

    attach: write the verdict into the manifest of the saved model, as `validate` does.
    """

    original: nn.Module
    requests: int = 1000
    rules: Rules = field(default_factory=lambda: Rules(max_drop=None))  # requests come without labels
    attach: bool = False

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise InvalidOption(f"requests: expected at least 1, got {self.requests}")
        if self.original.training:
            raise InvalidOption("trial: expected an original in evaluation mode; call .eval() first")


def in_trial(
    cut: CutModel, served: ServedModel, source: Source, options: TrialOptions, limits: Limits, metrics: Metrics
) -> ServedModel:
    """The model with a trial against its original, which answers until somebody switches over."""
    check_source(cut.path, options.original)
    module, _ = prepared(options.original)
    version = source_sha256(module)[:12]
    twin = CutModel.of(f"{cut.name}.original", version, cut.path, module, source, [cut.example])
    if [str(spec) for spec in twin.signature.outputs] != [str(spec) for spec in cut.signature.outputs]:
        expected, found = ("; ".join(signature.lines()) for signature in (cut.signature, twin.signature))
        raise InvalidOption(f"trial: expected an original that {expected}; this one {found}")
    original = ServedModel.of(twin, LocalEngine(twin.network.modules), limits, metrics)
    trial = Trial((twin, cut), (original, served), options, source.unvalidated, limits, metrics)
    return dataclasses.replace(served, trial=trial)


class Trial:
    """Two systems, one of which answers; the other one answers the same requests afterwards, and both are compared.

    The second answer never delays the first: it waits in a short queue until the system that clients wait for has
    nothing to do, or for a tenth of a second; what does not fit into the queue is dropped, and counted.
    """

    def __init__(
        self,
        cuts: tuple[CutModel, CutModel],
        served: tuple[ServedModel, ServedModel],
        options: TrialOptions,
        unvalidated: bool,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        """The original comes first in pairs; unvalidated: the other may answer whatever its verdict says."""
        cut = cuts[1]
        self._cut, self._options, self._unvalidated, self._limits = cut, options, unvalidated, limits
        self._batchers = served[0].batcher, served[1].batcher
        # everything but what computes is the same: signature, name, how texts are read
        self.original = dataclasses.replace(
            served[1], version=served[0].version, plan=served[0].plan, batcher=served[0].batcher,
            transform=served[0].transform, engine=served[0].engine, trial=self, system=0,
        )  # fmt: skip
        whole, asked = [_Whole(cut.network) for cut in cuts], Batch(0, 1, named=cut.example.made(1))
        costs = {
            "parameters": (count_parameters(whole[0]), count_parameters(whole[1])),
            "macs": (count_macs(whole[0], asked), count_macs(whole[1], asked)),
        }
        self._comparison = LiveComparison(cut.name, options.requests, options.rules, costs, metrics, self._keep)
        self._waiting: deque[_Second] = deque()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._answer_from = SYSTEMS[0]

    @property
    def answer_from(self) -> str:
        """The system that clients get answers from."""
        return self._answer_from

    @property
    def chosen_version(self) -> str:
        """Of the system that clients get answers from."""
        return self.original.version if self._answer_from == SYSTEMS[0] else self._cut.version

    @property
    def verdict(self) -> Verdict | None:
        """After enough requests."""
        return self._comparison.verdict

    @property
    def waiting(self) -> int:
        """Requests that wait for the original."""
        return self._batchers[0].waiting

    def summary(self) -> dict[str, Any]:
        """All that is known, as plain values."""
        versions = {"original": self.original.version, "reorganized": self._cut.version}
        return {"answer_from": self._answer_from, "versions": versions, **self._comparison.summary()}

    def switch(self, answer_from: str) -> None:
        """Let another system answer from now on; requests that were accepted are answered by the one that took them.

        A `Refusal` with status 409 if the reorganized model has no verdict that it passed, or failed in this trial.
        """
        check_choice("answer_from", answer_from, SYSTEMS)
        if answer_from == SYSTEMS[1] and (reason := self._reason_against()) is not None:
            raise Refusal(409, f"{self._cut.name} stays with the original: {reason}")
        self._answer_from = answer_from

    def _reason_against(self) -> str | None:
        if self._unvalidated:
            return None
        if self._comparison.failed:
            return f"it failed to answer {self._comparison.failed} requests, the last: {self._comparison.failure:.200}"
        if self.verdict is not None:
            return None if self.verdict.passed else f"the trial failed: {'; '.join(self.verdict.reasons):.300}"
        try:
            check_verdict(self._cut.path)
        except CrystalliteError as error:
            return str(error)
        return None

    async def infer(self, system: int, given: Tensors, timeout: float | None) -> Tensors:
        """The answer of a system; the other one gets the same request later."""
        answer, seconds = await _timed(self._batchers[system], given, timeout)
        request_id = None if (entry := current.get()) is None else entry.request_id
        nbytes = sum(x.nbytes for x in (*given.values(), *answer.values()))
        if len(self._waiting) >= _MOST_WAITING or self._bytes + nbytes > self._limits.max_bytes:
            self._comparison.drop()
            return answer
        self._bytes += nbytes
        self._waiting.append(_Second(system, given, answer, seconds, nbytes, request_id))
        if self._task is None or self._task.done():
            # in a context of its own: it is no part of this request
            self._task = asyncio.create_task(self._work(), context=contextvars.Context())
        return answer

    async def close(self) -> None:
        """Compare no more, and release the original when it has answered what it accepted."""
        self._waiting.clear()
        await self._batchers[0].close()
        if self._task is not None:
            await asyncio.wait([self._task])
        await self.original.transform.close()
        await self.original.engine.close()

    async def _work(self) -> None:
        while self._waiting:
            await self._quiet(self._batchers[self._waiting[0].system])
            if not self._waiting:
                return
            first = self._waiting.popleft()
            self._bytes -= first.nbytes
            try:
                answer, seconds = await _timed(self._batchers[1 - first.system], first.given, None)
            except CrystalliteError as error:
                await asyncio.to_thread(self._comparison.fail, error)
                continue
            answers, times = (first.answer, answer), (first.seconds, seconds)
            if first.system == 1:
                answers, times = answers[::-1], times[::-1]
            compared = Compared(first.given, answers, times, first.request_id)
            try:
                await asyncio.to_thread(self._comparison.add, compared)
            except CrystalliteError as error:  # answers of another structure
                await asyncio.to_thread(self._comparison.fail, error)

    async def _quiet(self, batcher: Batcher) -> None:
        """Wait until nobody waits for an answer, but not for ever."""
        until = time.monotonic() + _QUIET
        while not batcher.is_idle and time.monotonic() < until:
            await asyncio.sleep(_LOOK)

    def _keep(self, verdict: Verdict) -> None:
        """Say what came out, and write it into the manifest if that was asked for; runs on a thread."""
        text = "passed" if verdict.passed else "failed"
        server_log.warning("%s: the trial %s: %s", self._cut.name, text, "; ".join(verdict.reasons))
        if not self._options.attach:
            return
        try:
            if not check_weights(self._cut.path).startswith(self._cut.version):
                raise InvalidOption(f"{self._cut.path} holds another version by now")
            attach_verdict(self._cut.path, verdict.to_json())
        except CrystalliteError as error:
            server_log.warning("%s: the verdict was not attached: %s", self._cut.name, error)


@dataclass(frozen=True)
class _Second:
    """A request that was answered once."""

    system: int
    given: Tensors
    answer: Tensors
    seconds: float
    nbytes: int
    request_id: str | None


async def _timed(batcher: Batcher, given: Tensors, timeout: float | None) -> tuple[Tensors, float]:
    """The answer and the seconds that its batch took."""
    own, outer = Entry("trial", "infer"), current.get()
    token = current.set(own)
    try:
        answer = await batcher.infer(given, timeout)
    finally:
        current.reset(token)
        if outer is not None:
            outer.queue_seconds, outer.compute_seconds = own.queue_seconds, own.compute_seconds
    return answer, own.compute_seconds or 0.0


class _Whole(nn.Module):
    """All that a cut model computes, as one module."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network, self.parts = network, nn.ModuleList(network.parts)

    def forward(self, **given: Tensor) -> Tensors:
        return self.network(given)
