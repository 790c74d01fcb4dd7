"""A smaller decoder trained a little towards the dense one: windows run one by one, logits of few positions exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crystallite.compression.decoders.run import DecoderOptions, as_tokens
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.polish import polish_, polish_checkpoints
from crystallite.core.suggest import matching
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import judged
from crystallite.data.positions import real_positions
from crystallite.models.layered_folder import list_of_layers
from crystallite.models.layers import find_units
from crystallite.models.record import Polish
from crystallite.statistics.output_error import relative_error

__all__ = ["polish_decoder_"]

_STEP = 2048  # positions
_HEAD = 128  # positions at once, where logits of both models are compared


@dataclass(frozen=True)
class _NextTokens:
    """Two decoders, compared by what they predict at each position; see `Comparison`."""

    rate: ClassVar[float] = 3e-4  # few steps: at three times that SmolLM2 gets worse before it gets better
    small: Stack
    dense: Stack
    _known: dict[int, Tensor] = field(default_factory=dict)  # of batches that judge: what the dense layers write

    def samples(self, batch: Batch) -> int:
        return max(1, _STEP // max(1, batch.named["input_ids"].shape[1]))

    def errors(self, batch: Batch) -> Iterator[Tensor]:
        for window in batch.split(1):
            with torch.no_grad():
                expected = _states(self.dense, window)
            yield self._error(_states(self.small, window), expected, window) / batch.size

    @torch.no_grad()
    def mean_error(self, batches: Sequence[Batch]) -> float:
        found = []
        for batch in batches:
            for window in batch.split(1):
                if window.offset not in self._known:
                    self._known[window.offset] = _states(self.dense, window)
                found.append(float(self._error(_states(self.small, window), self._known[window.offset], window)))
        return sum(found) / len(found)

    def _error(self, found: Tensor, expected: Tensor, window: Batch) -> Tensor:
        """Of the probabilities of a window, on average over its positions; logits are computed again for gradients."""
        real = real_positions(window, window.named["input_ids"].shape)
        a, b = (states.flatten(0, 1)[real] for states in (found, expected))
        errors = [
            checkpoint(self._of_positions, x, y, use_reentrant=False) * len(x) / len(a)
            for x, y in zip(a.split(_HEAD), b.split(_HEAD), strict=True)
        ]
        return torch.stack(errors).sum()

    def _of_positions(self, found: Tensor, expected: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.small.rounded):
            logits = [stack.end(rows[:, None])[:, 0] for stack, rows in ((self.small, found), (self.dense, expected))]
        ours, theirs = (next(iter(judged({"logits": rows.float()}).values())) for rows in logits)
        return relative_error(ours, theirs.detach(), Batch(0, 1))


def _states(stack: Stack, batch: Batch) -> Tensor:
    """(samples, positions, features) what the last layer writes."""
    hidden, calls = stack.begin(batch)
    for layer, call in zip(stack.layers, calls, strict=True):
        hidden = stack.run(layer, hidden, call)
    return hidden


def polish_decoder_(
    result: nn.Module, model: nn.Module, data: Calibration, options: DecoderOptions, steps: int, folder: Path | None,
    progress: bool,
) -> Polish:  # fmt: skip
    """Train a decoder that `compress_decoder` made of another one, in place; see `polish_`.

    All matrices of its layers that may change are trained, and all vectors of the model. A step is 2,048 positions.
    Memory: five times the smaller model, the dense one, and the activations of one window.
    """
    small, dense = (Stack(one, list_of_layers(model)).quick() for one in (result, model))
    names = [unit.name for unit in find_units(result, ["*"], []) if unit.name.startswith(f"{small.name}.")]
    layers = matching(names, options.targets, options.ignore)
    fitted, held_out, more = (tuple(map(as_tokens, some)) for some in (data.fitted, data.held_out, data.more))
    as_read = replace(data, fitted=fitted, held_out=held_out, more=more)
    checkpoints = None if folder is None else polish_checkpoints(folder, model, result, data, steps)
    return polish_(result, _NextTokens(small, dense), layers, as_read, steps, options.seed, checkpoints, progress)
