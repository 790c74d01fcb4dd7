"""A smaller decoder trained a little towards the dense one: windows run one by one, logits of few positions exist."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
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
_Error = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _NextTokens:
    """Two decoders, compared by what they predict at each position; see `Comparison`."""

    rate: ClassVar[float] = 5e-4  # few steps: at twice that SmolLM2 gets worse before it gets better
    small: Stack
    dense: Stack
    _known: dict[int, Tensor] = field(default_factory=dict)  # of batches that judge: what the dense layers write

    def samples(self, batch: Batch) -> int:
        return max(1, _STEP // max(1, batch.named["input_ids"].shape[1]))

    def errors(self, batch: Batch) -> Iterator[Tensor]:
        """What each position loses: how much more perplexed the smaller model is by what the dense one would write."""
        for window in batch.split(1):
            with torch.no_grad():
                expected = _states(self.dense, window)
            yield self._on_average(_divergence, _states(self.small, window), expected, window) / batch.size

    @torch.no_grad()
    def mean_error(self, batches: Sequence[Batch]) -> float:
        """The output error, as everywhere: of 2√p."""
        found = []
        for batch in batches:
            for window in batch.split(1):
                if window.offset not in self._known:
                    self._known[window.offset] = _states(self.dense, window)
                states, expected = _states(self.small, window), self._known[window.offset]
                found.append(float(self._on_average(_relative, states, expected, window)))
        return sum(found) / len(found)

    def _on_average(self, error: _Error, found: Tensor, expected: Tensor, window: Batch) -> Tensor:
        """Of the positions of a window; logits are computed again for gradients."""
        real = real_positions(window, window.named["input_ids"].shape)
        a, b = (states.flatten(0, 1)[real] for states in (found, expected))
        errors = [
            checkpoint(self._of_positions, error, x, y, use_reentrant=False) * len(x) / len(a)
            for x, y in zip(a.split(_HEAD), b.split(_HEAD), strict=True)
        ]
        return torch.stack(errors).sum()

    def _of_positions(self, error: _Error, found: Tensor, expected: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.small.rounded):
            logits = [stack.end(rows[:, None])[:, 0] for stack, rows in ((self.small, found), (self.dense, expected))]
        return error(logits[0].float(), logits[1].detach().float())


def _divergence(ours: Tensor, theirs: Tensor) -> Tensor:
    """Σ p log(p / q) with the probabilities p of the dense model and q of the smaller, mean over rows of logits.

    >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
    >>> bool(torch.isclose(_divergence(q.log()[None], p.log()[None]), (p * (p / q).log()).sum()))
    True
    """
    return F.kl_div(ours.log_softmax(-1), theirs.log_softmax(-1), reduction="batchmean", log_target=True)


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """The relative error of rows of logits, in 2√p."""
    found, expected = (next(iter(judged({"logits": rows}).values())) for rows in (ours, theirs))
    return relative_error(found, expected, Batch(0, 1))


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
