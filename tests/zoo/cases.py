"""`Case`: a model with its data and what was made of it; `Outcome`: what came of a cell; comparing what models say."""

from __future__ import annotations

import re
import traceback
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch, batches
from tests.zoo.entry import BATCH, Entry

__all__ = [
    "Case", "NotApplicable", "Nothing", "Outcome", "Wrong", "answers", "deviation", "main", "plain_text", "same",
    "tolerance", "unwrapped", "valid", "where",
]  # fmt: skip

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the norm of the output


class Finding(Exception):
    """What a cell found, with the numbers that it has."""

    def __init__(self, text: str, numbers: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.numbers = numbers or {}


class Wrong(Finding):
    """Answers differ, or are not what was asked for."""


class Nothing(Finding):
    """The verb returned and did nothing, without a word."""


class NotApplicable(Exception):
    """The cell says nothing about this model."""


@dataclass(frozen=True)
class Outcome:
    """What came of one cell."""

    status: str  # works, refused, crash, wrong, nothing, n/a
    text: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    frames: tuple[str, ...] = ()  # of a crash or refusal: where it was raised, innermost last
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


class Case:
    """A model with its data, and what verbs have made of it so far."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry, self.folder = entry, folder
        self.model = entry.model()
        self.calibration = entry.batches(1, entry.samples)
        self.judging = list(batches(entry.batches(2, 4 * BATCH)))  # samples that nothing was fitted on
        self.fresh = self.judging[0]
        self.made: dict[str, nn.Module] = {}
        self.tokens: Tensor | None = None

    @cached_property
    def planted(self) -> tuple[nn.Module, list[str]]:
        """The model with every layer masked to scrambled blocks, and the names of these weights."""
        return _planted(self.entry.model())

    def small(self) -> nn.Module:
        """What `compress` made, or the next verb that gave something."""
        for verb in ("compress", "blocks", "upgrade", "exact"):
            if verb in self.made:
                return self.made[verb]
        raise NotApplicable("no verb gave a smaller model")

    def source(self, verb: str) -> nn.Module:
        """The model that a verb started from."""
        return self.planted[0] if verb == "exact" else self.model

    @property
    def is_transformers(self) -> bool:
        return hasattr(self.model, "config") and hasattr(self.model, "save_pretrained")


def plain_text(error: BaseException) -> str:
    """The text of an error without what differs between machines."""
    text = re.sub(r"(/[\w.@+-]+){3,}", lambda found: "…/" + found[0].rpartition("/")[2], str(error))
    return re.sub(r"\s+", " ", text)[:600]


def where(error: BaseException) -> tuple[str, ...]:
    """The last places inside the package, and the innermost of all."""
    found = traceback.extract_tb(error.__traceback__)
    inside = [f for f in found if "/crystallite/" in f.filename]
    chosen = inside[-4:] + ([found[-1]] if found and found[-1] not in inside else [])
    return tuple(f"{'/'.join(Path(f.filename).parts[-2:])}:{f.lineno} {f.name}" for f in chosen)


# What a model says, and whether two say the same.


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """The main output in float32, without positions that are padding."""
    return valid(main(batch.run(model)), batch)


def main(output: Any) -> Tensor:
    """Logits where something is called so, else the first tensor."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "logits_per_image", "last_hidden_state", "image_embeds"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return main(next(iter(output.values() if hasattr(output, "values") else output)))


def valid(output: Tensor, batch: Batch) -> Tensor:
    mask = batch.named.get("attention_mask") if "decoder_input_ids" not in batch.named else None
    output = output.detach().float()
    return output[mask.bool()] if mask is not None and output.shape[:2] == mask.shape else output


def deviation(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    if found.shape != expected.shape:
        raise Wrong(f"outputs of shape {list(found.shape)}, expected {list(expected.shape)}")
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def unwrapped(name: str) -> str:
    """The name that a module or weight has without `torch.compile` or `DataParallel` around it."""
    return re.sub(r"^(_orig_mod|module)\.", "", name)


def tolerance(model: nn.Module) -> float:
    """What rounding may do to a model's outputs."""
    return TOLERANCE[next(p.dtype for p in model.parameters() if p.is_floating_point())]


def same(case: Case, found: Tensor, expected: Tensor, what: str) -> float:
    """How far two outputs are from each other, which must be rounding."""
    if not (own := deviation(found, expected)) <= tolerance(case.model):
        raise Wrong(f"{what}: outputs deviate by {own:.2g}")
    return own


@torch.no_grad()
def _planted(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """Two scrambled blocks in every matrix that a layer has for itself, in place; the names of these layers."""
    rng = np.random.default_rng(0)
    held = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    names = []
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        is_conv = isinstance(module, _CONVOLUTIONS)
        known = isinstance(module, nn.Linear) or (is_conv and module.groups == 1) or type(module).__name__ == "Conv1D"
        if not known or type(weight) is not nn.Parameter or held[id(weight)] > 1 or min(weight.shape[:2]) < 4:
            continue
        rows, columns = (rng.permutation(np.arange(size) % 2) for size in weight.shape[:2])
        kept = torch.from_numpy(rows[:, None] == columns).view(*weight.shape[:2], *[1] * (weight.ndim - 2))
        weight.mul_(2**0.5 * kept.to(weight.dtype))
        names.append(name)
    return model, names
