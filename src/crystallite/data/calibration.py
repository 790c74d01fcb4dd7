"""Calibration data: what layers are fitted on, and what they are judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, batches
from crystallite.data.positions import count_positions

__all__ = ["Calibration"]

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

        >>> import torch
        >>> parts = Calibration.read([torch.zeros(4, 3)] * 10)
        >>> len(parts.fitted), len(parts.held_out)
        (8, 2)
        >>> [[batch.size for batch in Calibration.read(torch.zeros(size, 3)).all] for size in (2, 4, 10)]
        [[1, 1], [3, 1], [8, 2]]
        """
        found: list[Batch] = []
        more: list[Batch] = []
        positions, size, most = 0, 0, max(_POSITIONS, _POSITIONS_PER_INPUT * widest)
        for batch in batches(data):
            enough = positions >= most
            if enough and (not training or size >= _MOST_BYTES):
                break
            (more if enough else found).extend(batch.without_target().split(_LARGEST_BATCH))
            positions += count_positions(batch)
            size += sum(value.nbytes for value in batch.values if isinstance(value, Tensor))
        if len(found) == 1:
            fitted = min(math.ceil(found[0].size * (1 - _HELD_OUT)), found[0].size - 1)
            found = list(found[0].split(max(1, fitted)))
        if len(found) < 2:
            raise InvalidOption(
                "calibration: expected at least two samples, one to fit on and one to judge by, got one"
            )
        held_out = max(1, int(len(found) * _HELD_OUT))
        return cls(tuple(found[:-held_out]), tuple(found[-held_out:]), tuple(more))

    @property
    def all(self) -> tuple[Batch, ...]:
        return self.fitted + self.held_out
