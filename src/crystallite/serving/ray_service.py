"""`RayService`: both tiers on a Ray cluster, behind Ray Serve's HTTP server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.models.artifact import without_weights
from crystallite.serving.headers import check_hosts, is_loopback
from crystallite.serving.limits import Limits
from crystallite.serving.listening import check_address
from crystallite.serving.logs import log_json
from crystallite.serving.machine import Machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source, sources_of
from crystallite.serving.piece import Piece
from crystallite.serving.ray_engine import LOGGING, RayEngine, Scaling, connect, deploy_pieces, planned_for_ray
from crystallite.serving.refusal import Refusal, not_opened
from crystallite.serving.request_guard import RequestGuard
from crystallite.serving.service import Service

__all__ = ["RayService"]

_INGRESS = "crystallite"
_DRAINED = 60.0  # seconds that old processes of the transform tier have for what they accepted


@dataclass(frozen=True)
class Access:
    """Who may ask, and whether requests are logged: what every process of the transform tier is given."""

    token: str | None = None
    allow_hosts: frozenset[str] = frozenset()
    log: bool = False


class RayService:
    """Saved models on a Ray cluster, until it is closed: `with RayService.load(folder) as service: service.url`.

    Each piece is a deployment with replicas as the plan bounds them, each model's pieces are one application, and the
    transform tier is another: the same ASGI application that `Listener` serves. A replica that dies is replaced, and
    its calls are repeated elsewhere; of the transform tier, only the requests that the dead process held are lost.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        limits: Limits,
        scaling: Scaling,
        address: tuple[str, int],
        access: Access,
    ) -> None:
        self._limits, self._scaling, self._access = limits, scaling, access
        self._reloading = threading.Lock()
        host, port = address
        self._disconnect = connect(address, everywhere=not is_loopback(host))
        self._refuse_a_second()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self.models: dict[str, CutModel] = {}  # by name, without their pieces
        self._applications: dict[str, str] = {}
        try:
            self._sources = planned_for_ray(sources)
            for name in sources:
                self.models[name], self._applications[name] = self._deployed(name)
            self._deploy_ingress()
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        artifacts: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
        *,
        into: nn.Module | None = None,
        shape: tuple[int, ...] | None = None,
        outputs: Sequence[str] = (),
        batch: int = 1,
        unvalidated: bool = False,
        limits: Limits | None = None,
        machine: Machine | None = None,
        workers: int | None = None,
        scaling: Scaling | None = None,
        address: tuple[str, int, str | None] = ("127.0.0.1", 8000, None),
        allow_hosts: Iterable[str] = (),
        log: bool = False,
    ) -> RayService:
        """Deploy one saved model, called as its folder, or several by name; options as for `Service.load`.

        - `scaling`: how replicas follow the load.
        - `address`: host, port and token, as for `Listener`, on the head node, or beyond this machine on every node
          that runs a replica. A cluster whose Ray Serve listens already stays with its own host and port.
        - `allow_hosts`: as for `Listener`.
        - `log`: every process of the transform tier writes a line for each request to its standard error, which Ray
          keeps in its folder of logs.
        """
        check_address(address[0], address[2])
        access = Access(address[2], check_hosts(allow_hosts), log)
        sources = sources_of(
            artifacts, Source(Path(), into, shape, batch, unvalidated, machine, workers, tuple(outputs))
        )
        return cls(sources, limits or Limits(), scaling or Scaling(), address[:2], access)

    def reload(self, name: str) -> CutModel:
        """Open the model's folder again and let the new version answer; returns it.

        The new pieces come up beside the old ones, which go when no process of the transform tier calls them any more.
        A version that cannot be served changes nothing and raises.
        """
        if name not in self.models:
            raise InvalidOption(f"no model {name!r:.80}; there are {', '.join(self.models)}")
        if not self._reloading.acquire(blocking=False):
            raise Refusal(429, f"{name}: another reload is under way", retry_after=1)
        try:
            return self._replaced(name)
        except CrystalliteError:
            raise
        except Exception as error:  # of Ray, of libraries that read a damaged file, or of the model's own code
            raise not_opened(name, error) from error
        finally:
            self._reloading.release()

    def _replaced(self, name: str) -> CutModel:
        from ray import serve

        before = self.models[name], self._applications[name]
        new, application = self.models[name], self._applications[name] = self._deployed(name)
        try:
            self._deploy_ingress()
        except BaseException:
            self.models[name], self._applications[name] = before
            serve.delete(application)
            raise
        self._await_old_transforms()
        serve.delete(before[1])
        return new

    def close(self) -> None:
        """Accept no more requests, answer the accepted ones, and leave the cluster."""
        from ray import serve

        for application in (_INGRESS, *self._applications.values()):
            if application in serve.status().applications:
                serve.delete(application)
        self._disconnect()

    def _refuse_a_second(self) -> None:
        from ray import serve

        if _INGRESS in serve.status().applications:
            self._disconnect()
            raise InvalidOption("this cluster runs a crystallite service already; add the models to that one")

    def _deployed(self, name: str) -> tuple[CutModel, str]:
        source = self._sources[name]
        cut = CutModel.open(name, source)
        return cut.without_weights(), deploy_pieces(cut, source.into, self._scaling, self._limits, len(self._sources))

    def _deploy_ingress(self) -> None:
        from ray import serve

        models = {}
        for name, cut in self.models.items():
            into = self._sources[name].into
            models[name] = cut, self._applications[name], None if into is None else without_weights(into)
        deployment = serve.deployment(serve.ingress()(TransformReplica)).options(
            name="transform",
            num_replicas=self._scaling.transforms,
            max_ongoing_requests=4 * self._limits.max_queue * len(models),  # our own queues refuse before Ray's do
            graceful_shutdown_timeout_s=self._limits.timeout,
            health_check_period_s=5,
            ray_actor_options={"num_cpus": 0.01},
        )
        bound = deployment.bind(models, self._limits, self._access)
        serve.run(bound, name=_INGRESS, route_prefix="/", logging_config=LOGGING)

    def _await_old_transforms(self) -> None:
        from ray import serve

        until = time.monotonic() + _DRAINED
        while time.monotonic() < until:
            states = serve.status().applications[_INGRESS].deployments["transform"].replica_states
            if set(states) == {"RUNNING"}:
                return
            time.sleep(0.2)

    def __enter__(self) -> RayService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TransformReplica:
    """A process of the transform tier."""

    def __init__(
        self, models: Mapping[str, tuple[CutModel, str, nn.Module | None]], limits: Limits, access: Access
    ) -> None:
        def opened(name: str, metrics: Metrics) -> ServedModel:
            hollow, application, into = models[name]
            cut = hollow.reopened(into)
            pieces: tuple[Piece, ...] = cut.plan.pieces
            return ServedModel.of(cut, RayEngine(application, pieces, limits, lambda: None), limits, metrics)

        service = _Deployed(models, opened, limits, lambda: None)
        self._guard = RequestGuard(service, access.token, access.allow_hosts)
        if access.log:
            log_json()

    def __serve_build_asgi_app__(self) -> Any:
        from crystallite.serving.app import application

        return application(self._guard)


class _Deployed(Service):
    """A service in one of several processes, none of which can change the version for all."""

    async def reloaded(self, name: str) -> ServedModel:
        self.model(name)
        raise Refusal(501, f"{name} runs on Ray: whoever deployed it brings new versions")

    async def unloaded(self, name: str) -> None:
        await self.reloaded(name)
