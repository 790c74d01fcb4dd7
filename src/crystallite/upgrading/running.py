"""A model called on a batch, gradients and all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crystallite.validation.batches import Batch
from crystallite.validation.outputs import main_output

__all__ = ["call", "device_of", "moved", "real_positions"]


def call(model: nn.Module, batch: Batch) -> Tensor:
    """The main output of a model on a batch, which is moved to where the model is."""
    device = device_of(model)
    positional = [moved(value, device) for value in batch.positional]
    return main_output(model(*positional, **{name: moved(value, device) for name, value in batch.named.items()}))


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def real_positions(batch: Batch, x: Tensor) -> Tensor | slice:
    """Positions that are no padding."""
    mask = batch.named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == x.shape[:-1]:
        return mask.flatten().bool().to(x.device)
    return slice(None)
