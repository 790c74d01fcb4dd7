"""The cheapest budget whose deviation from the dense model is bounded, with a confidence that the data support.

Learn-then-Test (Angelopoulos et al., 2021): budgets are tried from expensive to cheapest, in an order fixed before the
data are seen. Each model is fitted on some samples and tested on others; "its risk is above the tolerance" is rejected
where the Hoeffding–Bentkus p-value is at most 1 − confidence. The first budget that is not rejected ends the search, so
that the chance of any wrong rejection stays below 1 − confidence however many budgets are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from scipy.special import bdtr
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import class_axis, tensors
from crystallite.models.record import RISKS, Guarantee

__all__ = ["BUDGETS", "cheapest", "p_value", "sample_losses", "set_aside"]

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
_SHARE = 0.3  # of the samples, set aside before anything is fitted
_MOST_SAMPLES = 10_000_000
Candidate = TypeVar("Candidate")


def cheapest(
    candidate: Callable[[float], Candidate | None],
    losses: Callable[[Candidate], np.ndarray],
    tolerance: float,
    confidence: float,
    risk: str = "deviation",
    budgets: Sequence[float] = BUDGETS,
) -> tuple[Candidate, Guarantee]:
    """The last candidate along the budgets for which the tolerance is shown to hold, and what was shown.

    candidate: what is made for a budget, None where it cannot be reached. losses: of each sample set aside, in [0, 1].
    Refused if not even the first budget can be shown to hold.

    >>> found, guarantee = cheapest(lambda budget: budget, lambda b: np.full(500, (1 - b) / 10), 0.05, 0.95)
    >>> found, guarantee.observed, len(guarantee.tested)
    (0.8, 0.019999999999999997, 3)
    """
    best: tuple[float, Candidate] | None = None
    tested: list[tuple[float, float, float]] = []
    samples = 0
    for budget in budgets:
        made = candidate(budget)
        if made is None:
            break
        found = losses(made)
        mean, samples = float(found.mean()), len(found)
        tested.append((budget, mean, p_value(mean, samples, tolerance)))
        if tested[-1][2] > 1 - confidence:
            break
        best = budget, made
    if best is None:
        raise InvalidOption(_refusal(tested, samples, tolerance, confidence, risk))
    return best[1], Guarantee(best[0], risk, tolerance, confidence, samples, tuple(tested))


def p_value(mean: float, samples: int, tolerance: float) -> float:
    """Hoeffding–Bentkus: how likely a mean loss this small is, at most, if the expected loss is above the tolerance.

    For losses between 0 and 1 of samples that are independent and alike.

    >>> round(p_value(0.0, 58, 0.05), 3), round(p_value(0.05, 1000, 0.05), 3)
    (0.051, 1.0)
    """
    observed = min(mean, tolerance)
    hoeffding = math.exp(-samples * _divergence(observed, tolerance))
    bentkus = math.e * float(bdtr(max(math.ceil(samples * mean - 1e-9), 0), samples, tolerance))
    return min(hoeffding, bentkus, 1.0)


def _divergence(a: float, b: float) -> float:
    """Kullback–Leibler divergence of two coins."""
    head = a * math.log(a / b) if a else 0.0
    return head + (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else head


def samples_needed(mean: float, tolerance: float, confidence: float) -> int | None:
    """The fewest samples on which this mean loss would show the tolerance; None if no number does.

    >>> samples_needed(0.0, 0.05, 0.95), samples_needed(0.05, 0.05, 0.95)
    (59, None)
    """
    if mean >= tolerance:
        return None
    low, high = 0, 1
    while p_value(mean, high, tolerance) > 1 - confidence:
        low, high = high, 2 * high
        if high > _MOST_SAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if p_value(mean, middle, tolerance) <= 1 - confidence else (middle, high)
    return high


def _refusal(
    tested: Sequence[tuple[float, float, float]], samples: int, tolerance: float, confidence: float, risk: str
) -> str:
    if not tested:
        return f"tolerance {tolerance:g}: no budget of {', '.join(f'{b:g}' for b in BUDGETS)} can be reached here"
    budget, mean, _ = tested[0]
    text = (
        f"tolerance {tolerance:g} cannot be shown with confidence {confidence:g}, not even for a budget of {budget:g}: "
        f"{RISKS[risk]} {mean:.3g} on {samples} samples set aside"
    )
    needed = samples_needed(mean, tolerance, confidence)
    if needed is None:
        return f"{text}; no number of samples would show it: raise tolerance="
    return f"{text}; it would take about {math.ceil(needed / _SHARE)} samples of calibration data instead"


def check_tolerance(tolerance: float, confidence: float, risk: str) -> None:
    """Refuse options that say nothing."""
    if not 0 < tolerance < 1:
        raise InvalidOption(f"tolerance: expected a number between 0 and 1, got {tolerance!r}")
    if not 0 < confidence < 1:
        raise InvalidOption(f"confidence: expected a number between 0 and 1, got {confidence!r}")
    check_choice("risk", risk, list(RISKS))


def set_aside(data: Calibration, seed: int) -> tuple[Calibration, tuple[Batch, ...]]:
    """The data without three tenths of its samples, drawn at random, and these.

    At random from every batch: data that come in an order are no reason for samples not to be alike.

    >>> rest, aside = set_aside(Calibration.read(torch.zeros(100, 2)), 0)
    >>> sum(b.size for b in rest.all) + sum(b.size for b in aside)
    100
    """
    rng = torch.Generator().manual_seed(seed)
    parts: list[list[Batch]] = []
    aside: list[Batch] = []
    for side in (data.fitted, data.held_out):
        parts.append([])
        for batch in side:
            drawn = torch.rand(batch.size, generator=rng) < _SHARE
            for chosen, where in ((~drawn, parts[-1]), (drawn, aside)):
                if chosen.any():
                    where.append(batch.take(chosen))
    if not all([*parts, aside]):
        raise InvalidOption(f"calibration: expected samples to fit on and to set aside, got {_samples(data)} in all")
    rest = replace(data, fitted=tuple(parts[0]), held_out=tuple(parts[1]), aside=sum(batch.size for batch in aside))
    return rest, tuple(aside)


def _samples(data: Calibration) -> int:
    return sum(batch.size for batch in data.all)


def sample_losses(model: nn.Module, dense: nn.Module, data: Sequence[Batch], risk: str) -> np.ndarray:
    """(samples,) the loss of each, between 0 and 1; the largest over the model's outputs.

    "deviation": ‖y′ − y‖ / ‖y‖, 1 where it is more; "disagreement": the share of decisions, argmax over
    classes, that differ. Padding does not count. A loss depends on its own sample alone, as the test asks for.
    """
    found = []
    for batch in data:
        ours, expected = tensors(batch.run(model)), tensors(batch.run(dense))
        rows = [
            _loss(ours[path], value, batch, risk)
            for path, value in expected.items()
            if value.is_floating_point() and value.ndim and len(value) == batch.size and _decides(value, risk)
        ]
        if not rows:
            raise InvalidOption(f"risk {risk!r}: no output of the model has a row per sample that it can be taken of")
        found.append(torch.stack(rows).amax(0).cpu().numpy())
    return np.concatenate(found)


def _decides(value: Tensor, risk: str) -> bool:
    return risk == "deviation" or (value.ndim > 1 and value.shape[class_axis(value)] > 1)


def _loss(ours: Tensor, expected: Tensor, batch: Batch, risk: str) -> Tensor:
    mask = batch.named.get("attention_mask")
    padded = isinstance(mask, Tensor) and expected.ndim > 2 and mask.shape == expected.shape[:2]
    keep = mask.to(expected.device).bool() if padded and isinstance(mask, Tensor) else None
    if risk == "disagreement":
        axis = class_axis(expected) if keep is None else -1
        other = (ours.argmax(axis) != expected.argmax(axis)).double()
        if keep is not None:
            return (other.reshape(*keep.shape, -1) * keep[..., None]).sum((1, 2)) / _count(keep, other)
        return other.reshape(batch.size, -1).mean(1)
    a, b = ours.double(), expected.double()
    if keep is not None:
        a, b = (v.reshape(*keep.shape, -1) * keep[..., None] for v in (a, b))
    a, b = (v.reshape(batch.size, -1) for v in (a, b))
    apart, size = (a - b).norm(dim=1), b.norm(dim=1)
    ratio = torch.where(apart == 0, 0.0, apart / size)
    return ratio.nan_to_num(1.0, 1.0, 1.0).clamp(0.0, 1.0)


def _count(keep: Tensor, other: Tensor) -> Tensor:
    return (keep.sum(1) * (other.numel() // keep.numel())).clamp_min(1)
