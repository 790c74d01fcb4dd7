"""`Service`: saved models behind queues, in process or over the network."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.suggest import check_choice, suggest_keywords
from crystallite.serving.engine import LocalEngine
from crystallite.serving.limits import Limits
from crystallite.serving.machine import Machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source, sources_of
from crystallite.serving.ray_engine import ray_opener
from crystallite.serving.refusal import Refusal

__all__ = ["Service"]

Result = TypeVar("Result")
Opener = Callable[[str, Metrics], ServedModel]
StrPath = str | os.PathLike[str]


class Service:
    """The two-tier service of some models, on an event loop in a thread of its own.

    >>> import tempfile
    >>> from crystallite import reorganize, save
    >>> model = nn.Linear(4, 2, bias=False)
    >>> _ = nn.init.eye_(model.weight)
    >>> folder = save(reorganize(model, level=None, only_if_faster=False), tempfile.mkdtemp() + "/small")
    >>> with Service.load(folder, unvalidated=True) as service:
    ...     service.infer(torch.arange(4.0)[None])
    tensor([[0., 1.]])
    """

    def __init__(self, names: Iterable[str], opened: Opener, limits: Limits, ended: Callable[[], None]) -> None:
        """Models by name, as `opened` opens them; `ended` is called last. See `load`."""
        self.limits, self.metrics = limits, Metrics()
        self._opened, self._ended = opened, ended
        self._models: dict[str, ServedModel] = {}
        self._reloading = asyncio.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crystallite-service", daemon=True)
        self._thread.start()
        try:
            for name in names:
                self._models[name] = opened(name, self.metrics)
        except BaseException:
            self.close()
            raise

    @classmethod
    @suggest_keywords
    def load(
        cls,
        artifacts: StrPath | Mapping[str, StrPath],
        *,
        into: nn.Module | None = None,
        shape: tuple[int, ...] | None = None,
        batch: int = 1,
        unvalidated: bool = False,
        limits: Limits | None = None,
        machine: Machine | None = None,
        workers: int | None = None,
        engine: str = "local",
    ) -> Service:
        """A service of one saved model, called as its folder, or of several by name.

        Args:
            artifacts: a folder that `save` wrote, or several by name.
            into: an instance of the original, for a model with code of its own.
            shape: of one sample, where the first layer does not say it.
            batch, machine, workers: as for `plan`.
            unvalidated: serve a model without a verdict, or with one that it failed.
            engine: "local" runs the pieces in this process; "ray" on the Ray cluster that `RAY_ADDRESS` names or that
                runs on this machine, else on one that is started here. Every node must see the same folders.
            limits: how much the service takes on at once; None: the defaults.

        Returns:
            The service; close it, or use it in a `with`.

        Raises:
            InvalidOption: a model without a verdict that it passed, or an option outside the values it may take.
        """
        check_choice("engine", engine, ("local", "ray"))
        sources = sources_of(artifacts, Source(Path(), into, shape, batch, unvalidated, machine, workers))
        limits = limits or Limits()
        if engine == "local":

            def opened(name: str, metrics: Metrics) -> ServedModel:
                counting = threading.Event()

                def count(layer: str, scores: Tensor) -> None:
                    if counting.is_set():  # not while it is warmed up
                        metrics.count("crystallite_inputs_total", len(scores), model=name, layer=layer)
                        unlike = int((scores > 1).sum())
                        metrics.count("crystallite_unfamiliar_inputs_total", unlike, model=name, layer=layer)

                cut = CutModel.open(name, sources[name], count)
                counting.set()
                return ServedModel.of(cut, LocalEngine(cut.network.modules), limits, metrics)

            return cls(sources, opened, limits, lambda: None)
        return cls(sources, *ray_opener(sources, limits))

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """By name, the versions that answer now."""
        return self._models

    def model(self, name: str, version: str | None = None) -> ServedModel:
        """The model of that name, or a `Refusal` with status 404."""
        found = self._models.get(name)
        if found is None:
            raise Refusal(404, f"no model {name!r:.80}; there are {', '.join(self._models)}")
        if version not in (None, found.version):
            raise Refusal(404, f"{name} has version {found.version}, not {version!r:.80}")
        return found

    def infer(self, x: Tensor | np.ndarray, model: str | None = None, timeout: float | None = None) -> Tensor:
        """The model's answer for a batch of samples, through both tiers and without a network.

        May be called from many threads: their samples are computed together. A bad input, a full queue or a passed
        timeout (seconds) raises `Refusal`.
        """
        if model is None and len(self._models) > 1:
            raise InvalidOption(f"model: say which, there are {', '.join(self._models)}")
        name = next(iter(self._models)) if model is None else model
        return self.run(self.answered(name, torch.as_tensor(x), timeout))[0]

    async def answered(
        self, name: str, x: Tensor, timeout: float | None = None, version: str | None = None
    ) -> tuple[Tensor, str]:
        """The answer for some samples and the version that gave it.

        The version is chosen where it takes the request, so that none is lost to one that is being replaced.
        """
        model = self.model(name, version)
        return await model.infer(x, timeout), model.version

    def reload(self, name: str) -> ServedModel:
        """Open the model's folder again and let the new version answer; see `reloaded`."""
        return self.run(self.reloaded(name))

    async def reloaded(self, name: str) -> ServedModel:
        """A new version of a model in the place of the old one, which answers all that it has accepted.

        A version that cannot be served, or whose verdict does not allow it, changes nothing and raises.
        """
        self.model(name)
        async with self._reloading:
            try:
                new = await asyncio.to_thread(self._opened, name, self.metrics)
            except CrystalliteError:
                self.metrics.count("crystallite_reloads_total", model=name, outcome="refused")
                raise
            old, self._models[name] = self._models[name], new
            self.metrics.count("crystallite_reloads_total", model=name, outcome="served")
        await old.close()
        return new

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine on the service's event loop."""
        return self.start(work).result()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Begin a coroutine on the service's event loop."""
        if not self._thread.is_alive():
            work.close()
            raise Refusal(503, "the service is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def flush(self) -> None:
        """Compute waiting requests at once from now on; for a service that is about to close."""
        for model in self._models.values():
            model.batcher.flush()

    def close(self) -> None:
        """Accept no more requests, answer the accepted ones, and stop; a second call does nothing."""
        if not self._thread.is_alive():
            return
        for model in self._models.values():
            self.run(model.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ended()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
