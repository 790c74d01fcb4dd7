"""Two systems' outputs side by side: a few numbers per sample as batches go by, and what they say in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import class_axis, same_structure, tensors

__all__ = ["Case", "Comparison", "OutputComparison", "RunningComparison"]

_SMALL = 0.1  # an output smaller than this share of the usual size is measured against that share
_STATES = ("hidden_state", "pooler_output", "embed", "attentions")  # in names of outputs that decide nothing
_AT_ONCE = 1 << 22  # numbers converted to float64 together


@dataclass(frozen=True)
class Case:
    """One sample on which the two systems differ, and the largest entry of the output of each."""

    index: int
    output: str
    deviation: float
    original: tuple[int, float]  # where the largest entry is, and the entry
    reorganized: tuple[int, float]

    def __str__(self) -> str:
        (i, x), (j, y) = self.original, self.reorganized
        return (
            f"sample {self.index}, {self.output}: deviation {self.deviation:.3g}, largest [{i}] {x:.4g} → [{j}] {y:.4g}"
        )


@dataclass(frozen=True, eq=False)
class OutputComparison:
    """One output over all samples. An output whose first axis does not count samples has one row per batch."""

    path: str
    index: np.ndarray  # (rows,) the sample, or the first of the batch
    difference: np.ndarray  # (rows,) ‖y′ − y‖
    norm: np.ndarray  # ‖y‖ of the original
    other_norm: np.ndarray
    product: np.ndarray  # y′ · y
    agreement: np.ndarray  # share of equal decisions: argmax over classes; NaN where there is none to take
    place: np.ndarray  # of the original's largest entry
    value: np.ndarray
    other_place: np.ndarray
    other_value: np.ndarray

    @cached_property
    def finite(self) -> np.ndarray:
        """(rows,) whether both outputs are numbers throughout."""
        return np.isfinite(self.norm) & np.isfinite(self.other_norm)

    @cached_property
    def deviation(self) -> np.ndarray:
        """(rows,) ‖y′ − y‖ / ‖y‖, where ‖y‖ counts as at least a tenth of its root mean square over all samples.

        Without that floor a regression whose output happens to be near 0 would have any relative deviation. Infinite
        where an output is not finite.
        """
        return self.deviation_where(np.sqrt(np.mean(self.norm[self.finite] ** 2)) if self.finite.any() else 0.0)

    def deviation_where(self, usual: float) -> np.ndarray:
        """(rows,) the relative deviation where the usual size of the original's output is known."""
        size = np.maximum(self.norm, _SMALL * usual)
        same = self.difference == 0
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(same, 0.0, self.difference / size)
        return np.where(self.finite, ratio, np.inf)

    @cached_property
    def cosine(self) -> np.ndarray:
        """(rows,) of the angle between the two outputs; two zeros count as equal, −1 where one is not finite."""
        size = self.norm * self.other_norm
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(size > 0, self.product / size, self.norm == self.other_norm)
        return np.where(self.finite, np.clip(ratio, -1, 1), -1.0)

    @property
    def decides(self) -> bool:
        """Whether an argmax can be taken, of an output that is not called states or embeddings."""
        if any(name in self.path for name in _STATES):
            return False
        return bool(len(self.agreement)) and not np.isnan(self.agreement).any()

    def case(self, row: int) -> Case:
        """One row with its outputs summed up."""
        original = int(self.place[row]), float(self.value[row])
        other = int(self.other_place[row]), float(self.other_value[row])
        return Case(int(self.index[row]), self.path, float(self.deviation[row]), original, other)

    def to_json(self) -> dict[str, Any]:
        quantiles = np.quantile(self.deviation, [0.5, 0.99, 1.0], method="higher").tolist()
        return {
            "output": self.path,
            "deviation": dict(zip(("median", "99%", "worst"), quantiles, strict=True)),
            "mean_deviation": float(self.deviation.mean()),
            "mean_cosine": float(self.cosine.mean()),
            "worst_cosine": float(self.cosine.min()),
            "agreement": float(self.agreement.mean()) if self.decides else None,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """All outputs over all samples."""

    samples: int
    outputs: tuple[OutputComparison, ...]

    def worst(self, count: int = 5) -> tuple[Case, ...]:
        """The samples with the largest deviations in any output, worst first."""
        heads = [(o, row) for o in self.outputs for row in np.argsort(-o.deviation, kind="stable")[:count]]
        ordered = sorted(heads, key=lambda head: (-head[0].deviation[head[1]], head[0].index[head[1]]))
        return tuple(output.case(int(row)) for output, row in ordered[:count])

    @property
    def not_finite(self) -> tuple[Case, ...]:
        """Samples with NaN or infinity in an output of either system."""
        return tuple(o.case(int(row)) for o in self.outputs for row in np.flatnonzero(~o.finite))

    @property
    def deviation(self) -> np.ndarray:
        """(samples,) the largest relative deviation of any output that has a row per sample."""
        rows = [o.deviation for o in self.outputs if len(o.deviation) == self.samples]
        return np.max(rows, axis=0) if rows else np.zeros(self.samples)


class RunningComparison:
    """The comparison while batches come in. Holds ten numbers per sample and output, never an output."""

    def __init__(self) -> None:
        self.samples = 0
        self._rows: dict[str, list[np.ndarray]] = {}

    def add(self, batch: Batch, original: Any, reorganized: Any) -> Comparison:
        """What both systems returned on a batch; returns the comparison of this batch alone."""
        expected, found = tensors(original), tensors(reorganized)
        same_structure(expected, found)
        for path in self._rows.keys() ^ expected.keys() if self._rows else ():
            raise InvalidOption(f"{path}: expected the same outputs for all batches, this one comes and goes")
        new = {path: list(_rows(tensor, found[path], batch)) for path, tensor in expected.items()}
        for path, rows in new.items():
            self._rows.setdefault(path, []).extend(rows)
        self.samples += batch.size
        return _comparison(batch.size, new)

    def done(self) -> Comparison:
        """All that came in, compared."""
        return _comparison(self.samples, self._rows)


def _comparison(samples: int, parts: Mapping[str, list[np.ndarray]]) -> Comparison:
    joined = {path: np.concatenate(rows) for path, rows in parts.items() if rows}
    return Comparison(samples, tuple(OutputComparison(path, *rows.T) for path, rows in joined.items()))


def _rows(original: Tensor, reorganized: Tensor, batch: Batch) -> Iterator[np.ndarray]:
    """(rows, 10) the columns of an `OutputComparison`, a few samples at a time."""
    if original.numel() == 0:
        return
    whole = original.ndim == 0 or len(original) != batch.size
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (original.detach(), reorganized.detach())]
    pair = [t.unsqueeze(0) if whole else t for t in real]
    step = max(1, _AT_ONCE // pair[0][0].numel())
    for start in range(0, len(pair[0]), step):
        parts = [t[start : start + step] for t in pair]
        agreement = _agreement(parts[0], parts[1], -1 if whole else class_axis(parts[0]))
        a, b = (t.reshape(len(t), -1).cpu().double() for t in parts)  # (samples, numbers)
        index = torch.arange(batch.offset + start, batch.offset + start + len(a))
        largest = [t.max(1) for t in (a, b)]
        columns = [index, (b - a).norm(dim=1), a.norm(dim=1), b.norm(dim=1), (a * b).sum(1), agreement]
        columns += [part for m in largest for part in (m.indices, m.values)]
        yield torch.stack([column.double() for column in columns], 1).numpy()


def _agreement(a: Tensor, b: Tensor, axis: int) -> Tensor:
    """(samples,) share of decisions in which two outputs agree."""
    if a.is_floating_point() and a.ndim > 1 and a.shape[axis] > 1:
        same = a.argmax(axis) == b.argmax(axis)
    elif a.is_floating_point():
        return torch.full((len(a),), float("nan"))
    else:
        same = a == b
    return same.reshape(len(a), -1).double().mean(1).cpu()
