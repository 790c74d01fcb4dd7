"""Trials of neuron groups: what the graph allows is done to the model, which must still compute what it should."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError
from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding, same_structure, tensors
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_, without

__all__ = ["acts_alone", "can_remove", "can_rotate"]


@torch.no_grad()
def acts_alone(model: nn.Module, group: NeuronGroup, batch: Batch) -> bool:
    """Whether what a neuron says makes no difference where its readers have no weight for it.

    So it is not under a softmax or a norm, through which neurons act on each other. Tried with every other neuron.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> acts_alone(net, NeuronGroup.between(net, ["0"], "2"), Batch(0, 9, (torch.randn(9, 2),)))
    False
    """
    readers = [model.get_submodule(name).get_parameter("weight") for name in group.readers]
    written = [p for name in group.writers for p in model.get_submodule(name).parameters()]
    with _restored([*readers, *written]):
        for weight in readers:
            weight.view(len(weight), group.size, -1)[:, ::2] = 0
        expected = batch.run(model)
        for parameter in written:
            parameter[::2] = 0
        return _equal(batch.run(model), expected)


@torch.no_grad()
def can_rotate(model: nn.Module, group: NeuronGroup, batch: Batch) -> bool:
    """Whether the heads' numbers may be rotated on the way into attention and back behind it.

    So it is where attention only averages over them.
    """
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(group.heads, *[group.size // group.heads] * 2, generator=rng, dtype=torch.float64)
    rotation = torch.linalg.qr(drawn).Q
    expected = batch.run(model)
    with _restored([p for name in group.layers for p in model.get_submodule(name).parameters()]):
        rotate_heads_(model, group, rotation, rotation.mT)
        return _equal(batch.run(model), expected)


def can_remove(model: nn.Module, groups: Sequence[NeuronGroup], batch: Batch) -> bool:
    """Whether the model still runs, with outputs of the same shapes, where half of each of some groups is gone."""
    try:
        half = without(model, [(group, torch.arange((group.size + 1) // 2)) for group in groups])
        same_structure(tensors(batch.run(model)), tensors(batch.run(half)))
    except (CrystalliteError, ValueError):  # a shape that the model's code fixes
        return False
    return True


def _equal(found: object, expected: object) -> bool:
    after = tensors(found)
    return all(equal_up_to_rounding(after[path], value) for path, value in tensors(expected).items())


@contextmanager
def _restored(parameters: Sequence[Tensor]) -> Iterator[None]:
    before = [parameter.clone() for parameter in parameters]
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
