"""Calibration data: what layers are fitted on, and what they are judged by."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, batches
from crystallite.data.running import real_positions

__all__ = ["Calibration", "real_rows"]

_LARGEST_BATCH = 256  # samples run at once: bounds the memory that activations take
_POSITIONS = 2**15  # tokens, or samples without a time axis, that layers are fitted on and judged by, at least
_POSITIONS_PER_INPUT = 16  # of the widest layer
_MOST_BYTES = 2**28  # of inputs that polishing is trained with
_HELD_OUT = 0.2


@dataclass(frozen=True)
class Calibration:
    """Batches to fit on, and later ones that only judge. Targets that came with the data are not looked at."""

    fitted: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    more: tuple[Batch, ...] = ()  # that training reads beside those fitted on

    @classmethod
    def read(cls, data: Any, widest: int = 1, training: bool = False) -> Calibration:
        """The batches of an iterable, the last fifth of them (at least one) held out.

        A single batch is cut in two. Layers are fitted on the first 32,768 positions, or 16 for each input of the
        widest layer, so that it takes the same time however many there are; training gains from more, and reads up to
        256 MB. An endless loader is fine.

        >>> parts = Calibration.read([torch.zeros(4, 3)] * 10)
        >>> len(parts.fitted), len(parts.held_out)
        (8, 2)
        """
        found: list[Batch] = []
        more: list[Batch] = []
        call_counts, size, most = 0, 0, max(_POSITIONS, _POSITIONS_PER_INPUT * widest)
        for batch in batches(data):
            enough = call_counts >= most
            if enough and (not training or size >= _MOST_BYTES):
                break
            (more if enough else found).extend(_cut(replace(batch, target=None), _LARGEST_BATCH))
            call_counts += _positions(batch)
            size += sum(v.nbytes for v in (*batch.positional, *batch.named.values()) if isinstance(v, Tensor))
        if len(found) == 1:
            found = list(_cut(found[0], math.ceil(found[0].size * (1 - _HELD_OUT))))
        if len(found) < 2:
            raise InvalidOption(
                "calibration: expected at least two samples, one to fit on and one to judge by, got one"
            )
        held_out = max(1, int(len(found) * _HELD_OUT))
        return cls(tuple(found[:-held_out]), tuple(found[-held_out:]), tuple(more))

    @property
    def all(self) -> tuple[Batch, ...]:
        return self.fitted + self.held_out


def _cut(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in parts of at most this many samples; values whose first axis does not count samples go with each."""

    def part(value: Any, start: int) -> Any:
        counts = isinstance(value, Tensor) and value.shape[:1] == (batch.size,)
        return value[start : start + size] if counts else value

    if batch.size <= size:
        yield batch
        return
    for start in range(0, batch.size, size):
        yield Batch(
            batch.first + start,
            min(size, batch.size - start),
            tuple(part(value, start) for value in batch.positional),
            {name: part(value, start) for name, value in batch.named.items()},
        )


def _positions(batch: Batch) -> int:
    """Tokens of a sequence, or samples."""
    value = next(v for v in (*batch.positional, *batch.named.values()) if isinstance(v, Tensor))
    sequence = (value.ndim == 2 and not value.is_floating_point()) or value.ndim == 3
    return math.prod(value.shape[:2]) if sequence else batch.size


def real_rows(batch: Batch, leading: torch.Size, most: int, seed: int) -> Tensor:
    """Which rows of activations (leading…, features) are looked at: no padding, and at most so many, taken at random.

    The same for every layer that reads positions of this shape, in whatever model.

    >>> batch = Batch(0, 2, named={"attention_mask": torch.tensor([[1, 0], [1, 1]])})
    >>> real_rows(batch, torch.Size([2, 2]), 9, 0).tolist()
    [0, 2, 3]
    """
    rows = torch.arange(math.prod(leading))[real_positions(batch, leading)]
    if len(rows) <= most:
        return rows
    rng = torch.Generator().manual_seed(seed * 1_000_003 + batch.first)
    return rows[torch.randperm(len(rows), generator=rng)[:most].sort().values]
