"""`fold_`: hidden neurons renumbered in the stored weights, so that blocks lie one after the other at run time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.graph.trace import Axis, Layer, Spaces
from crystallite.models.record import Fold
from crystallite.structure.bipartite import BipartiteStructure

__all__ = ["Junction", "fold_", "junctions", "unfold_"]


@dataclass(frozen=True)
class Junction:
    """Where layers hand neurons to layers, and what has to be moved there at run time."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    shuffles: int  # layers whose blocks do not lie one after the other: each moves its neurons at run time
    outcome: str

    def __repr__(self) -> str:
        names = " → ".join(", ".join(side) for side in (self.producers, self.consumers) if side)
        return f"{names}: {self.outcome}"


def fold_(model: nn.Module, structures: dict[str, BipartiteStructure], spaces: Spaces) -> list[Fold]:
    """The orders folded into the model's weights, in place: decompose them again for their blocks as they are now.

    Rows of a structure are the outputs of the module it is named after, columns its inputs. Each free space is sorted
    by the blocks of the layer that reads it, in the order of that layer's rows, then by those of the layer that
    writes it. So what reads it needs no gather, and what writes it needs none if its blocks lie inside the reader's.
    The model computes what it did, up to the rounding of reordered sums; `unfold_` undoes it bit for bit.

    >>> from crystallite import decompose
    >>> from crystallite.graph.trace import trace
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     model[0].weight[::2, 0] = model[0].weight[1::2, 1] = 0
    ...     model[2].weight[0, ::2] = model[2].weight[1, 1::2] = 0
    >>> structures = {name: decompose(model.get_submodule(name).weight) for name in ("0", "2")}
    >>> folds = fold_(model, structures, trace(model))
    >>> folds[0].order.tolist(), decompose(model[2].weight).col_block.tolist()
    ([1, 3, 0, 2], [0, 0, 1, 1])
    """
    orders = _Orders(spaces)
    layers = [layer for layer in spaces.layers if layer.name in structures]
    for layer in layers:
        expected = (spaces.length(layer.rows), spaces.length(layer.columns))
        if structures[layer.name].shape != expected:
            raise InvalidOption(
                f"the structure of {layer.name!r} is {structures[layer.name].shape}, its layer is {expected}: "
                "rows are a module's outputs, columns its inputs"
            )
    in_blocks = [layer for layer in layers if structures[layer.name].n_blocks > 1]
    for space in _backwards(spaces):
        keys = list(_keys(space, in_blocks, structures, orders))
        if keys:
            orders.chosen[space] = np.lexsort(keys[::-1], axis=-1)
    folds = _folds(orders)
    _move_(model, [(fold.order, fold.places) for fold in folds])
    return folds


def unfold_(model: nn.Module, folds: Sequence[Fold]) -> None:
    """Give the neurons of a folded model their original numbers, in place and bit for bit.

    >>> model = nn.Linear(2, 2)
    >>> unfold_(model, [Fold(torch.tensor([1, 0]), (("hidden.weight", 0),))])
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: the model has no tensor 'hidden.weight': take the dense model that was traced
    """
    _move_(model, [(fold.order.argsort(), fold.places) for fold in folds])


def junctions(structures: dict[str, BipartiteStructure], spaces: Spaces) -> list[Junction]:
    """What is left to move at each place where a layer with blocks writes or reads, in the order of the model.

    Takes the structures as they are in the model's present weights.
    """
    found: dict[tuple[int, ...], tuple[list[str], list[str]]] = {}
    for layer in spaces.layers:
        if layer.name in structures and structures[layer.name].n_blocks > 1:
            for side, axis in enumerate((layer.columns, layer.rows)):
                for part in axis:
                    free = tuple(s for s in part if not spaces.spaces[s].fixed)
                    found.setdefault(free or part, ([], []))[1 - side].append(layer.name)
    result = []
    for part, (producers, consumers) in found.items():
        shuffles = sum(not _sorted(structures[name].row_block) for name in producers)
        shuffles += sum(not _sorted(structures[name].col_block) for name in consumers)
        left = "one shuffle" if shuffles == 1 else f"{shuffles} shuffles"
        if not shuffles:
            outcome = "nothing to move"
        elif part and spaces.spaces[part[0]].fixed:
            outcome = f"{left} left: {spaces.spaces[part[0]].fixed}"
        elif len(part) > 1:
            outcome = f"{left} left: blocks lie across heads or groups, or differ between these layers"
        else:
            outcome = f"{left} left: blocks differ between these layers"
        result.append(Junction(tuple(producers), tuple(consumers), shuffles, outcome))
    return result


