"""A model as a function of one floating-point tensor: the features whose effect is measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption

__all__ = ["Call", "calls", "evaluating"]


@dataclass(frozen=True)
class Call:
    """The arguments of a model for some samples, one of which holds the features."""

    arguments: dict[int | str, Any]  # by position or name
    features: int | str  # the argument (samples, features…) whose effect is measured

    @property
    def inputs(self) -> Tensor:
        return self.arguments[self.features]

    def rows(self, index: Tensor) -> Call:
        """The call for the samples at these places."""
        size = len(self.inputs)
        return replace(
            self,
            arguments={
                key: value[index.to(value.device)]
                if isinstance(value, Tensor) and value.shape[:1] == (size,)
                else value
                for key, value in self.arguments.items()
            },
        )

    def outputs(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(samples, …, outputs): what the model returns for these features: its logits, or its first tensor."""
        arguments = {**self.arguments, self.features: inputs}
        positional = [value for key, value in arguments.items() if isinstance(key, int)]
        found = model(*positional, **{key: value for key, value in arguments.items() if isinstance(key, str)})
        if isinstance(found, Mapping):
            found = (found["logits"], *found.values()) if "logits" in found else tuple(found.values())
        if isinstance(found, (tuple, list)):
            found = next((value for value in found if isinstance(value, Tensor) and value.ndim), None)
        if not isinstance(found, Tensor) or found.shape[:1] != inputs.shape[:1] or not found.is_floating_point():
            shown = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise InvalidOption(
                f"{type(model).__name__}: expected floating-point outputs ({len(inputs)} samples, …, outputs), "
                f"got {shown}"
            )
        return found if found.ndim > 1 else found[:, None]


def calls(data: Any, limit: int, chunk: int, device: torch.device | None = None) -> Iterator[Call]:
    """The samples of some data in calls of at most `chunk` samples, `limit` in all.

    data: an iterable of batches, such as a `DataLoader`; a tensor, a dict or a tuple alone is one batch, of which
    evenly spaced samples are taken. A batch is a tensor, a dict of keyword arguments, a tuple of positional arguments,
    or one of these followed by labels: (inputs, labels). Labels, also those in a dict, are not used. The first
    floating-point tensor with more than one axis holds the features.

    >>> [call.inputs.shape for call in calls([(torch.zeros(5, 2), torch.zeros(5))], limit=4, chunk=3)]
    [torch.Size([3, 2]), torch.Size([1, 2])]
    """
    alone = isinstance(data, (Tensor, np.ndarray, Mapping, tuple))
    if not alone and (not isinstance(data, Iterable) or isinstance(data, (str, bytes))):
        raise InvalidOption(f"data: expected a tensor, a dict or an iterable of batches, got {type(data).__name__}")
    left = limit
    for number, item in enumerate([data] if alone else data):
        call = _call(item, f"data: batch {number}", device)
        size = len(call.inputs)
        count = min(left, size)
        index = torch.linspace(0, size - 1, count).round().long() if alone else torch.arange(count)
        yield from (call.rows(part) for part in index.split(chunk) if len(part))
        left -= count
        if not left:
            return
    if left == limit:
        raise InvalidOption("data: expected at least one sample, got none")


def _call(item: Any, name: str, device: torch.device | None) -> Call:
    inputs = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(inputs, Mapping):
        given: dict[int | str, Any] = {str(key): value for key, value in inputs.items() if key != "labels"}
    else:
        given = dict(enumerate(inputs if isinstance(inputs, (tuple, list)) else [inputs]))
    arguments = {key: _tensor(value, device) for key, value in given.items()}
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return Call(arguments, key)
    found = [f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for v in arguments.values()]
    raise InvalidOption(
        f"{name}: expected a floating-point tensor (samples, features…), got {', '.join(found) or 'nothing'}; "
        "the effect of token numbers has no derivative: pass their embeddings as {'inputs_embeds': …}"
    )


def _tensor(value: Any, device: torch.device | None) -> Any:
    value = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
    return value.to(device) if isinstance(value, Tensor) else value


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module goes back to the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
