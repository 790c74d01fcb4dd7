"""A model called on a batch, gradients and all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.data.outputs import main_output

__all__ = ["call", "device_of", "moved", "real_positions", "returned"]


def call(model: nn.Module, batch: Batch) -> Tensor:
    """The main output of a model on a batch, which is moved to where the model is."""
    return main_output(returned(model, batch))


def returned(model: nn.Module, batch: Batch) -> Any:
    """All that a model returns on a batch, which is moved to where the model is."""
    device = device_of(model)
    positional = [moved(value, device) for value in batch.positional]
    return model(*positional, **{name: moved(value, device) for name, value in batch.named.items()})


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def real_positions(batch: Batch, leading: torch.Size) -> Tensor | slice:
    """Which rows of activations (leading…, features) are no padding: an `attention_mask` of that shape says it."""
    mask = batch.named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == leading:
        return mask.flatten().bool().cpu()
    return slice(None)
