"""How far what a model returns is from what another one returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.data.outputs import judged
from crystallite.data.positions import real_positions

__all__ = ["mean_output_error", "output_error", "relative_error"]


def relative_error(found: Tensor, expected: Tensor, batch: Batch) -> Tensor:
    """Σ (found − expected)² as a share of the variance of what was expected, with gradients; padding does not count.

    >>> relative_error(torch.tensor([[1.0], [4.0]]), torch.tensor([[1.0], [3.0]]), Batch(0, 2)).item()
    0.5
    """
    precise = torch.promote_types(expected.dtype, torch.float32)
    leading, width = (expected.shape[:-1], expected.shape[-1]) if expected.ndim > 1 else (expected.shape, 1)
    real = real_positions(batch, leading)
    a, b = (value.reshape(-1, width)[real].to(precise) for value in (found, expected))
    variance = (b - b.mean(0)).square().sum()
    if not variance > 0:  # of a single row, or of rows that are all the same, there is none
        variance = b.square().sum()
    return (a - b).square().sum() / variance.clamp_min(torch.finfo(precise).tiny)


def output_error(found: Any, expected: Any, batch: Batch) -> Tensor:
    """The relative error of a model's outputs, on average over its floating-point tensors, with gradients."""
    ours = judged(found)
    errors = [relative_error(ours[path], value, batch) for path, value in judged(expected).items()]
    return torch.stack(errors).mean() if errors else torch.zeros(())


def mean_output_error(model: nn.Module, dense: nn.Module, data: Sequence[Batch]) -> float:
    """The output error of a model beside the dense one, on average over some batches."""
    errors = [float(output_error(batch.run(model), batch.run(dense), batch)) for batch in data]
    return sum(errors) / len(errors)
