"""`RecordedCall`: what a model was called with, so that it can be called again by somebody who has only its folder."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor, nn

__all__ = ["RecordedCall", "RecordedInput", "recorded_call"]

_SEEN = 16  # calls that are looked at


@dataclass(frozen=True)
class RecordedInput:
    """One tensor of a call: its name, its kind, and which of its axes had several sizes."""

    name: str
    dtype: str
    shape: tuple[int, ...]  # of one sample, as in the first call
    axes: tuple[str, ...]  # a name for each axis that varied, the same where sizes always agreed; "" for the others
    positional: bool = False


@dataclass(frozen=True)
class RecordedCall:
    """The tensors that a model was called with, in order."""

    inputs: tuple[RecordedInput, ...]


def recorded_call(model: nn.Module, examples: Iterable[Any]) -> RecordedCall | None:
    """What a model takes, by inputs that it was called with; None if they are more than tensors with a row per sample.

    examples: each a tensor, a tuple of arguments or a dict of named ones; the first sixteen are looked at.

    >>> import torch
    >>> data = [{"a": torch.zeros(2, size), "b": torch.zeros(2, size, 3)} for size in (5, 7)]
    >>> for tensor in recorded_call(nn.Identity(), data).inputs:
    ...     print(tensor.name, tensor.shape, tensor.axes)
    a (5,) ('a_1',)
    b (5, 3) ('a_1', '')
    """
    calls: list[dict[str, Tensor]] = []
    positional: tuple[str, ...] = ()
    for example in islice(examples, _SEEN):
        arguments: Any = example if isinstance(example, (tuple, list, Mapping)) else (example,)
        if not isinstance(arguments, Mapping):
            positional = _names(model, len(arguments))
            if len(positional) < len(arguments):
                return None
            arguments = dict(zip(positional, arguments, strict=True))
        if not _is_plain(arguments) or (calls and not _alike(calls[0], arguments)):
            return None
        calls.append(dict(arguments))
    if not calls:
        return None
    names = _varying(calls)
    return RecordedCall(
        tuple(
            RecordedInput(
                name,
                str(x.dtype).removeprefix("torch."),
                tuple(x.shape[1:]),
                tuple(names.get((name, axis), "") for axis in range(1, x.ndim)),
                name in positional,
            )
            for name, x in calls[0].items()
        )
    )


def _names(model: nn.Module, count: int) -> tuple[str, ...]:
    """What positional arguments are called; the only one is the input, unless the model has a name for it."""
    if count == 1:
        return (str(getattr(model, "main_input_name", "input")),)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind in kinds]
    return tuple(known[:count])


def _is_plain(call: Mapping[str, Any]) -> bool:
    values = list(call.values())
    return all(isinstance(x, Tensor) and x.ndim and len(x) == len(values[0]) for x in values) and bool(values)


def _alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    kinds = ({name: (x.dtype, x.ndim) for name, x in call.items()} for call in (one, other))
    return next(kinds) == next(kinds)


def _varying(calls: Iterable[dict[str, Tensor]]) -> dict[tuple[str, int], str]:
    """A name for every axis that had several sizes; axes that always had the same one share it."""
    sizes: dict[tuple[str, int], list[int]] = {}
    for call in calls:
        for name, x in call.items():
            for axis, size in enumerate(x.shape[1:], 1):
                sizes.setdefault((name, axis), []).append(size)
    found: dict[tuple[int, ...], str] = {}
    varied = {place: tuple(seen) for place, seen in sizes.items() if len(set(seen)) > 1}
    return {place: found.setdefault(seen, f"{place[0]}_{place[1]}") for place, seen in varied.items()}
