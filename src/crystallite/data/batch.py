"""Data as batches, and models run on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.arrays import odd_tensor
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.data.outputs import equal_up_to_rounding, main_output, same_structure, tensors

__all__ = ["Batch", "batches", "check_repeatable", "evaluating", "is_one_batch", "repeatable"]


_BAD_CALL = (TypeError, RuntimeError, ValueError, LookupError, AttributeError, AssertionError)  # raised by models
_FORM = "; data is a list of batches, a batch (inputs, target), several positional inputs ((a, b), target)"


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what it should have answered."""

    offset: int  # the index of its first sample among all samples
    size: int
    positional: tuple[Any, ...] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    target: Tensor | None = None

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments of the model."""
        return (*self.positional, *self.named.values())

    @property
    def arguments(self) -> Any:
        """The arguments as one value: a dict where they have names, else a tuple."""
        return dict(self.named) if self.named else self.positional

    @property
    def sample(self) -> str:
        """What one of the samples is, in words: the shapes of its tensors, of several alike the first.

        >>> Batch(0, 2, named={"ids": torch.zeros(2, 7), "mask": torch.zeros(2, 7), "x": torch.zeros(2, 3, 9)}).sample
        'ids [7], x [3, 9]'
        """
        found: dict[torch.Size, str] = {}
        for name, value in (*(("shape", value) for value in self.positional), *self.named.items()):
            if self._counts(value):
                found.setdefault(value.shape[1:], f"{name} {list(value.shape[1:])}")
        return ", ".join(found.values())

    def slice(self, start: int, stop: int) -> Batch:
        """The samples from one index up to another; values whose first axis does not count samples stay whole.

        >>> Batch(7, 3, (torch.tensor([1, 2, 3]), torch.zeros(2))).slice(1, 9)
        Batch(offset=8, size=2, positional=(tensor([2, 3]), tensor([0., 0.])), named={}, target=None)
        """
        start, stop, _ = slice(start, stop).indices(self.size)
        cut = self._with(lambda value: value[start:stop] if self._counts(value) else value)
        return replace(cut, offset=self.offset + start, size=max(stop - start, 0))

    def first(self, count: int) -> Batch:
        """The first samples, at most so many."""
        return self.slice(0, count)

    def take(self, chosen: Tensor) -> Batch:
        """The samples at some indices, or those that a mask marks.

        >>> Batch(0, 3, (torch.tensor([1, 2, 3]),)).take(torch.tensor([True, False, True])).positional
        (tensor([1, 3]),)
        """
        found = self._with(lambda value: value[chosen.to(value.device)] if self._counts(value) else value)
        return replace(found, size=int(chosen.sum()) if chosen.dtype == torch.bool else len(chosen))

    def split(self, size: int) -> Iterator[Batch]:
        """The batch in parts of at most this many samples."""
        if self.size <= size:
            yield self
        else:
            yield from (self.slice(start, start + size) for start in range(0, self.size, size))

    def to(self, device: torch.device) -> Batch:
        """The same with all tensors on a device."""
        return self.map(lambda value: value.to(device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same with other tensors."""
        return self._with(lambda value: change(value) if isinstance(value, Tensor) else value)

    def without_target(self) -> Batch:
        """The arguments alone."""
        return replace(self, target=None)

    def run(self, model: nn.Module, gradients: bool = False) -> Any:
        """All that the model returns; the batch is moved to where the model is.

        Labels that came in a dict are passed on to a model that takes them, as transformers models do for their own
        loss. gradients: whether operations are recorded as they are elsewhere; otherwise they are not.
        """
        weight = next(model.parameters(), None)
        here = self if weight is None else self.to(weight.device)
        named = dict(here.named)
        if named and here.target is not None and "labels" in inspect.signature(model.forward).parameters:
            named["labels"] = here.target
        with nullcontext() if gradients else torch.no_grad():
            try:
                return model(*here.positional, **named)
            except CrystalliteError:
                raise
            except _BAD_CALL as error:
                form = _FORM if self._may_be_misread(error) else ""
                raise InvalidOption(
                    f"the {type(model).__name__} cannot be called with the batch at sample {self.offset} "
                    f"({', '.join(_said(here.positional, named))}): {_reason(error)}{form}"
                ) from error

    def call(self, model: nn.Module) -> Tensor:
        """The main output of the model, with gradients; it does not see the target."""
        return main_output(self.without_target().run(model, gradients=True))

    def _may_be_misread(self, error: Exception) -> bool:
        """Whether data of another form may have been meant: arguments are not those that the model takes.

        "You have to specify input_ids" is what transformers says of a missing one; a later batch that is a tensor alone
        may be the target of `[x, y]`.
        """
        alone = self.offset > 0 and len(self.positional) == 1 and self.target is None
        return isinstance(error, (TypeError, KeyError, AttributeError)) or "specify" in str(error) or alone

    def _counts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:1] == (self.size,)

    def _with(self, change: Callable[[Any], Any]) -> Batch:
        named = {name: change(value) for name, value in self.named.items()}
        return replace(self, positional=tuple(map(change, self.positional)), named=named, target=change(self.target))


