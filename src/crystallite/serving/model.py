"""`CutModel` and `ServedModel`: one version of one artifact, cut along its plan, and ready to answer."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.familiarity import known_inputs, score_always_
from crystallite.models.layered_folder import is_transformers_folder
from crystallite.models.manifest import check_weights, is_saved, read_manifest, source_sha256
from crystallite.models.opening import open_mapped
from crystallite.models.record import find_record
from crystallite.serving.batching import Batcher
from crystallite.serving.engine import Engine
from crystallite.serving.example import Example, examples
from crystallite.serving.joining import Joining
from crystallite.serving.limits import Limits
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.network import Inside, Network, network_of
from crystallite.serving.plan import Plan, arrange
from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import INPUT, Answer, Given, Signature, Tensors, named_classes
from crystallite.serving.statistics import Statistics
from crystallite.serving.text import TextReader, TextRules, text_rules
from crystallite.serving.transform import Transform
from crystallite.serving.trial import tried
from crystallite.serving.work import count_work

if TYPE_CHECKING:
    from crystallite.serving.live_trial import Trial

__all__ = ["CutModel", "ServedModel", "Source", "check_verdict", "name_of", "sources_of"]

_AT_ONCE = 2**14  # characters that are made tokens of while others wait


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
    outputs: tuple[str, ...] = ()
    is_tried: bool = False  # against its original, which answers meanwhile


def sources_of(
    artifacts: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]], kind: Source
) -> dict[str, Source]:
    """One saved model, called as its folder, or several by name, each otherwise of that kind."""
    paths = artifacts if isinstance(artifacts, Mapping) else {name_of(artifacts): artifacts}
    if not paths:
        raise InvalidOption("expected at least one model to serve, got none")
    if len(paths) > 1 and (kind.into is not None or kind.shape is not None or kind.is_tried):
        raise InvalidOption("into, shape and trial say what one model is, but there are several; serve it alone")
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
    joining: Joining
    example: Example
    inputs: Mapping[str, tuple[Tensors, Tensors]]  # what each piece is called with for one sample, and for most
    outputs: tuple[str, ...] = ()  # of the model, that are chosen; none: all
    sha256: str = ""  # of the weights that run in the transform tier and are not here
    text: TextRules | None = None

    @classmethod
    def open(cls, name: str, source: Source, scores: Callable[[str, Tensor], None] | None = None) -> CutModel:
        """Load, check the hash and the verdict, plan, cut and warm up.

        scores: called with how unlike the inputs of layers are to those that the model was fitted on.
        """
        if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII):
            raise InvalidOption(f"{name!r:.80}: expected a model name of letters, digits, '_', '.' and '-'")
        path = Path(os.path.realpath(source.path))  # a link that is moved to a new version is followed once
        is_dense = _is_dense(path)
        if not (source.unvalidated or source.is_tried):
            check_verdict(path)
        version = None if is_dense else check_weights(path)
        model = open_mapped(path, source.into).eval()
        if scores is not None:
            score_always_(model, known_inputs(model), scores)
        cut = cls.of(name, (version or source_sha256(model))[:12], path, model, source)
        config = getattr(model, "config", None)
        signature = named_classes(cut.signature, config)
        rules = text_rules(path, signature, config)
        if rules is not None:
            signature = dataclasses.replace(signature, text=rules.spec, text_outputs=rules.outputs(signature))
        return dataclasses.replace(cut, signature=signature, text=rules)

    @classmethod
    def of(
        cls, name: str, version: str, path: Path, model: nn.Module, source: Source, given: list[Example] | None = None
    ) -> CutModel:
        """A model that is open already; `given`: what it may take, if that is known."""
        found = find_record(model)
        given = given or list(examples(model, source.shape, None if found is None else found.call))
        positional = given[0].positional if given else (INPUT,)
        machine = source.machine or measure_machine()
        work = count_work(model, given, source.outputs)
        interface = positional, source.outputs
        plan, network = arrange(model, source.batch, machine, source.workers, *interface, work)
        with _observed_inputs(network) as inputs:
            signature, joining, example = tried(network, given)
        for piece, module in network.modules.items():
            if piece not in inputs:  # an expert that no token was sent to
                inputs[piece] = (cast(Any, module).example(),) * 2
        return cls(name, version, path, plan, network, signature, joining, example, inputs, source.outputs)

    def described(self) -> list[str]:
        """What it takes and returns, and how requests are computed together, a line each."""
        return [*self.signature.lines(), str(self.joining)]

    def without_pieces(self) -> CutModel:
        """What the transform tier needs of it: tables, and what of the model was not cut."""
        return dataclasses.replace(self, network=Network(self.network.steps, {}))

    def without_weights(self) -> CutModel:
        """What another process needs to open the transform tier itself: see `reopened`."""
        return dataclasses.replace(self, network=self.network.without_weights(), sha256=self.network.sha256())

    def reopened(self, into: nn.Module | None) -> CutModel:
        """With what runs in the transform tier and has weights, read from the folder; pieces stay where they are."""
        if not any(isinstance(step, Inside) for step in self.network.steps):
            return self
        model = open_mapped(self.path, into).eval()
        network = network_of(model, self.plan.pieces, self.example.positional, self.outputs, with_modules=False)
        if network.sha256() != self.sha256:
            raise CheckpointError(f"{self.path}: the weights are not those that were planned with; deploy it again")
        return dataclasses.replace(self, network=network)


@dataclass(frozen=True)
class ServedModel:
    """A model with its queue and its engine."""

    name: str
    version: str
    plan: Plan
    signature: Signature
    example: Example
    batcher: Batcher
    transform: Transform
    engine: Engine
    statistics: Statistics
    reader: TextReader | None = None
    trial: Trial | None = None  # against the original
    system: int = 1  # of the trial: 0 is the original

    @classmethod
    def of(cls, cut: CutModel, engine: Engine, limits: Limits, metrics: Metrics) -> ServedModel:
        """A model whose pieces run on an engine."""
        transform = Transform(cut.name, cut.network, engine, limits, metrics)
        statistics = Statistics()
        batcher = Batcher(cut.name, transform.run, cut.joining, limits, metrics, statistics, lambda: transform.batches)
        reader = None if cut.text is None else TextReader(cut.text)
        known = cut.name, cut.version, cut.plan, cut.signature, cut.example
        return cls(*known, batcher, transform, engine, statistics, reader)

    async def infer(self, given: Given, timeout: float | None = None) -> Answer:
        """The answer for some samples, or for texts; `timeout` in seconds."""
        if isinstance(given, list):
            return await self._read(given, timeout)
        self.signature.check(given)
        return await self._asked(given, timeout)

    async def _asked(self, given: Tensors, timeout: float | None) -> Tensors:
        if self.trial is not None:
            return await self.trial.infer(self.system, given, timeout)
        return await self.batcher.infer(given, timeout)

    async def _read(self, texts: list[str], timeout: float | None) -> Answer:
        if self.reader is None:
            raise Refusal(400, f"{self.name} takes tensors, no text")
        if sum(map(len, texts)) > _AT_ONCE:
            tokens = await asyncio.to_thread(self.reader.tokens, texts)
        else:
            tokens = self.reader.tokens(texts)
        return self.reader.answer(await self._asked(tokens, timeout), tokens)

    def described(self) -> list[str]:
        """What it takes and returns, and how requests are computed together, a line each."""
        return [*self.signature.lines(), str(self.batcher.joining)]

    @property
    def versions(self) -> tuple[str, ...]:
        """That a request may name: in a trial, also the original's."""
        return (self.version,) if self.trial is None else (self.version, self.trial.original.version)

    @property
    def waiting(self) -> int:
        """Requests that are not computed yet."""
        return self.batcher.waiting + (0 if self.trial is None else self.trial.waiting)

    def answering(self, version: str | None) -> ServedModel:
        """What answers a request that names a version, or none."""
        if self.trial is None:
            return self
        chosen = self.trial.chosen_version if version is None else version
        return self if chosen == self.version else self.trial.original

    def flush(self) -> None:
        """Compute waiting requests at once from now on."""
        self.batcher.flush()
        if self.trial is not None:
            self.trial.original.batcher.flush()

    async def close(self) -> None:
        """Answer the accepted requests, then release the engine."""
        if self.trial is not None:
            await self.trial.close()
        await self.batcher.close()
        await self.transform.close()
        await self.engine.close()


