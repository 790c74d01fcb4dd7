"""`LiveComparison`: the answers of two systems to the same requests as they come in, and a verdict after enough."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import Any

import numpy as np

from crystallite.core.errors import CrystalliteError
from crystallite.data.batch import Batch
from crystallite.serving.metrics import Metrics
from crystallite.serving.signature import Tensors
from crystallite.validation.comparison import Comparison, RunningComparison
from crystallite.validation.cost import Latency
from crystallite.validation.rules import Outcome, Rules
from crystallite.validation.verdict import Verdict, plain

__all__ = ["Compared", "LiveComparison"]

_WINDOW = 60.0  # seconds that are summed up together
_WINDOWS, _WORST, _TIMES, _SHOWN = 60, 5, 1000, 16  # kept: windows, worst cases, latencies; numbers of an input


@dataclass(frozen=True)
class Compared:
    """One request and the answers of both systems, each with the seconds that its batch took."""

    given: Tensors
    answers: tuple[Tensors, Tensors]  # original, reorganized
    seconds: tuple[float, float]
    request_id: str | None
    when: float = field(default_factory=time.time)


@dataclass
class _Window:
    begun: float
    requests: int = 0
    samples: int = 0
    agreeing: float = 0.0
    deciding: int = 0
    deviation: float = 0.0
    worst: float = 0.0
    seconds: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def to_json(self) -> dict[str, Any]:
        return {
            "from": _time(self.begun),
            "requests": self.requests,
            "samples": self.samples,
            "agreement": self.agreeing / self.deciding if self.deciding else None,
            "mean_deviation": self.deviation / self.samples if self.samples else None,
            "worst_deviation": self.worst,
            "seconds": [median(times) if times else None for times in self.seconds],
        }


class LiveComparison:
    """What is known about two systems so far, from several threads.

    Holds ten numbers per sample and output until the verdict, and a fixed amount after it.
    """

    def __init__(
        self,
        name: str,
        requests: int,
        rules: Rules,
        costs: Mapping[str, tuple[int, int]],
        metrics: Metrics,
        decided: Callable[[Verdict], None],
    ) -> None:
        """costs: parameters and multiply-adds of both systems; decided: called with the verdict, once."""
        self._name, self._requests, self._rules, self._costs = name, requests, rules, costs
        self._metrics, self._decided = metrics, decided
        self._all: RunningComparison | None = RunningComparison()
        self._usual: dict[str, tuple[float, int]] = {}  # sum of squares of the original's norms, and how many
        self._window = _Window(time.time())
        self._windows: deque[_Window] = deque(maxlen=_WINDOWS)
        self._total = _Window(time.time())
        self._times: tuple[deque[float], deque[float]] = (deque(maxlen=_TIMES), deque(maxlen=_TIMES))
        self._worst: list[dict[str, Any]] = []
        self.compared = self.dropped = self.failed = 0
        self.failure: str | None = None  # the last one
        self.verdict: Verdict | None = None
        self._lock = threading.Lock()

    def drop(self) -> None:
        """A request that was answered by one system only, for lack of time or room."""
        self.dropped += 1
        self._metrics.count("crystallite_trial_requests_total", model=self._name, outcome="dropped")

    def fail(self, error: CrystalliteError) -> None:
        """A request that one system answered and the other could not."""
        self._metrics.count("crystallite_trial_requests_total", model=self._name, outcome="failed")
        with self._lock:
            self.failed, self.failure = self.failed + 1, str(error)
            self._decide_if_enough()

    def add(self, compared: Compared) -> None:
        """A request that both answered."""
        with self._lock:
            self._add(compared)

    def _add(self, compared: Compared) -> None:
        samples = next(iter(compared.given.values())).shape[0]
        running = self._all if self._all is not None else RunningComparison()
        one = running.add(Batch(self._total.samples, samples), *compared.answers)
        deviation = self._deviations(one)
        deciding = [output.agreement for output in one.outputs if output.decides]
        agreement = np.min(deciding, axis=0) if deciding else np.empty(0)
        self._keep_worst(one, deviation, compared)
        self._count(deviation, agreement, compared)
        if compared.when - self._window.begun > _WINDOW:
            self._windows.append(self._window)
            self._window = _Window(compared.when)
        for window in (self._window, self._total):
            window.requests, window.samples = window.requests + 1, window.samples + samples
            window.agreeing, window.deciding = window.agreeing + agreement.sum(), window.deciding + len(agreement)
            window.deviation += float(deviation.sum())
            window.worst = max(window.worst, float(deviation.max(initial=0.0)))
        for kept, recent, seconds in zip(self._window.seconds, self._times, compared.seconds, strict=True):
            kept.append(seconds)
            recent.append(seconds)
        self.compared += 1
        self._decide_if_enough()

    def summary(self) -> dict[str, Any]:
        """Plain values: totals, the last hour minute by minute, worst cases, and the verdict if there is one."""
        with self._lock:
            return plain(self._summary())

    def _summary(self) -> dict[str, Any]:
        total = self._total.to_json()
        windows = [*self._windows, self._window]
        return {
            "requests": self.compared,
            "dropped": self.dropped,
            "failed": self.failed,
            "last_failure": self.failure,
            "samples": total["samples"],
            "agreement": total["agreement"],
            "mean_deviation": total["mean_deviation"],
            "worst_deviation": total["worst_deviation"],
            "seconds": [median(times) if times else None for times in self._times],
            "worst": self._worst,
            "over_time": [window.to_json() for window in windows if window.requests],
            "requests_for_verdict": self._requests,
            "verdict": self.verdict and self.verdict.to_json(),
        }

    def _deviations(self, one: Comparison) -> np.ndarray:
        """(samples,) relative to the original, or to a share of its usual size over all requests so far."""
        rows = []
        for output in one.outputs:
            squares, count = self._usual.get(output.path, (0.0, 0))
            finite = output.norm[output.finite]
            squares, count = squares + float((finite**2).sum()), count + len(finite)
            self._usual[output.path] = squares, count
            found = output.deviation_where((squares / max(count, 1)) ** 0.5)
            rows.append(found if len(found) == one.samples else np.full(one.samples, found.max(initial=0.0)))
        return np.max(rows, axis=0)

    def _keep_worst(self, one: Comparison, deviation: np.ndarray, compared: Compared) -> None:
        worst = int(deviation.argmax())
        if deviation[worst] == 0 or (len(self._worst) == _WORST and deviation[worst] <= self._worst[-1]["deviation"]):
            return
        output = max(one.outputs, key=lambda output: output.deviation[min(worst, len(output.deviation) - 1)])
        case = output.case(min(worst, len(output.deviation) - 1))
        shown = {name: x[worst].flatten()[:_SHOWN].tolist() for name, x in compared.given.items()}
        found = {
            "time": _time(compared.when), "request_id": compared.request_id, "sample": worst, "output": case.output,
            "deviation": float(deviation[worst]), "original": case.original, "reorganized": case.reorganized,
            "inputs": shown,
        }  # fmt: skip
        self._worst = sorted([*self._worst, found], key=lambda case: -case["deviation"])[:_WORST]

    def _count(self, deviation: np.ndarray, agreement: np.ndarray, compared: Compared) -> None:
        metrics, name = self._metrics, self._name
        metrics.count("crystallite_trial_requests_total", model=name, outcome="compared")
        if len(agreement):
            same = int((agreement == 1).sum())
            metrics.count("crystallite_trial_decisions_total", same, model=name, outcome="same")
            metrics.count("crystallite_trial_decisions_total", len(agreement) - same, model=name, outcome="different")
        metrics.observe("crystallite_trial_deviation", float(deviation.max(initial=0.0)), model=name)
        for system, seconds in zip(("original", "reorganized"), compared.seconds, strict=True):
            metrics.observe("crystallite_trial_seconds", seconds, model=name, system=system)

    def _decide_if_enough(self) -> None:
        if self._all is None or self.compared + self.failed < self._requests or not self.compared:
            return
        comparison, self._all = self._all.done(), None
        outcomes = list(self._rules.judge(comparison, None, ()))
        if self.failed:
            text = f"{self.failed} requests were answered by one system only, the last: {self.failure:.200}"
            outcomes.append(Outcome("failures", 0.0, float(self.failed), "violated", text))
        original, reorganized = (median(times) for times in self._times)
        latency = (Latency(round(comparison.samples / self.compared), original, reorganized),)
        costs = self._costs["parameters"], self._costs["macs"]
        self.verdict = Verdict(self._rules, tuple(outcomes), comparison, None, *costs, latency)
        self._decided(self.verdict)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
