"""`CutModel` and `ServedModel`: one version of one artifact, cut along its plan, and ready to answer."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.models.artifact import load_mapped
from crystallite.models.familiarity import known_inputs, score_always_
from crystallite.models.manifest import check_weights, read_manifest
from crystallite.reorganization.subnetworks import Subnetworks
from crystallite.serving.batching import Batcher
from crystallite.serving.engine import Engine
from crystallite.serving.limits import Limits
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Fan, Local, Network
from crystallite.serving.plan import Plan, arrange
from crystallite.serving.signature import Signature
from crystallite.serving.transform import Transform

__all__ = ["CutModel", "ServedModel", "Source", "name_of", "sources_of"]


def name_of(path: str | os.PathLike[str]) -> str:
    """The default name of a model: that of its folder, or of the link to it.

    >>> name_of("models/small/")
    'small'
    """
    return os.path.basename(os.path.abspath(path))


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how it is cut; see `Service.load`."""

    path: Path
    into: nn.Module | None = None
    shape: tuple[int, ...] | None = None
    batch: int = 1
    unvalidated: bool = False
    machine: Machine | None = None
    workers: int | None = None


def sources_of(
    artifacts: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]], kind: Source
) -> dict[str, Source]:
    """One saved model, called as its folder, or several by name, each otherwise of that kind."""
    paths = artifacts if isinstance(artifacts, Mapping) else {name_of(artifacts): artifacts}
    if not paths:
        raise InvalidOption("expected at least one model to serve, got none")
    if len(paths) > 1 and (kind.into is not None or kind.shape is not None):
        raise InvalidOption("into and shape say what one model is, but there are several; serve it alone")
    return {name: dataclasses.replace(kind, path=Path(path)) for name, path in paths.items()}


@dataclass(frozen=True)
class CutModel:
    """One version of one artifact: checked, planned and cut."""

    name: str
    version: str  # the first digits of the weights' hash
    path: Path  # of the version: no link
    plan: Plan
    network: Network
    signature: Signature
    inputs: Mapping[str, Tensor]  # what each piece reads from one sample of zeros

    @classmethod
    def open(cls, name: str, source: Source, scores: Callable[[str, Tensor], None] | None = None) -> CutModel:
        """Load, check the hash and the verdict, plan, cut and warm up.

        scores: called with how unlike the inputs of layers are to those that the model was fitted on.
        """
        if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII):
            raise InvalidOption(f"{name!r:.80}: expected a model name of letters, digits, '_', '.' and '-'")
        path = Path(os.path.realpath(source.path))  # a link that is moved to a new version is followed once
        if not source.unvalidated:
            _check_verdict(path, read_manifest(path))
        version = check_weights(path)[:12]
        model = load_mapped(path, source.into).eval()
        if scores is not None:
            score_always_(model, known_inputs(model), scores)
        plan, network = arrange(model, source.batch, source.machine or measure_machine(), source.workers)
        network = _in_own_memory(network)
        with _first_inputs(network) as inputs:
            signature = Signature.of(model, network, source.shape)
        return cls(name, version, path, plan, network, signature, inputs)

    def without_pieces(self) -> CutModel:
        """What the transform tier needs of it: tables and modules without weights."""
        steps = tuple(
            Fan(step.pieces, _hollow(step.networks)) if isinstance(step, Fan) else step for step in self.network.steps
        )
        return dataclasses.replace(self, network=Network(steps, {}))


@dataclass(frozen=True)
class ServedModel:
    """A model with its queue and its engine."""

    name: str
    version: str
    plan: Plan
    signature: Signature
    batcher: Batcher
    engine: Engine

    @classmethod
    def of(cls, cut: CutModel, engine: Engine, limits: Limits, metrics: Metrics) -> ServedModel:
        """A model whose pieces run on an engine."""
        transform = Transform(cut.name, cut.network, engine, limits, metrics)
        batcher = Batcher(cut.name, transform.run, limits, metrics, engine.batches)
        return cls(cut.name, cut.version, cut.plan, cut.signature, batcher, engine)

    async def infer(self, x: Tensor, timeout: float | None = None) -> Tensor:
        """The answer for some samples; `timeout` in seconds."""
        self.signature.check(x)
        return await self.batcher.infer(x, timeout)

    async def close(self) -> None:
        """Answer the accepted requests, then release the engine."""
        await self.batcher.close()
        await self.engine.close()


def _in_own_memory(network: Network) -> Network:
    """The network without anything that is mapped: a file that is written to must not change what is served."""
    cut = {piece for step in network.steps if isinstance(step, Fan) for piece in step.pieces}  # these are copies
    modules = {name: module if name in cut else copy.deepcopy(module) for name, module in network.modules.items()}
    steps = (Local(copy.deepcopy(step.module)) if isinstance(step, Local) else step for step in network.steps)
    return Network(tuple(steps), modules)


@contextmanager
def _first_inputs(network: Network) -> Iterator[dict[str, Tensor]]:
    """What each piece is called with first, meanwhile."""
    inputs: dict[str, Tensor] = {}

    def kept(piece: str, _module: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.setdefault(piece, given[0])

    hooks = [module.register_forward_pre_hook(partial(kept, piece)) for piece, module in network.modules.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _hollow(networks: Subnetworks) -> Subnetworks:
    parts = [nn.Identity() for _ in networks.parts]
    return Subnetworks(parts, networks.inputs, networks.outputs, networks.idle, networks.before, networks.after)


def _check_verdict(path: Path, manifest: dict[str, Any]) -> None:
    verdict = manifest["verdict"]
    if verdict is None:
        raise InvalidOption(f"{path}: this model was never validated; run crystallite validate, or say --unvalidated")
    if verdict.get("passed") is not True:
        reasons = "; ".join(map(str, verdict.get("reasons") or ["no reason given"]))
        raise InvalidOption(
            f"{path}: this model failed its validation ({reasons:.200}); --unvalidated serves it anyway"
        )