def _said(positional: Iterable[Any], named: Mapping[str, Any]) -> Iterator[str]:
    """What a model is called with, in words.

    >>> list(_said([torch.zeros(2, 3)], {"mask": torch.ones(2, dtype=torch.int64), "use_cache": False}))
    ['float32 [2, 3]', 'mask int64 [2]', 'use_cache bool']
    """
    for name, value in (*(("", value) for value in positional), *named.items()):
        is_tensor = isinstance(value, Tensor)
        kind = f"{value.dtype} {list(value.shape)}".removeprefix("torch.") if is_tensor else type(value).__name__
        yield f"{name} {kind}".lstrip()


def _reason(error: Exception) -> str:
    """What went wrong; of an index, where it may come from.

    >>> print(_reason(IndexError("Target 9 is out of bounds.")))
    Target 9 is out of bounds: ids and labels must lie inside the vocabulary, positions and classes
    >>> print(_reason(KeyError("x")))
    KeyError: 'x'
    """
    said = str(error) if isinstance(error, (TypeError, ValueError, RuntimeError, IndexError)) else ""
    if "out of range in self" in said or "out of bounds" in said:
        said = f"{said.rstrip('.')}: ids and labels must lie inside the vocabulary, positions and classes"
    return said or f"{type(error).__name__}: {error}".removesuffix(": ")


def is_one_batch(data: Any) -> bool:
    """Whether some data is a single batch, not an iterable of them."""
    return isinstance(data, (Tensor, np.ndarray, Mapping, tuple))


def batches(data: Any) -> Iterator[Batch]:
    """The batches of some data, numbered through. Every function that takes data reads it in this way.

    data: an iterable of batches, such as a `DataLoader` or a list. A tensor, a dict or a tuple alone is one batch: a
    tuple `(x, y)` is the inputs x and the target y, a list `[x, y]` is two batches. A batch is a tensor, a dict of
    keyword arguments whose "labels" are the target, or a pair (inputs, target) where the inputs are a tensor, a dict,
    or a tuple of positional arguments; `((a, b),)` has no target. The first axis of the first tensor counts samples.

    >>> [(b.offset, b.size, b.target) for b in batches([torch.zeros(3, 2), torch.zeros(1, 2)])]
    [(0, 3, None), (3, 1, None)]
    >>> [(b.offset, b.size, b.target) for b in batches((torch.zeros(3, 2), torch.zeros(3)))]
    [(0, 3, tensor([0., 0., 0.]))]
    >>> list(batches([]))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: data: expected at least one sample, got none
    """
    if is_one_batch(data):
        data = [data]
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        raise InvalidOption(f"data: expected a tensor, a dict or an iterable of batches, got {type(data).__name__}")
    offset = 0
    for number, item in enumerate(data):
        batch = _batch(item, offset, f"data: batch {number}")
        if batch.size:
            yield batch
        offset += batch.size
    if not offset:
        raise InvalidOption("data: expected at least one sample, got none")


def repeatable(data: Any) -> Any:
    """The data in a form that can be gone through again: an iterator is read into a list."""
    return list(data) if isinstance(data, Iterator) else data


def _batch(item: Any, offset: int, name: str) -> Batch:
    target: Any = None
    inputs = item
    if isinstance(item, (tuple, list)):
        if len(item) not in (1, 2):
            raise InvalidOption(
                f"{name}: expected (inputs, target), got {len(item)} parts; several positional inputs go into a tuple: "
                "((a, b), target), or ((a, b),) without a target; several batches go into a list"
            )
        inputs, target = item if len(item) == 2 else (item[0], None)
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {str(key): _tensor(value, name) for key, value in inputs.items()}
        target = named.pop("labels", None) if target is None else target
    else:
        several = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        positional = tuple(_tensor(value, name) for value in several)
    target = _tensor(target, name)
    if target is not None and not isinstance(target, Tensor):
        raise InvalidOption(f"{name}: expected a tensor as the target, got {type(target).__name__}")
    counted = next((v for v in (*positional, *named.values()) if isinstance(v, Tensor)), None)
    if counted is None or counted.ndim == 0:
        found = "a single number" if counted is not None else f"no tensor in {type(inputs).__name__}"
        raise InvalidOption(f"{name}: expected a tensor whose first axis counts samples, got {found}")
    return Batch(offset, len(counted), positional, named, target)


def _tensor(value: Any, name: str) -> Any:
    """The value, arrays as tensors; tensors of kinds that layers are not called with are refused."""
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), copy=False))
        except TypeError:
            raise InvalidOption(f"{name}: expected an array of numbers, got one of {value.dtype}") from None
    if isinstance(value, Tensor):
        if odd := odd_tensor(value):
            raise InvalidOption(f"{name}: expected {odd}")
        return value.resolve_conj().resolve_neg()
    return value


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
    once = batch.run(model)
    again = tensors(batch.run(model))
    for path, tensor in same_structure(tensors(once), again).items():
        if not equal_up_to_rounding(tensor, again[path]):
            raise InvalidOption(
                f"{who} gives different outputs on the same inputs ({path}): is a dropout left on? Call .eval() first"
            )
    return once
