"""`RayService`: both tiers on a Ray cluster, behind Ray Serve's HTTP server."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.serving.limits import Limits
from crystallite.serving.listening import check_address, is_loopback
from crystallite.serving.machine import Machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source, sources_of
from crystallite.serving.piece import Piece
from crystallite.serving.ray_engine import LOGGING, RayEngine, Scaling, connect, deploy_pieces, planned_for_ray
from crystallite.serving.refusal import Refusal
from crystallite.serving.service import Service

__all__ = ["RayService"]

_INGRESS = "crystallite"
_DRAINED = 60.0  # seconds that old processes of the transform tier have for what they accepted


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
        host: str,
        port: int,
        token: str | None,
    ) -> None:
        self._limits, self._scaling, self._token = limits, scaling, token
        self._disconnect = connect((host, port), everywhere=not is_loopback(host))
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
        batch: int = 1,
        unvalidated: bool = False,
        limits: Limits | None = None,
        machine: Machine | None = None,
        workers: int | None = None,
        scaling: Scaling | None = None,
        address: tuple[str, int, str | None] = ("127.0.0.1", 8000, None),
    ) -> RayService:
        """Deploy one saved model, called as its folder, or several by name; options as for `Service.load`.

        - `scaling`: how replicas follow the load.
        - `address`: host, port and token, as for `Listener`, on the head node, or beyond this machine on every node
          that runs a replica. A cluster whose Ray Serve listens already stays with its own host and port.
        """
        check_address(address[0], address[2])
        sources = sources_of(artifacts, Source(Path(), into, shape, batch, unvalidated, machine, workers))
        return cls(sources, limits or Limits(), scaling or Scaling(), *address)

    def reload(self, name: str) -> CutModel:
        """Open the model's folder again and let the new version answer; returns it.

        The new pieces come up beside the old ones, which go when no process of the transform tier calls them any more.
        A version that cannot be served changes nothing and raises.
        """
        from ray import serve

        if name not in self.models:
            raise InvalidOption(f"no model {name!r:.80}; there are {', '.join(self.models)}")
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
        return cut.without_pieces(), deploy_pieces(cut, source.into, self._scaling, self._limits, len(self._sources))

    def _deploy_ingress(self) -> None:
        from ray import serve

        models = {name: (cut, self._applications[name]) for name, cut in self.models.items()}
        deployment = serve.deployment(serve.ingress()(TransformReplica)).options(
            name="transform",
            num_replicas=self._scaling.transforms,
            max_ongoing_requests=4 * self._limits.max_queue * len(models),  # our own queues refuse before Ray's do
            graceful_shutdown_timeout_s=self._limits.timeout,
            health_check_period_s=5,
            ray_actor_options={"num_cpus": 0.01},
        )
        bound = deployment.bind(models, self._limits, self._token)
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

    def __init__(self, models: Mapping[str, tuple[CutModel, str]], limits: Limits, token: str | None) -> None:
        def opened(name: str, metrics: Metrics) -> ServedModel:
            cut, application = models[name]
            pieces: tuple[Piece, ...] = cut.plan.pieces
            return ServedModel.of(cut, RayEngine(application, pieces, limits, lambda: None), limits, metrics)

        self._service, self._token = _Deployed(models, opened, limits, lambda: None), token

    def __serve_build_asgi_app__(self) -> Any:
        from crystallite.serving.app import application

        return application(self._service, self._token)


class _Deployed(Service):
    """A service in one of several processes, none of which can change the version for all."""

    async def reloaded(self, name: str) -> ServedModel:
        self.model(name)
        raise Refusal(501, f"{name} runs on Ray: whoever deployed it brings new versions")
