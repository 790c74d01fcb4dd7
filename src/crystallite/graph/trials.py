"""Trials of neuron groups: what the graph allows is done to the model, which must still compute what it should."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError
from crystallite.data.batch import Batch
from crystallite.data.outputs import equal_up_to_rounding, same_structure, tensors
from crystallite.graph.attention import HeadNumbers
from crystallite.graph.neuron_groups import NeuronGroup, rotate_heads_, without

__all__ = ["acts_alone", "can_remove", "can_rotate", "compares_alone", "is_normed"]

_NOTICED = 1e-4  # share of the outputs that a change must make to be told from rounding
_SAME = 1e-3  # share of a change by which two changes that are the same may differ
_ROUNDING = 3e-6  # share of the outputs that rounding may make
_TRIALS = 3  # with different neurons, which might belong together by chance


@torch.no_grad()
def acts_alone(model: nn.Module, group: NeuronGroup, batch: Batch) -> bool:
    """Whether what a neuron says makes no difference where its readers have no weight for it.

    So it is not under a softmax or a norm, through which neurons act on each other. Tried with half of the neurons.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.Softmax(-1), nn.Linear(8, 2))
    >>> acts_alone(net, NeuronGroup.between(net, ["0"], "2"), Batch(0, 9, (torch.randn(9, 2),)))
    False
    """
    stored = {name: _stored(model, name) for name, _ in group.carried}
    weights = {f"{reader}.weight" for reader in group.readers}
    with _restored(list(stored.values())):
        _silence_(stored, group, [place for place in group.carried if place[0] in weights])
        expected = batch.run(model)
        _silence_(stored, group, [place for place in group.carried if place[0] not in weights])
        return _equal(batch.run(model), expected)


def _stored(model: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), last)
    return found


def _silence_(stored: Mapping[str, Tensor], group: NeuronGroup, places: Sequence[tuple[str, int]]) -> None:
    """Zero what is stored at some places for half of the neurons."""
    for name, axis in places:
        labels = group.carried[name, axis]
        gone = torch.isin(labels, _half(group, 0)).nonzero()[:, 0].to(stored[name].device)
        stored[name].index_fill_(axis, gone, 0)


def _half(group: NeuronGroup, seed: int) -> Tensor:
    """Half of the neurons, at random: any rule might be one that the model follows too."""
    return torch.randperm(group.size, generator=torch.Generator().manual_seed(seed))[: (group.size + 1) // 2]


@torch.no_grad()
def compares_alone(model: nn.Module, group: NeuronGroup, batch: Batch) -> bool:
    """Whether queries and keys are compared in each neuron of a group apart from others.

    Then it is the same whether the query, or the key, has nothing there. Tried with some of the neurons, and then with
    others; a norm over a head, or a rotation that mixes neurons, shows. Where the difference is too small to tell, they
    are not.
    """
    whole = _flat(batch.run(model))
    for seed in range(_TRIALS):
        chosen = _half(group, seed)
        without_queries, without_keys = (_scaled(model, group, part, chosen, 0.0, batch) for part in group.compared)
        apart, change = (without_queries - without_keys).norm(), (without_queries - whole).norm()
        if not change > _NOTICED * whole.norm() or apart > max(_SAME * change, _ROUNDING * whole.norm()):
            return False
    return True


@torch.no_grad()
def is_normed(model: nn.Module, group: NeuronGroup, batch: Batch) -> bool:
    """Whether queries, or keys, of twice the size make no difference: a norm over the head lies before they meet."""
    whole, everything = _flat(batch.run(model)), torch.arange(group.size)
    changes = [_scaled(model, group, part, everything, 2.0, batch) - whole for part in group.compared]
    return any(change.norm() <= _NOTICED * whole.norm() for change in changes)


def _scaled(
    model: nn.Module, group: NeuronGroup, part: HeadNumbers, neurons: Tensor, factor: float, batch: Batch
) -> Tensor:
    """The model's outputs where some neurons of the queries, or of the keys, are multiplied by a number."""
    rows = part.places.flatten()
    rows = rows[torch.isin(group.rows[part.layer][rows], neurons)]
    stored = {place: _stored(model, place[0]) for place in group.carried if place[0].rpartition(".")[0] == part.layer}
    with _restored(list(stored.values())):
        for (_, axis), value in stored.items():
            places = rows.to(value.device)
            value.index_copy_(axis, places, factor * value.index_select(axis, places))
        return _flat(batch.run(model))


def _flat(output: object) -> Tensor:
    """Every number of a model's outputs."""
    return torch.cat([t.double().nan_to_num(0.0, 0.0, 0.0).flatten() for t in tensors(output).values()])


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