class _Orders:
    """The order chosen for each space so far: chosen[space][…, i] is the old place of what is now at i."""

    def __init__(self, spaces: Spaces) -> None:
        self.spaces = spaces
        self.chosen: dict[int, np.ndarray] = {}  # (sizes of the spaces it lies within…, size)

    def along(self, axis: Axis) -> np.ndarray:
        """The order of a whole axis."""
        result, start = [], 0
        for part in axis:
            sizes = self.spaces.sizes(part)
            old: dict[int, np.ndarray] = {}
            for space, new in zip(part, np.indices(sizes), strict=True):
                outer = tuple(old[w] for w in self.spaces.spaces[space].within)
                old[space] = self.chosen[space][(*outer, new)] if space in self.chosen else new
            if part:
                result.append(start + np.ravel_multi_index(tuple(old.values()), sizes).ravel())
            else:
                result.append(np.array([start]))
            start += math.prod(sizes)
        return np.concatenate(result)


def _backwards(spaces: Spaces) -> list[int]:
    """Free spaces, those read last first, so that the outputs of a reader are in order before its inputs are."""
    last: dict[int, int] = {}
    for place, layer in enumerate(spaces.layers):
        for axis, weight in ((layer.rows, 0), (layer.columns, 1)):
            for part in axis:
                last.update((space, 2 * place + weight) for space in part)
    free = [space for space in last if not spaces.spaces[space].fixed]
    return sorted(free, key=lambda space: (-last[space], -len(spaces.spaces[space].within)))


def _keys(
    space: int, layers: list[Layer], structures: dict[str, BipartiteStructure], orders: _Orders
) -> Iterator[np.ndarray]:
    """What to sort a space by, most important first: blocks of its readers, then of its writers."""
    for layer in layers:
        if any(space in part for part in layer.columns):
            # numbered by their first row in the order chosen for the rows
            rows = structures[layer.name].row_block[orders.along(layer.rows)]
            block = BipartiteStructure.from_labels(rows, structures[layer.name].col_block).col_block
            yield from _key(space, layer.columns, block, orders)
    for layer in layers:
        yield from _key(space, layer.rows, structures[layer.name].row_block, orders)


def _key(space: int, axis: Axis, block: np.ndarray, orders: _Orders) -> Iterator[np.ndarray]:
    """The first block that each neuron of a space belongs to; dormant ones come last."""
    spaces, start = orders.spaces, 0
    rank = np.where(block < 0, block.max(initial=0) + 1, block)
    for part in axis:
        stop = start + spaces.length((part,))
        if space in part:
            first = np.full(spaces.neurons(space), rank.max())
            np.minimum.at(first, spaces.labels((part,), space).numpy(), rank[start:stop])
            yield first.reshape(spaces.sizes((*spaces.spaces[space].within, space)))
        start = stop


def _folds(orders: _Orders) -> list[Fold]:
    """One for each different axis whose order changed."""
    places: dict[Axis, list[tuple[str, int]]] = {}
    for place, axis in orders.spaces.places.items():
        if any(space in orders.chosen for part in axis for space in part):
            places.setdefault(axis, []).append(place)
    found = [(orders.along(axis), where) for axis, where in places.items()]
    return [Fold(torch.from_numpy(order), tuple(where)) for order, where in found if (np.diff(order) != 1).any()]


def _sorted(block: np.ndarray) -> bool:
    """Whether blocks lie one after the other, dormant neurons last."""
    return bool((np.diff(np.where(block < 0, len(block), block)) >= 0).all())


def _move_(model: nn.Module, moves: Sequence[tuple[Tensor, Sequence[tuple[str, int]]]]) -> None:
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    lost = [name for _, places in moves for name, _ in places if name not in tensors]
    if lost:
        raise InvalidOption(f"the model has no tensor {lost[0]!r}: take the dense model that was traced")
    with torch.no_grad():
        for order, places in moves:
            for name, axis in places:
                tensors[name].copy_(tensors[name].index_select(axis, order.to(tensors[name].device)))
