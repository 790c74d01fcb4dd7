"""`crystallite serve`."""

from __future__ import annotations

import argparse
import gc
import json
import queue
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.models.opening import open_model
from crystallite.serving.limits import Limits
from crystallite.serving.listening import Listener
from crystallite.serving.logs import log_json
from crystallite.serving.model import name_of
from crystallite.serving.plan import plan
from crystallite.serving.ray_service import RayService
from crystallite.serving.service import Service

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  crystallite serve small --plan
  crystallite serve small --port 8000 --grpc-port 8001
  crystallite serve fraud=models/fraud prices=models/prices --host 10.0.0.5 --token-file token \\
    --tls-cert server.pem --tls-key server.key --log json

Clients of the Open Inference Protocol v2 work unchanged, such as tritonclient. SIGTERM answers what was accepted and
ends; SIGHUP, or POST /v2/repository/models/NAME/load, opens the folders again (point a link at the new version) and
keeps the old version where the new one may not be served. Metrics for Prometheus: /metrics.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "serve",
        help="a saved model as a network service",
        description="Serve saved models: one tier collects requests and deals them out, the other computes.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits = Limits()
    parser.add_argument("models", nargs="+", metavar="[NAME=]FOLDER", help="what reorganize wrote")
    parser.add_argument("--plan", action="store_true", help="print which pieces would be services, and end")
    parser.add_argument("--json", action="store_true", help="the plan as JSON")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples to plan for (default: 1)")
    parser.add_argument("--original", metavar="MODEL", help="package.module:factory, for a model with its own code")
    parser.add_argument("--shape", nargs="+", type=int, metavar="N", help="of a sample, where no first layer says it")
    parser.add_argument(
        "--engine", choices=["local", "ray"], default="local", help="this process, or a Ray cluster (default: local)"
    )
    parser.add_argument("--unvalidated", action="store_true", help="serve without a verdict that the model passed")
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1; others need a token)")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    parser.add_argument("--grpc-port", type=int, help="answer gRPC too, on this port; 0 for a free one")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate and its chain, PEM; both protocols")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    parser.add_argument("--log", choices=["json"], help="a line for every request, on standard error")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that requests must carry")
    parser.add_argument(
        "--max-batch", type=int, default=limits.max_batch, help=f"samples (default: {limits.max_batch})"
    )
    parser.add_argument(
        "--max-wait", type=float, default=limits.max_wait, help="seconds for a fuller batch (default: 0)"
    )
    parser.add_argument(
        "--max-queue", type=int, default=limits.max_queue, help=f"requests (default: {limits.max_queue})"
    )
    parser.add_argument("--timeout", type=float, default=limits.timeout, help=f"seconds (default: {limits.timeout:g})")
    parser.add_argument("--max-bytes", type=int, default=limits.max_bytes, help="of a request (default: 64 MiB)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
        plans = {name: plan(path, into=into, batch=options.batch) for name, path in paths.items()}
        if options.json:
            print(json.dumps({name: made.to_json() for name, made in plans.items()}, indent=1))
        else:
            print("\n\n".join(f"{name}\n{made!r}" for name, made in plans.items()))
        return 0
    limits = Limits(options.max_batch, options.max_wait, options.max_queue, options.timeout, options.max_bytes)
    shape = None if options.shape is None else tuple(options.shape)
    token = None if options.token_file is None else options.token_file.read_text().strip()
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidOption("--tls-cert and --tls-key: expected both or neither")
    tls = None if options.tls_cert is None else (options.tls_cert, options.tls_key)
    if options.engine == "ray" and (tls is not None or options.grpc_port is not None or options.log):
        speaks = "Ray's server speaks HTTP without TLS and keeps logs of its own"
        raise InvalidOption(f"--engine ray: {speaks}; put a proxy in front of it")
    if options.log:
        log_json()
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    kinds = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    previous = {kind: signal.signal(kind, lambda number, _: signals.put(number)) for kind in kinds}
    try:
        given = {"into": into, "shape": shape, "batch": options.batch, "unvalidated": options.unvalidated}
        address = options.host, options.port, token
        with ExitStack() as stack:
            service: Service | RayService
            if options.engine == "ray":
                service = stack.enter_context(RayService.load(paths, limits=limits, address=address, **given))
                url, grpc_target = service.url, None
            else:
                service = stack.enter_context(Service.load(paths, limits=limits, **given))
                listener = stack.enter_context(Listener(service, *address, grpc_port=options.grpc_port, tls=tls))
                url, grpc_target = listener.url, listener.grpc_target
            for name, model in service.models.items():
                print(f"{url}/v2/models/{name} {len(model.plan.pieces)} pieces, version {model.version}")
            if grpc_target is not None:
                print(f"grpc://{grpc_target}")
            sys.stdout.flush()
            gc.collect()
            gc.freeze()  # a collection of all that torch brings takes a tenth of a second, in which nobody is answered
            while signals.get() not in (signal.SIGTERM, signal.SIGINT):
                _reload(service)
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
    return 0


def _reload(service: Service | RayService) -> None:
    """New versions of all models; one that may not be served leaves the old one in its place."""
    for name in service.models:
        try:
            print(f"{name}: version {service.reload(name).version}", flush=True)
        except CrystalliteError as error:
            print(f"crystallite: {name} stays as it is: {error}", file=sys.stderr)
