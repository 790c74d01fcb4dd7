"""`crystallite serve`."""

from __future__ import annotations

import argparse
import gc
import queue
import signal
import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from crystallite.cli.running import print_result
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.models.opening import open_model
from crystallite.serving.limits import Limits
from crystallite.serving.listening import Listener
from crystallite.serving.live_trial import TrialOptions
from crystallite.serving.logs import log_json
from crystallite.serving.model import name_of
from crystallite.serving.plan import plan
from crystallite.serving.ray_service import RayService
from crystallite.serving.service import Service
from crystallite.serving.usage import start_lines
from crystallite.validation.rules import Rules

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Serve until SIGTERM or SIGINT, or print the plan; 0."""
    paths: dict[str, Path] = {}
    for text in options.models:
        name, equals, folder = text.rpartition("=")
        name = name if equals else name_of(folder)
        if name in paths:
            raise InvalidOption(f"two models are called {name}; give them names: NAME=FOLDER")
        paths[name] = Path(folder)
    into = None if options.original is None else open_model(options.original, None)
    if options.plan:
        plans = {name: plan(path, into=into, **given) for name, path in paths.items()}
        text = "\n\n".join(f"{name}\n{made!r}" for name, made in plans.items())
        print_result(text, {name: made.to_json() for name, made in plans.items()}, options)
        return 0
    limits = Limits(**{field.name: given.pop(field.name) for field in fields(Limits) if field.name in given})
    listening = {name: given.pop(name) for name in ("host", "port", "grpc_port") if name in given}
    engine = given.pop("engine", "local")
    if "shape" in given:
        given["shape"] = tuple(given["shape"])
    token = None if options.token_file is None else options.token_file.read_text().strip()
    tls = None if options.tls_cert is None else (options.tls_cert, options.tls_key)
    hosts = given.pop("allow_hosts", ())
    trial = _trial(options, given)
    if trial is not None and engine == "ray":
        raise InvalidOption("--trial: both systems run in one process; leave out --engine ray")
    if engine == "ray" and (tls is not None or "grpc_port" in listening):
        raise InvalidOption("--engine ray: Ray's server speaks HTTP without TLS; put a proxy in front of it")
    if options.log:
        log_json()
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    kinds = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    previous = {kind: signal.signal(kind, lambda number, _: signals.put(number)) for kind in kinds}
    try:
        with ExitStack() as stack:
            service: Service | RayService
            if engine == "ray":
                address = listening.get("host", "127.0.0.1"), listening.get("port", 8000), token
                more = {"allow_hosts": hosts, "log": options.log is not None, **given}
                service = stack.enter_context(RayService.load(paths, into=into, limits=limits, address=address, **more))
                url, grpc_target = service.url, None
            else:
                service = stack.enter_context(Service.load(paths, into=into, limits=limits, trial=trial, **given))
                listener = stack.enter_context(Listener(service, token=token, tls=tls, allow_hosts=hosts, **listening))
                url, grpc_target = listener.url, listener.grpc_target
            for name, model in service.models.items():
                count = len(model.plan.pieces)
                print(f"{url}/v2/models/{name} {count} piece{'s' * (count != 1)}, version {model.version}")
            if grpc_target is not None:
                print(f"grpc://{grpc_target}")
            for name, model in service.models.items():
                print(f"{name}:", *start_lines(model, url, token is not None), sep="\n")
            print(f"try it: {url}/docs, metrics: {url}/metrics, description: {url}/openapi.json")
            print("ready", flush=True)
            gc.collect()
            gc.freeze()  # a collection of all that torch brings takes a tenth of a second, in which nobody is answered
            while _next(signals) not in (signal.SIGTERM, signal.SIGINT):
                _reload(service)
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
    return 0


def _trial(options: argparse.Namespace, given: dict[str, Any]) -> TrialOptions | None:
    """What is tried, by which rules; takes their options out of those that were given."""
    limits = {field.name: given.pop(field.name) for field in fields(Rules) if field.name in given}
    more = {name: given.pop(name) for name in ("requests", "attach") if name in given}
    if options.trial is None:
        return None
    return TrialOptions(open_model(options.trial, None).eval(), rules=Rules(max_drop=None, **limits), **more)


def _next(signals: queue.SimpleQueue[int]) -> int:
    """The next signal that asks for something new: several that ask for a reload are one."""
    kind = signals.get()
    while kind not in (signal.SIGTERM, signal.SIGINT) and not signals.empty():
        kind = signals.get()
    return kind


def _reload(service: Service | RayService) -> None:
    """New versions of all models; one that may not be served leaves the old one in its place."""
    for name in service.models:
        try:
            print(f"{name}: version {service.reload(name).version}", flush=True)
        except CrystalliteError as error:
            print(f"crystallite: {name} stays as it is: {error}", file=sys.stderr)
