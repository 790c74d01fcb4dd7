"""`crystallite bench --serve`: how many requests a second a saved model answers, beside its dense form."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from crystallite.cli.running import print_result
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.tables import text_table
from crystallite.models.artifact import load as load_artifact
from crystallite.models.opening import open_model
from crystallite.reorganization.restore import restore
from crystallite.serving import load as load_program
from crystallite.serving.engine import LocalEngine
from crystallite.serving.interface import NamedModel, computed
from crystallite.serving.limits import Limits
from crystallite.serving.listening import Listener
from crystallite.serving.load import Ask, Load
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source
from crystallite.serving.protocol import HEADER_LENGTH
from crystallite.serving.service import Service
from crystallite.serving.signature import DATATYPES, INPUT, Tensors
from crystallite.serving.tensor_data import written

__all__ = ["best_quantile", "compared", "forward_seconds", "loaded", "row", "run", "service_of"]


def run(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Print what the servers answered; 0."""
    options.batch = 1 if options.batch is None else options.batch
    for name in ("clients", "batch", "seconds", "rounds"):
        if not 0 < getattr(options, name) < 1e5:
            raise InvalidOption(f"--{name}: expected more than 0, got {getattr(options, name)}")
    limits = Limits(max_batch=given["max_batch"]) if "max_batch" in given else Limits()
    shape = tuple(given["shape"]) if "shape" in given else None
    into = None if options.original is None else open_model(options.original, None)
    models = {"reorganized": load_artifact(options.serve, into).eval()}
    if options.dense:
        models["dense"] = restore(models["reorganized"]).eval()
    with ExitStack() as stack:
        services = {
            name: stack.enter_context(
                Service.load({name: options.serve}, into=into, shape=shape, unvalidated=True, limits=limits)
                if name == "reorganized"
                else service_of(model, name, limits, shape)
            )
            for name, model in models.items()
        }
        loads = compared(services, options.clients, options.batch, options.seconds, options.rounds)
        alone = compared(services, 1, options.batch, options.seconds / 3, options.rounds)
        rows = [
            {
                **row(name, loads[name], services[name]),
                "one client p50 ms": 1e3 * best_quantile(alone[name], 0.5),
                "bare forward ms": 1e3 * forward_seconds(model, sample(services[name], options.batch)),
            }
            for name, model in models.items()
        ]
    load = f"{options.clients} clients × batch {options.batch}, {options.seconds:g} s"
    title = f"{load}, the best of {options.rounds} rounds; HTTP with binary tensors"
    shown = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in found.values()] for found in rows]
    print_result("\n".join([title, *text_table([list(rows[0]), *shown])]), rows, options)
    return 0


def service_of(
    model: nn.Module, name: str, limits: Limits | None = None, shape: tuple[int, ...] | None = None
) -> Service:
    """A service of a model as it is, for comparison: behind the same queue, uncut and without a verdict."""
    limits = limits or Limits()

    def opened(name: str, metrics: Metrics) -> ServedModel:
        cut = CutModel.of(name, "0", Path(), model, Source(Path(), shape=shape))
        return ServedModel.of(cut, LocalEngine(cut.network.modules), limits, metrics)

    return Service([name], opened, limits, lambda: None)


def compared(
    services: Mapping[str, Service], clients: int, batch: int, seconds: float, rounds: int
) -> dict[str, list[Load]]:
    """What each service answers under the same load, in some rounds in which they take turns."""
    found: dict[str, list[Load]] = {name: [] for name in services}
    with ExitStack() as stack:
        asks = {}
        for name, service in services.items():
            listener = stack.enter_context(Listener(service, port=0))
            asks[name] = _ask(listener, service, clients, batch, seconds / rounds)
        for _ in range(rounds):
            for name, ask in asks.items():
                found[name].append(loaded(ask))
    return found


def row(name: str, loads: Sequence[Load], service: Service) -> dict[str, Any]:
    """The numbers of a service in its best rounds: whatever else runs on the machine only takes away from them."""
    return {
        "server": name,
        "requests/s": max(load.per_second for load in loads),
        "p50 ms": 1e3 * best_quantile(loads, 0.5),
        "p99 ms": 1e3 * best_quantile(loads, 0.99),
        "samples/batch": service.metrics.mean("crystallite_batch_samples"),
        "refused": sum(sum(load.refused.values()) for load in loads),
    }


def best_quantile(loads: Sequence[Load], share: float) -> float:
    """The seconds within which a share of the answers came, in the best round."""
    return min(load.quantile(share) for load in loads)


def forward_seconds(model: nn.Module, given: Tensors, seconds: float = 1.0) -> float:
    """The median of plain calls of the model for a while."""
    times: list[float] = []
    called = NamedModel(model, (INPUT,))
    while sum(times) < seconds or len(times) < 5:
        started = time.perf_counter()
        computed(called, given)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def sample(service: Service, batch: int) -> dict[str, Tensor]:
    """Random samples that the service's model takes."""
    (model,) = service.models.values()
    return model.example.made(batch)


def _ask(listener: Listener, service: Service, clients: int, batch: int, seconds: float) -> Ask:
    (model,), given = service.models.values(), sample(service, batch)
    raw = {name: written(x).raw() for name, x in given.items()}
    tensors = [
        {
            "name": name, "datatype": DATATYPES[x.dtype], "shape": list(x.shape),
            "parameters": {"binary_data_size": len(raw[name])},
        }
        for name, x in given.items()
    ]  # fmt: skip
    header = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    head = f"POST /v2/models/{model.name}/infer HTTP/1.1\r\n{HEADER_LENGTH}: {len(header)}"
    host, _, port = listener.url.removeprefix("http://").rpartition(":")
    body = header + b"".join(raw.values())
    return Ask(host, int(port), [(head, body.hex())], clients, seconds, warmup=min(0.5, seconds))


def loaded(ask: Ask) -> Load:
    """The load, from a process of its own."""
    words = [sys.executable, "-I", load_program.__file__]
    limit = ask.warmup + ask.seconds + 120
    done = subprocess.run(words, input=json.dumps(asdict(ask)), capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise CrystalliteError(f"the load generator failed: {done.stderr[-300:]}")
    load = Load(**json.loads(done.stdout))
    if not load.latencies:
        raise CrystalliteError(f"the server answered no request: {load.refused}")
    return load
