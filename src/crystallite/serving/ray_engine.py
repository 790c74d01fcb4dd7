"""Pieces as Ray Serve deployments: each in processes of its own, on any node of a cluster, as many as its load needs.

Ray listens on every network interface and runs what it is sent: keep clusters on a private network, with token
authentication, which is asked for here unless `RAY_AUTH_MODE` says otherwise.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.artifact import without_weights
from crystallite.models.manifest import source_sha256
from crystallite.serving.engine import Unreachable
from crystallite.serving.interface import computed
from crystallite.serving.limits import Limits
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source
from crystallite.serving.piece import Piece, open_piece
from crystallite.serving.signature import INPUT, Tensors

__all__ = ["LOGGING", "RayEngine", "Scaling", "connect", "deploy_pieces", "planned_for_ray", "ray_opener"]

LOGGING = {"enable_access_log": False, "log_level": "WARNING"}  # a line for each call of each piece says little
_HOPS = 50
_CLAIMED = 0.45  # of the cores, by one version of a model with all its replicas
_UNDER_WAY = 2  # calls that a replica holds: one is computed while the next one travels


@dataclass(frozen=True)
class Scaling:
    """How fast replicas follow the load, in seconds, and how many processes run the transform tier.

    A piece is given replicas when more than one call for each of them was under way for some time, and loses them when
    fewer were.
    """

    window: float = 15.0  # over which calls are counted
    up: float = 10.0  # that the load must last before replicas are started
    down: float = 60.0  # and before they are stopped
    transforms: int = 2


class RayEngine:
    """Calls pieces that were deployed by `deploy_pieces`, from any process of the cluster."""

    def __init__(self, application: str, pieces: tuple[Piece, ...], limits: Limits, close: Callable[[], None]) -> None:
        from ray import exceptions, serve
        from ray.serve.exceptions import RayServeException

        self._application = application
        self._handles = {piece.name: serve.get_deployment_handle(piece.name, application) for piece in pieces}
        self._lost = (
            exceptions.RayActorError,
            exceptions.RaySystemError,
            exceptions.ObjectLostError,
            RayServeException,
        )
        self._raised = exceptions.RayTaskError
        self._patience = limits.timeout / limits.attempts
        self._close = close
        self.batches = max(piece.most for piece in pieces)

    async def run(self, piece: str, given: Tensors) -> Tensors:
        """The piece's answer. A replica that takes longer than its share of the time a request has counts as lost."""
        try:
            async with asyncio.timeout(self._patience):
                return _unpacked(await self._handles[piece].remote(_packed(given)))
        except TimeoutError:
            raise Unreachable(f"no answer within {self._patience:.3g} s") from None
        except self._raised as error:  # its text is the whole traceback of another machine
            if not isinstance(error.cause, self._lost):
                raise error.cause from None
            raise Unreachable(type(error.cause).__name__) from None
        except self._lost as error:
            raise Unreachable(type(error).__name__) from None

    async def replicas(self) -> Mapping[str, int]:
        from ray import serve

        found = (await asyncio.to_thread(serve.status)).applications[self._application].deployments
        return {piece: int(found[piece].replica_states.get("RUNNING", 0)) for piece in self._handles}

    async def close(self) -> None:
        await asyncio.to_thread(self._close)


class PieceReplica:
    """A Ray Serve replica of one piece; it reads nothing else of the model."""

    def __init__(
        self, path: Path, piece: Piece, into: nn.Module | None, sha256: str, inputs: Sequence[Tensors], *_others: object
    ) -> None:
        torch.set_num_threads(1)  # more replicas, not more threads, take more cores
        self._module = open_piece(path, piece, into)
        if source_sha256(self._module) != sha256:
            raise CheckpointError(f"{path}: piece {piece.name} is not the one that was planned with; deploy it again")
        self._given = inputs[0]
        for given in reversed(inputs):  # few samples and many compile different kernels
            self._answer = computed(self._module, given)

    def __call__(self, given: Packed) -> Packed:
        return _packed(computed(self._module, _unpacked(given)))

    def check_health(self) -> None:
        """Raise if the piece no longer computes what it did at first: Ray then replaces the replica."""
        for name, y in computed(self._module, self._given).items():
            if not torch.allclose(y, self._answer[name], rtol=1e-2, atol=1e-3, equal_nan=True):
                raise RuntimeError("the piece computes something else than when it was loaded")

    def process(self) -> int:
        """The id of the replica's process."""
        return os.getpid()


class Nothing:
    """A deployment that does nothing, to measure the cost of a call."""

    def __call__(self, given: Packed) -> Packed:
        return given


# arrays travel faster than tensors; bfloat16 as the integers that NumPy has for it
Packed = dict[str, tuple[np.ndarray, str]]


def _packed(given: Tensors) -> Packed:
    return {name: _packed_tensor(x.detach().contiguous()) for name, x in given.items()}


def _packed_tensor(x: Tensor) -> tuple[np.ndarray, str]:
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy(), str(x.dtype)


def _unpacked(packed: Packed) -> Tensors:
    found = {}
    for name, (array, dtype) in packed.items():
        x = torch.from_numpy(np.array(array))  # what came may not be written to, which torch has no word for
        found[name] = x.view(torch.bfloat16) if dtype == "torch.bfloat16" else x
    return found


