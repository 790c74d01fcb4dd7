"""Positions of a batch: the rows of activations (samples, or tokens of sequences), and which of them are no padding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from crystallite.data.batch import Batch

__all__ = ["count_positions", "real_positions", "real_rows"]


def count_positions(batch: Batch) -> int:
    """Tokens of sequences that are no padding, or samples.

    >>> count_positions(Batch(0, 2, (torch.zeros(2, 5, 3),))), count_positions(Batch(0, 2, (torch.zeros(2, 5),)))
    (10, 2)
    """
    mask = batch.named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return int(mask.bool().sum())
    value = next(v for v in batch.values if isinstance(v, Tensor))
    sequence = (value.ndim == 2 and not value.is_floating_point()) or value.ndim == 3
    return math.prod(value.shape[:2]) if sequence else batch.size


def real_positions(batch: Batch, leading: torch.Size) -> Tensor | slice:
    """Which rows of activations (leading…, features) are no padding: an `attention_mask` of as many positions says it.

    Experts and routers see the positions of all samples in one row.
    """
    mask = batch.named.get("attention_mask")
    if isinstance(mask, Tensor) and leading in (mask.shape, torch.Size([mask.numel()])):
        return mask.flatten().bool().cpu()
    return slice(None)


def real_rows(batch: Batch, leading: torch.Size, most: int, seed: int) -> Tensor:
    """The indices of rows that are no padding, at most so many, chosen at random.

    The same for every layer that reads positions of this shape, in whatever model.

    >>> batch = Batch(0, 2, named={"attention_mask": torch.tensor([[1, 0], [1, 1]])})
    >>> real_rows(batch, torch.Size([2, 2]), 9, 0).tolist()
    [0, 2, 3]
    """
    rows = torch.arange(math.prod(leading))[real_positions(batch, leading)]
    if len(rows) <= most:
        return rows
    rng = torch.Generator().manual_seed(seed * 1_000_003 + batch.offset)
    return rows[torch.randperm(len(rows), generator=rng)[:most].sort().values]
