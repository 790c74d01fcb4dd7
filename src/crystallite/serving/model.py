"""`ServedModel`: one version of one artifact, ready to answer."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from crystallite.artifact import load, read_manifest
from crystallite.errors import InvalidOption
from crystallite.serving.batching import Batcher
from crystallite.serving.engine import Engine, LocalEngine
from crystallite.serving.limits import Limits
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.metrics import Metrics
from crystallite.serving.plan import Plan, arrange
from crystallite.serving.signature import Signature
from crystallite.serving.transform import Transform

__all__ = ["ServedModel", "Source", "name_of"]


def name_of(path: str | os.PathLike[str]) -> str:
    """What a model is called if nobody says: as its folder, or as the link to it.

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


@dataclass(frozen=True)
class ServedModel:
    """A model with its queue and its engine."""

    name: str
    version: str  # the first digits of the weights' hash
    plan: Plan
    signature: Signature
    batcher: Batcher
    engine: Engine

    @classmethod
    def open(cls, name: str, source: Source, limits: Limits, metrics: Metrics) -> ServedModel:
        """Load, check the verdict, plan, cut and warm up."""
        if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII):
            raise InvalidOption(f"{name!r:.80}: expected a model name of letters, digits, '_', '.' and '-'")
        path = Path(os.path.realpath(source.path))  # a link that is moved to a new version is followed once
        manifest = read_manifest(path)
        if not source.unvalidated:
            _check_verdict(path, manifest)
        model = load(path, source.into).eval()
        plan, network = arrange(model, source.batch, source.machine or measure_machine())
        signature = Signature.of(model, network, source.shape)
        engine = LocalEngine(network.modules)
        transform = Transform(name, network, engine, limits.attempts, metrics)
        version = manifest["weights_sha256"][:12]
        return cls(name, version, plan, signature, Batcher(name, transform.run, limits, metrics), engine)

    async def infer(self, x: Tensor, timeout: float | None = None) -> Tensor:
        """The answer for some samples; `timeout` in seconds."""
        self.signature.check(x)
        return await self.batcher.infer(x, timeout)

    async def close(self) -> None:
        """Answer what was accepted, then let go."""
        await self.batcher.close()
        await asyncio.to_thread(self.engine.close)


def _check_verdict(path: Path, manifest: dict[str, Any]) -> None:
    verdict = manifest["verdict"]
    if verdict is None:
        raise InvalidOption(f"{path}: this model was never validated; run crystallite validate, or say --unvalidated")
    if verdict.get("passed") is not True:
        reasons = "; ".join(map(str, verdict.get("reasons") or ["no reason given"]))
        raise InvalidOption(
            f"{path}: this model failed its validation ({reasons:.200}); --unvalidated serves it anyway"
        )
