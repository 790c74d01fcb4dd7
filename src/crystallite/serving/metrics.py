"""`Metrics`: counters and histograms of a service, as Prometheus reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from crystallite.core.errors import InvalidOption

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SHARES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_COUNTERS = {  # help and labels
    "crystallite_requests_total": ("Requests by model and HTTP status", ("model", "status")),
    "crystallite_retries_total": ("Calls of a piece that were repeated", ("model", "piece")),
    "crystallite_reloads_total": ("Reloads of a model, by outcome", ("model", "outcome")),
    "crystallite_trial_requests_total": (
        "Requests of a trial, by what became of them",
        ("model", "outcome"),
    ),
    "crystallite_trial_decisions_total": ("Samples on which both systems decide alike or not", ("model", "outcome")),
    "crystallite_closed_connections_total": ("Connections over HTTP that were closed early, by reason", ("reason",)),
    "crystallite_inputs_total": ("Inputs that were compared with those that a fitted model knows", ("model", "layer")),
    "crystallite_unfamiliar_inputs_total": (
        "Of these, unlike all but 1 % of what it was fitted on",
        ("model", "layer"),
    ),
}
_HISTOGRAMS = {  # help, labels and the upper bounds of the buckets
    "crystallite_request_seconds": ("From the arrival of a request to its answer", ("model",), _SECONDS),
    "crystallite_queue_seconds": ("From the arrival of a request to the start of its batch", ("model",), _SECONDS),
    "crystallite_batch_samples": ("Samples that were computed together", ("model",), _SAMPLES),
    "crystallite_trial_deviation": ("Relative deviation of a request's worst sample", ("model",), _SHARES),
    "crystallite_trial_seconds": ("Batches of both systems of a trial", ("model", "system"), _SECONDS),
    "crystallite_piece_seconds": ("Calls of a piece, inference tier", ("model", "piece"), _SECONDS),
}


class Metrics:
    """Numbers about what one service does, in a registry of its own.

    >>> metrics = Metrics()
    >>> metrics.count("crystallite_requests_total", model="small", status="200")
    >>> [line for line in metrics.text({}).splitlines() if "small" in line and "created" not in line]
    ['crystallite_requests_total{model="small",status="200"} 1.0']
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise InvalidOption("a service counts what it does: pip install 'crystallite[serve]'") from None
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, about, labels, registry=self._registry) for name, (about, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, about, labels, buckets=bounds, registry=self._registry)
            for name, (about, labels, bounds) in _HISTOGRAMS.items()
        }
        self._queues = Gauge("crystallite_queue_requests", "Requests that wait", ("model",), registry=self._registry)
        about, labels = "Replicas that answer, inference tier", ("model", "piece")
        self._replicas = Gauge("crystallite_replicas", about, labels, registry=self._registry)

    def count(self, name: str, times: int = 1, **labels: str) -> None:
        """One more, or several."""
        self._counters[name].labels(**labels).inc(times)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One more value of a histogram."""
        self._histograms[name].labels(**labels).observe(value)

    def mean(self, name: str) -> float:
        """The mean of all values of a histogram; NaN if there are none.

        >>> metrics = Metrics()
        >>> for samples in (1, 3):
        ...     metrics.observe("crystallite_batch_samples", samples, model="small")
        >>> metrics.mean("crystallite_batch_samples")
        2.0
        """
        found = [sample for metric in self._histograms[name].collect() for sample in metric.samples]
        total, values = (sum(s.value for s in found if s.name == f"{name}_{part}") for part in ("sum", "count"))
        return total / values if values else math.nan

    def text(self, queues: Mapping[str, int], replicas: Mapping[tuple[str, str], int] | None = None) -> str:
        """Everything in the text format of Prometheus.

        `queues` are the requests that wait for each model now, `replicas` those of each model's pieces.
        """
        from prometheus_client import generate_latest

        self._queues.clear()
        self._replicas.clear()
        for name, waiting in queues.items():
            self._queues.labels(name).set(waiting)
        for (name, piece), count in (replicas or {}).items():
            self._replicas.labels(name, piece).set(count)
        return generate_latest(self._registry).decode()