@contextmanager
def _observed_inputs(network: Network) -> Iterator[dict[str, tuple[Tensors, Tensors]]]:
    """What each piece is called with first, and with the most numbers, meanwhile."""
    inputs: dict[str, tuple[Tensors, Tensors]] = {}

    def size(given: Tensors) -> int:
        return sum(x.numel() for x in given.values())

    def kept(piece: str, _module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args[0] if isinstance(args[0], Mapping) else {INPUT: args[0]}
        first, most = inputs.get(piece, (given, given))
        inputs[piece] = first, max(most, given, key=size)

    hooks = [module.register_forward_pre_hook(partial(kept, piece)) for piece, module in network.modules.items()]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _is_dense(path: Path) -> bool:
    """Whether a folder holds a model as transformers wrote it."""
    return is_transformers_folder(path) and not is_saved(path)


def check_verdict(path: Path) -> None:
    """Refuse a saved model without a verdict, or with one that it failed."""
    verdict = None if _is_dense(path) else read_manifest(path)["verdict"]
    if verdict is None:
        raise InvalidOption(
            f"{path}: this model was never validated; run crystallite validate, or pass unvalidated=True"
        )
    if verdict.get("passed") is not True:
        reasons = "; ".join(map(str, verdict.get("reasons") or ["no reason given"]))
        raise InvalidOption(
            f"{path}: this model failed its validation ({reasons:.200}); unvalidated=True serves it anyway"
        )
