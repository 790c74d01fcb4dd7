"""Data as batches, and a model run on one of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.outputs import same_structure, tensors

__all__ = ["Batch", "batches", "check_repeatable", "first_samples", "repeatable", "run"]

# what two orders of the same sums may differ by at the end of a deep network, relative to the size of its output
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what it should have answered."""

    first: int  # the index of its first sample among all samples
    size: int
    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    target: Tensor | None = None


def batches(data: Any) -> Iterator[Batch]:
    """The batches of some data, numbered through.

    data: an iterable of batches, such as a `DataLoader`; a tensor or a dict alone is one batch. A batch is a tensor,
    a dict of keyword arguments whose "labels" are the target, or a tuple (inputs, target) where the inputs are a
    tensor, a dict, or a tuple of positional arguments. The first axis of the first tensor counts the samples.

    >>> [(b.first, b.size, b.target) for b in batches([torch.zeros(3, 2), torch.zeros(1, 2)])]
    [(0, 3, None), (3, 1, None)]
    >>> list(batches([]))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: data: expected at least one sample, got none
    """
    if isinstance(data, (Tensor, np.ndarray, Mapping)):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise InvalidOption(f"data: expected a tensor, a dict or an iterable of batches, got {type(data).__name__}")
    first = 0
    for number, item in enumerate(data):
        batch = _batch(item, first, f"data: batch {number}")
        if batch.size:
            yield batch
        first += batch.size
    if not first:
        raise InvalidOption("data: expected at least one sample, got none")


def repeatable(data: Any) -> Any:
    """The data in a form that can be gone through again: an iterator is read into a list."""
    return list(data) if isinstance(data, Iterator) else data


def _batch(item: Any, first: int, name: str) -> Batch:
    target: Any = None
    inputs = item
    if isinstance(item, (tuple, list)):
        if len(item) not in (1, 2):
            raise InvalidOption(
                f"{name}: expected (inputs, target), got {len(item)} parts; several positional inputs go into a tuple: "
                "((a, b), target), or ((a, b),) without a target"
            )
        inputs, target = item if len(item) == 2 else (item[0], None)
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {str(key): _tensor(value) for key, value in inputs.items()}
        target = named.pop("labels", None) if target is None else target
    else:
        positional = tuple(map(_tensor, inputs)) if isinstance(inputs, (tuple, list)) else (_tensor(inputs),)
    target = _tensor(target)
    if target is not None and not isinstance(target, Tensor):
        raise InvalidOption(f"{name}: expected a tensor as the target, got {type(target).__name__}")
    counted = next((v for v in (*positional, *named.values()) if isinstance(v, Tensor)), None)
    if counted is None or counted.ndim == 0:
        found = "a single number" if counted is not None else f"no tensor in {type(inputs).__name__}"
        raise InvalidOption(f"{name}: expected a tensor whose first axis counts samples, got {found}")
    return Batch(first, len(counted), positional, named, target)


def _tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def run(model: nn.Module, batch: Batch) -> Any:
    """What the model returns, without gradients; inputs are moved to where the model is.

    Labels that came in a dict are passed on to a model that takes them, as transformers models do for their own loss.
    """
    weight = next(model.parameters(), None)
    device = None if weight is None else weight.device
    named = dict(batch.named)
    if named and batch.target is not None and "labels" in inspect.signature(model.forward).parameters:
        named["labels"] = batch.target
    positional = [_moved(value, device) for value in batch.positional]
    with torch.no_grad():
        try:
            return model(*positional, **{name: _moved(value, device) for name, value in named.items()})
        except (TypeError, RuntimeError) as error:
            raise InvalidOption(
                f"the {type(model).__name__} cannot be called with the batch at sample {batch.first}: {error}; data is "
                "a list of batches, a batch (inputs, target), several positional inputs ((a, b), target)"
            ) from error


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


def check_repeatable(model: nn.Module, batch: Batch, who: str) -> Any:
    """What the model returns; refuses one whose outputs depend on chance, or on what else is in the batch.

    >>> check_repeatable(nn.Dropout(), Batch(0, 64, (torch.ones(64),)), "the original")
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: the original gives different outputs on the same inputs (output): is a
    dropout left on? Call .eval() first
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.track_running_stats:
            raise InvalidOption(
                f"{who}: {name or type(module).__name__} is in training mode, so outputs depend on what else is in the "
                "batch and running it changes it; call .eval() first"
            )
    once = run(model, batch)
    again = tensors(run(model, batch))
    for path, tensor in same_structure(tensors(once), again).items():
        if not equal_up_to_rounding(tensor, again[path]):
            raise InvalidOption(
                f"{who} gives different outputs on the same inputs ({path}): is a dropout left on? Call .eval() first"
            )
    return once


def equal_up_to_rounding(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by no more than a different order of sums explains. NaN equals NaN."""
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (found, expected))
    same_gaps = torch.equal(found.isfinite(), expected.isfinite())
    return same_gaps and bool((a - b).norm() <= ROUNDING.get(expected.dtype, 1e-1) * b.norm())


def first_samples(batch: Batch, count: int) -> Batch:
    """The batch cut to a few samples."""

    def cut(value: Any) -> Any:
        return value[:count] if isinstance(value, Tensor) and value.shape[:1] == (batch.size,) else value

    named = {name: cut(value) for name, value in batch.named.items()}
    return replace(batch, size=min(count, batch.size), positional=tuple(map(cut, batch.positional)), named=named)
