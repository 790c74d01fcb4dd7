"""Calibration data: what layers are fitted on, and what they are judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, batches
from crystallite.data.positions import count_positions

__all__ = ["Calibration", "FittedOn"]

_LARGEST_BATCH = 256  # samples run at once: bounds the memory that activations take
_POSITIONS = 2**15  # tokens, or samples without a time axis, that layers are fitted on and judged by, at least
_POSITIONS_PER_INPUT = 16  # of the widest layer
_MOST_BYTES = 2**28  # of inputs that polishing is trained with
_HELD_OUT = 0.2


@dataclass(frozen=True)
class FittedOn:
    """How much of the calibration data layers were fitted on, how much judged them, and how much was not looked at.

    >>> str(FittedOn(52, 5200, 12, 1200, 64, 400))
    'layers were fitted on 52 samples (5,200 positions) and judged by 12 others (1,200), the first 64 of 400 given'
    """

    samples: int
    positions: int  # of them: tokens that are no padding; as many as samples where these have none
    held_out: int  # samples that judged
    held_out_positions: int
    read: int  # samples of both kinds, and those set aside for a guarantee
    given: int | None  # samples of the data; None: more than were read, how many is not known
    trained_on: int = 0  # samples that polishing may have learned from beside those fitted on

    def __str__(self) -> str:
        fitted, judged = f"{self.samples:,} samples", f"{self.held_out:,} others"
        if self.positions != self.samples:
            fitted, judged = f"{fitted} ({self.positions:,} positions)", f"{judged} ({self.held_out_positions:,})"
        said = f"layers were fitted on {fitted} and judged by {judged}"
        if self.given == self.read:
            return said
        first = f"{said}, the first {self.read:,} of {'more' if self.given is None else f'{self.given:,}'} given"
        return f"{first}; polishing learns from {self.trained_on:,} more" if self.trained_on else first


@dataclass(frozen=True)
class Calibration:
    """Batches to fit on, and later ones that only judge. Targets that came with the data are not looked at."""

    fitted: tuple[Batch, ...]
    held_out: tuple[Batch, ...]
    more: tuple[Batch, ...] = ()  # that training reads beside those fitted on
    unread: int | None = 0  # samples that followed; None: some, how many is not known
    aside: int = 0  # samples set aside before

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
        unread: int | None = 0
        positions, size, most = 0, 0, max(_POSITIONS, _POSITIONS_PER_INPUT * widest)
        for batch in batches(data):
            enough = positions >= most
            if enough and (not training or size >= _MOST_BYTES):
                unread = _samples_of(data, batch.offset)
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
        return cls(tuple(found[:-held_out]), tuple(found[-held_out:]), tuple(more), unread)

    @property
    def all(self) -> tuple[Batch, ...]:
        return self.fitted + self.held_out

    @property
    def size(self) -> FittedOn:
        """In samples and positions."""
        (fitted, positions), (held_out, judging), (more, _) = map(_size, (self.fitted, self.held_out, self.more))
        read = fitted + held_out + self.aside
        given = None if self.unread is None else read + more + self.unread
        return FittedOn(fitted, positions, held_out, judging, read, given, more)


def _size(some: tuple[Batch, ...]) -> tuple[int, int]:
    """Samples and positions."""
    return sum(batch.size for batch in some), sum(map(count_positions, some))


def _samples_of(data: Any, read: int) -> int | None:
    """How many samples follow those that were read, where that is known without going through them; else None."""
    known = getattr(data, "samples", None)  # of texts and images
    if isinstance(data, list):
        known = sum(batch.size for batch in batches(data))
    return known - read if isinstance(known, int) else None