def connect(address: tuple[str, int] | None = None, everywhere: bool = False) -> Callable[[], None]:
    """Join the cluster that `RAY_ADDRESS` names or that runs here, or start one; returns what undoes it.

    `address`: host and port of Ray's own HTTP server; None: there is none. It runs on the head node, or `everywhere`:
    on every node with a replica.
    """
    if "ray" not in sys.modules:  # which reads them when it is imported
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
        from ray import serve
    except ImportError:
        raise InvalidOption("engine=\"ray\" needs Ray Serve: pip install 'crystallite[ray]'") from None
    joined = ray.is_initialized()
    if not joined:
        try:
            with _handlers_kept():
                ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ray.exceptions.AuthenticationError) as error:
            hint = "is it there, and is its token known here (RAY_AUTH_TOKEN)?"
            raise InvalidOption(f"cannot join the Ray cluster; {hint} {error!s:.200}") from None
    if address is None:
        serve.start(proxy_location="Disabled")
    else:
        serve.start("EveryNode" if everywhere else "HeadOnly", {"host": address[0], "port": address[1]})

    def undo() -> None:
        if not joined:
            ray.shutdown()

    return undo


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes over SIGTERM, which is for whoever runs the service to answer."""
    if threading.current_thread() is not threading.main_thread():  # where nobody may
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def planned_for_ray(sources: Mapping[str, Source]) -> dict[str, Source]:
    """The sources with what a hop costs on this cluster, and as many workers as it has, where they do not say it."""
    import ray

    measured: Machine | None = None
    if any(source.machine is None for source in sources.values()):
        here = measure_machine()
        measured = Machine(_hop(), here.macs_per_second, here.bytes_per_second)
    cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return {
        name: replace(source, machine=source.machine or measured, workers=source.workers or cores)
        for name, source in sources.items()
    }


def _hop() -> float:
    """Seconds of a call to another process of the cluster and back: the median of some."""
    from ray import serve

    name = f"crystallite-hop-{uuid.uuid4().hex[:8]}"
    deployment = serve.deployment(Nothing).options(ray_actor_options={"num_cpus": 0})
    handle = serve.run(deployment.bind(), name=name, route_prefix=None)
    given, times = _packed({INPUT: torch.zeros(1, 1024)}), []
    for _ in range(_HOPS):
        started = time.perf_counter()
        handle.remote(given).result()
        times.append(time.perf_counter() - started)
    serve.delete(name)
    return statistics.median(times)


def deploy_pieces(cut: CutModel, into: nn.Module | None, scaling: Scaling, limits: Limits, models: int) -> str:
    """Deploy the pieces of a model as one application of Ray Serve, and return its name when all of them answer.

    `models`: how many share the cluster. Replicas claim so little of it that all versions of all of them have room,
    the new one of a model beside the old one.
    """
    import ray
    from ray import serve

    pieces = cut.plan.pieces
    room = _CLAIMED * ray.cluster_resources().get("CPU", 1) / models
    share = min(1.0, room / sum(piece.most for piece in pieces))
    hollow = None if into is None else without_weights(into)
    bound: list[Any] = []
    for piece in pieces:
        deployment = serve.deployment(PieceReplica).options(
            name=piece.name,
            autoscaling_config={
                "min_replicas": piece.least,
                "max_replicas": piece.most,
                "target_ongoing_requests": 1,
                "look_back_period_s": scaling.window,
                "upscale_delay_s": scaling.up,
                "downscale_delay_s": scaling.down,
            },
            max_ongoing_requests=_UNDER_WAY,
            health_check_period_s=5,
            health_check_timeout_s=limits.timeout,
            ray_actor_options={"num_cpus": math.floor(share * 1000) / 1000},
        )
        sha256 = source_sha256(cut.network.modules[piece.name])
        # an application has one root, which holds on to all the others
        others = bound if piece is pieces[-1] else []
        bound.append(deployment.bind(cut.path, piece, hollow, sha256, cut.inputs[piece.name], *others))
    name = f"{cut.name}-{cut.version}-{uuid.uuid4().hex[:8]}"
    try:
        serve.run(bound[-1], name=name, route_prefix=None, logging_config=LOGGING)
    except RuntimeError as error:
        reason = _reason(name) or str(error)
        with suppress(Exception):
            serve.delete(name)
        raise InvalidOption(f"not all pieces of {cut.name} came up on the cluster: {reason:.300}") from None
    return name


def _reason(application: str) -> str:
    """The last line of what a deployment that failed says, which is mostly the traceback of a replica."""
    from ray import serve

    with suppress(Exception):
        for deployment in serve.status().applications[application].deployments.values():
            for line in reversed(deployment.message.splitlines()):
                if line.strip():
                    return line.strip()
    return ""


def ray_opener(
    sources: Mapping[str, Source], limits: Limits, scaling: Scaling | None = None
) -> tuple[Callable[[str, Metrics], ServedModel], Limits, Callable[[], None]]:
    """What a `Service` opens models with whose pieces run on Ray and whose transform tier runs in this process."""
    undo = connect()
    from ray import serve

    try:
        sources = planned_for_ray(sources)
    except BaseException:
        undo()
        raise

    def opened(name: str, metrics: Metrics) -> ServedModel:
        cut = CutModel.open(name, sources[name])
        application = deploy_pieces(cut, sources[name].into, scaling or Scaling(), limits, len(sources))
        engine = RayEngine(application, cut.plan.pieces, limits, lambda: serve.delete(application))
        return ServedModel.of(cut.without_pieces(), engine, limits, metrics)

    return opened, limits, undo
