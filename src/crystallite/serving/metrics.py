"""`Metrics`: counters and histograms, as Prometheus reads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

__all__ = ["Metrics"]

Labels = tuple[tuple[str, str], ...]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_COUNTERS = {
    "crystallite_requests_total": "Requests by model and HTTP status",
    "crystallite_retries_total": "Calls of a piece that were repeated",
    "crystallite_reloads_total": "Reloads of a model, by outcome",
}
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "crystallite_request_seconds": ("From the arrival of a request to its answer, transform tier", _SECONDS),
    "crystallite_queue_seconds": ("From the arrival of a request to the start of its batch, transform tier", _SECONDS),
    "crystallite_batch_samples": ("Samples that were computed together", _SAMPLES),
    "crystallite_piece_seconds": ("Calls of a piece, inference tier", _SECONDS),
}


class Metrics:
    """Numbers about what a service does; for one thread.

    >>> metrics = Metrics()
    >>> metrics.count("crystallite_requests_total", model="small", status="200")
    >>> print(metrics.text({}))
    # HELP crystallite_requests_total Requests by model and HTTP status
    # TYPE crystallite_requests_total counter
    crystallite_requests_total{model="small",status="200"} 1
    <BLANKLINE>
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, Labels], int] = {}
        self._buckets: dict[tuple[str, Labels], list[int]] = {}
        self._sums: dict[tuple[str, Labels], float] = {}

    def count(self, name: str, **labels: str) -> None:
        """One more."""
        key = name, tuple(labels.items())
        self._counts[key] = self._counts.get(key, 0) + 1

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a histogram."""
        key, (_, bounds) = (name, tuple(labels.items())), _HISTOGRAMS[name]
        self._buckets.setdefault(key, [0] * (len(bounds) + 1))[bisect_left(bounds, value)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value

    def mean(self, name: str) -> float:
        """The mean of all values of a histogram; NaN if there are none.

        >>> metrics = Metrics()
        >>> for samples in (1, 3):
        ...     metrics.observe("crystallite_batch_samples", samples, model="small")
        >>> metrics.mean("crystallite_batch_samples")
        2.0
        """
        values = sum(sum(buckets) for (own, _), buckets in self._buckets.items() if own == name)
        total = sum(found for (own, _), found in self._sums.items() if own == name)
        return total / values if values else math.nan

    def text(self, queues: Mapping[str, int], replicas: Mapping[tuple[str, str], int] | None = None) -> str:
        """Everything in the text format of Prometheus.

        `queues` are the requests that wait for each model now, `replicas` those of each model's pieces.
        """
        lines = []
        for name, about in _COUNTERS.items():
            rows = [f"{name}{_shown(labels)} {n}" for (own, labels), n in self._counts.items() if own == name]
            lines += _described(name, about, "counter", rows)
        for name, (about, bounds) in _HISTOGRAMS.items():
            rows = []
            for labels, buckets in ((labels, found) for (own, labels), found in self._buckets.items() if own == name):
                upto = [*accumulate(buckets)]
                for bound, n in zip([*map(str, bounds), "+Inf"], upto, strict=True):
                    rows.append(f"{name}_bucket{_shown((*labels, ('le', bound)))} {n}")
                rows += [f"{name}_sum{_shown(labels)} {self._sums[name, labels]}"]
                rows += [f"{name}_count{_shown(labels)} {upto[-1]}"]
            lines += _described(name, about, "histogram", rows)
        rows = [f"crystallite_queue_requests{_shown((('model', name),))} {n}" for name, n in queues.items()]
        lines += _described("crystallite_queue_requests", "Requests that wait", "gauge", rows)
        counted = {(("model", name), ("piece", piece)): n for (name, piece), n in (replicas or {}).items()}
        rows = [f"crystallite_replicas{_shown(labels)} {n}" for labels, n in counted.items()]
        lines += _described("crystallite_replicas", "Replicas that answer, inference tier", "gauge", rows)
        return "\n".join([*lines, ""])


def _described(name: str, about: str, kind: str, rows: list[str]) -> list[str]:
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *rows] if rows else []


def _shown(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels) + "}"
