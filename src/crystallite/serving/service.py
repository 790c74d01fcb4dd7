"""`Service`: saved models behind queues, in process or over the network."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
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
from crystallite.serving.live_trial import Trial, TrialOptions, in_trial
from crystallite.serving.machine import Machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.model import CutModel, ServedModel, Source, sources_of
from crystallite.serving.ray_engine import ray_opener
from crystallite.serving.refusal import Refusal, not_opened
from crystallite.serving.signature import Answer, Given, Signature

__all__ = ["Service"]

Result = TypeVar("Result")
Array = Tensor | np.ndarray
Inputs = Array | tuple[Array, ...] | Mapping[str, Array] | Sequence[str] | None
Opener = Callable[[str, Metrics], ServedModel]
StrPath = str | os.PathLike[str]
_MOST_RELOADS = 3  # that wait for the one under way


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
        self._names, self._opened, self._ended = tuple(names), opened, ended
        self._models: dict[str, ServedModel] = {}
        self._reloading, self._reloads, self._reload_seconds = asyncio.Lock(), 0, 1
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="crystallite-service", daemon=True)
        self._thread.start()
        try:
            for name in self._names:
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
        outputs: Sequence[str] = (),
        batch: int = 1,
        unvalidated: bool = False,
        limits: Limits | None = None,
        machine: Machine | None = None,
        workers: int | None = None,
        engine: str = "local",
        trial: nn.Module | TrialOptions | None = None,
    ) -> Service:
        """A service of one saved model, called as its folder, or of several by name.

        Args:
            artifacts: a folder that `save` wrote, or several by name.
            into: an instance of the original, for a model with code of its own.
            shape: of one sample of a model with one input, where neither a recorded call nor the first layer says it;
                -1 for an axis of any size.
            outputs: names of those that are answered, of a model that returns several; none: all but caches and what
                its layers saw.
            batch, machine, workers: as for `plan`.
            unvalidated: serve a model without a verdict, or with one that it failed.
            engine: "local" runs the pieces in this process; "ray" on the Ray cluster that `RAY_ADDRESS` names or that
                runs on this machine, else on one that is started here. Every node must see the same folders.
            limits: how much the service takes on at once; None: the defaults.
            trial: the original, or `TrialOptions` with it: both systems run on the same requests, the original answers,
                and a verdict is given after some of them; see `trial_of`. The saved model needs no verdict for this.

        Returns:
            The service; close it, or use it in a `with`.

        Raises:
            InvalidOption: a model without a verdict that it passed, or an option outside the values it may take.
        """
        check_choice("engine", engine, ("local", "ray"))
        if trial is not None and engine != "local":
            raise InvalidOption("trial: both systems run in this process; leave out engine")
        tried = TrialOptions(trial) if isinstance(trial, nn.Module) else trial
        options = into, shape, batch, unvalidated, machine, workers, tuple(outputs), tried is not None
        sources = sources_of(artifacts, Source(Path(), *options))
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
                served = ServedModel.of(cut, LocalEngine(cut.network.modules), limits, metrics)
                return served if tried is None else in_trial(cut, served, sources[name], tried, limits, metrics)

            return cls(sources, opened, limits, lambda: None)
        return cls(sources, *ray_opener(sources, limits))

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """By name, the versions that answer now."""
        return self._models

    def model(self, name: str, version: str | None = None) -> ServedModel:
        """The model of that name, or a `Refusal` with status 404."""
        self._check_name(name)
        found = self._models.get(name)
        if found is None:
            raise Refusal(404, f"{name} is unloaded; POST /v2/repository/models/{name}/load opens it again")
        if version not in (None, *found.versions):
            raise Refusal(404, f"{name} has version {found.version}, not {version!r:.80}")
        return found

    def trial_of(self, name: str) -> Trial:
        """The trial that a model is in; a `Refusal` with status 404 if it is in none."""
        trial = self.model(name).trial
        if trial is None:
            raise Refusal(404, f"{name} is in no trial; serve it with --trial ORIGINAL")
        return trial

    @property
    def states(self) -> list[dict[str, str]]:
        """Of every model, in the words of the repository extension: READY, or UNAVAILABLE if it was unloaded."""
        found = []
        for name in self._names:
            model = self._models.get(name)
            state = ("UNAVAILABLE", "unloaded") if model is None else ("READY", "")
            version = "" if model is None else model.version
            found.append({"name": name, "version": version, "state": state[0], "reason": state[1]})
        return found

    def infer(
        self,
        x: Inputs = None,
        model: str | None = None,
        timeout: float | None = None,
        **inputs: Array,
    ) -> Tensor | dict[str, Tensor | list[str]]:
        """The model's answer for a batch of samples, through both tiers and without a network.

        May be called from many threads: their samples are computed together. A bad input, a full queue or a passed
        timeout (seconds) raises `Refusal`.

        Args:
            x: the input of a model that has one, a tuple or a dict of several, or a list of texts for a model whose
                folder has a tokenizer.
            model: which, if there are several.
            timeout: seconds.
            inputs: by name, as keywords.

        Returns:
            The output, or the outputs by name where there are several; the names of classes are strings.

        Raises:
            Refusal: the model does not take these inputs, the queue is full, or the time is over.
        """
        if model is None and len(self._names) > 1:
            raise InvalidOption(f"model: say which, there are {', '.join(self._names)}")
        name = self._names[0] if model is None else model
        given = _given(x, inputs, self.model(name).signature)
        answer = self.run(self.answered(name, given, timeout))[0]
        only = next(iter(answer.values()))
        return only if len(answer) == 1 and isinstance(only, Tensor) else dict(answer)

    async def answered(
        self, name: str, given: Given, timeout: float | None = None, version: str | None = None
    ) -> tuple[Answer, str]:
        """The answer for some samples and the version that gave it.

        The version is chosen where it takes the request, so that none is lost to one that is being replaced.
        """
        model = self.model(name, version).answering(version)
        return await model.infer(given, timeout), model.version

    def reload(self, name: str) -> ServedModel:
        """Open the model's folder again and let the new version answer; see `reloaded`."""
        return self.run(self.reloaded(name))

    async def reloaded(self, name: str) -> ServedModel:
        """A new version of a model in the place of the old one, if it has one, which answers all that it has accepted.

        A version that cannot be served, or whose verdict does not allow it, changes nothing and raises. One is
        opened after the other; if several wait already, a `Refusal` with status 429.
        """
        self._check_name(name)
        async with self._turn(name):
            try:
                new = await asyncio.to_thread(self._open, name)
            except CrystalliteError:
                self.metrics.count("crystallite_reloads_total", model=name, outcome="refused")
                raise
            old, self._models[name] = self._models.get(name), new
            self.metrics.count("crystallite_reloads_total", model=name, outcome="served")
        if old is not None:
            await old.close()
        return new

    async def unloaded(self, name: str) -> None:
        """Stop a model when it has answered what it accepted, and release its memory; `reloaded` opens it again."""
        self.model(name)
        async with self._turn(name):
            old = self._models.pop(name, None)
        if old is not None:
            await old.close()

    def _check_name(self, name: str) -> None:
        if name not in self._names:
            raise Refusal(404, f"no model {name!r:.80}; there are {', '.join(self._names)}")

    def _open(self, name: str) -> ServedModel:
        """The version that lies in the folder now; whatever happens while it is opened is an error of ours."""
        try:
            return self._opened(name, self.metrics)
        except CrystalliteError:
            raise
        except BaseException as error:  # of libraries that read a damaged file, or of the model's own code
            raise not_opened(name, error) from error

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """The right to change the version of a model, which one has at a time and few may wait for."""
        if self._reloads > _MOST_RELOADS:
            raise Refusal(429, f"{name}: {self._reloads} reloads are under way or wait already", self._reload_seconds)
        self._reloads += 1
        try:
            async with self._reloading:
                begun = time.monotonic()
                yield
                self._reload_seconds = math.ceil(time.monotonic() - begun)
        finally:
            self._reloads -= 1

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
            model.flush()

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


def _given(x: Inputs, named: Mapping[str, Array], signature: Signature) -> Given:
    """The inputs by name; one without a name is the model's first. Strings are texts."""
    if isinstance(x, (list, tuple)) and x and all(isinstance(text, str) for text in x):
        return list(x)
    if isinstance(x, Mapping):
        named = {**x, **named}
    elif x is not None:
        several = x if isinstance(x, tuple) else (x,)
        if len(several) > len(signature.inputs):
            raise Refusal(400, f"inputs: expected at most {len(signature.inputs)}, got {len(several)}")
        unnamed = {spec.name: torch.as_tensor(value) for spec, value in zip(signature.inputs, several, strict=False)}
        named = {**unnamed, **named}
    return {name: torch.as_tensor(value) for name, value in named.items()}
