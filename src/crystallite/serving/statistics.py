"""`Statistics`: what one version of a model has answered, in the form of Triton's statistics extension."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Statistics"]


@dataclass
class _Duration:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        self.count += times
        self.seconds += seconds

    def to_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(self.seconds * 1e9)}


@dataclass
class Statistics:
    """Numbers of requests and batches, and how long they took.

    >>> statistics = Statistics()
    >>> statistics.batch(samples=3, seconds=0.25)
    >>> statistics.to_json("small", "1")["batch_stats"][0]["compute_infer"]
    {'count': 1, 'ns': 250000000}
    """

    success: _Duration = field(default_factory=_Duration)
    fail: _Duration = field(default_factory=_Duration)
    queue: _Duration = field(default_factory=_Duration)
    compute: _Duration = field(default_factory=_Duration)
    batches: defaultdict[int, _Duration] = field(default_factory=lambda: defaultdict(_Duration))  # by samples
    samples: int = 0  # answered
    last: float = 0.0  # seconds since 1970

    def request(
        self, status: int, seconds: float, samples: int | None, queue: float | None, compute: float | None
    ) -> None:
        """One that was answered or refused, and the seconds that it took, waited and was computed."""
        (self.success if status == 200 else self.fail).add(seconds)
        if status == 200:
            self.samples += samples or 0
            self.queue.add(queue or 0.0)
            self.compute.add(compute or 0.0)

    def batch(self, samples: int, seconds: float) -> None:
        """Samples that were computed together."""
        self.batches[samples].add(seconds)
        self.last = time.time()

    def to_json(self, name: str, version: str) -> dict[str, Any]:
        """As Triton says it; transforming is part of computing here, and nothing is cached."""
        nothing = _Duration().to_json()
        return {
            "name": name,
            "version": version,
            "last_inference": round(self.last * 1000),
            "inference_count": self.samples,
            "execution_count": sum(batch.count for batch in self.batches.values()),
            "inference_stats": {
                "success": self.success.to_json(), "fail": self.fail.to_json(), "queue": self.queue.to_json(),
                "compute_input": nothing, "compute_infer": self.compute.to_json(), "compute_output": nothing,
                "cache_hit": nothing, "cache_miss": nothing,
            },
            "batch_stats": [
                {"batch_size": samples, "compute_input": nothing, "compute_infer": batch.to_json(),
                 "compute_output": nothing}
                for samples, batch in sorted(self.batches.items())
            ],
            "memory_usage": [],
            "response_stats": {},
        }  # fmt: skip
