"""The layers of a checkpoint spread over a Ray cluster, one task each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from crystallite.analysis.matrix import MatrixAnalysis, Options, analyze_layer
from crystallite.core.errors import CrystalliteError
from crystallite.core.ray_cluster import connected
from crystallite.weights.checkpoint import open_checkpoint
from crystallite.weights.layers import recognise

__all__ = ["analyze_layers"]

_CPUS_PER_TASK = 1  # layers are plenty, and one that fills a CPU waits for no other


def analyze_layers(source: str, names: list[str], options: Options) -> Iterator[MatrixAnalysis]:
    """The records of the named layers, as they are finished; of several that fail, the error of the first in order.

    On the cluster of `core/ray_cluster.py`. Every node must see the same checkpoint under the same path; each task
    opens it and maps the one tensor it needs.
    """
    with connected() as ray:
        task = ray.remote(num_cpus=_CPUS_PER_TASK)(_analyze_named_layer)
        waiting = [task.remote(os.path.abspath(source), name, options) for name in names]
        position = {reference: i for i, reference in enumerate(waiting)}
        first_error: CrystalliteError | None = None
        try:
            while waiting:
                (done,), waiting = ray.wait(waiting)
                result = ray.get(done)
                if isinstance(result, CrystalliteError):
                    # Layers before this one would have come first without Ray, and may fail as well.
                    first_error = result
                    _cancel(ray, [other for other in waiting if position[other] > position[done]])
                    waiting = [other for other in waiting if position[other] < position[done]]
                else:
                    yield result
        finally:
            _cancel(ray, waiting)
        if first_error is not None:
            raise first_error


def _analyze_named_layer(source: str, name: str, options: Options) -> MatrixAnalysis | CrystalliteError:
    """Runs on a node of the cluster. Our errors are results: Ray would wrap them, and log those nobody asks for."""
    torch.set_num_threads(_CPUS_PER_TASK)
    try:
        with open_checkpoint(source) as checkpoint:
            layer = next(layer for layer in recognise(checkpoint) if layer.name == name)
            return analyze_layer(checkpoint, layer, options).row
    except CrystalliteError as error:
        return error.with_traceback(None)


def _cancel(ray: Any, references: list[Any]) -> None:
    for reference in references:
        ray.cancel(reference)
