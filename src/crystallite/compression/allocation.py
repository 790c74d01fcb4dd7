"""Where what may be spent is worth most: sizes for every layer and every group of hidden neurons under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from crystallite.compression.operator_specs import OperatorSpec
from crystallite.core.errors import InvalidOption
from crystallite.graph.neuron_groups import NeuronGroup

__all__ = ["Allocation", "LayerCurve", "NeuronCurve", "Price", "allocate", "parameters"]


@dataclass(frozen=True)
class LayerCurve:
    """What a layer may become, and the output error that each choice is expected to add."""

    size: tuple[int, int]  # outputs, inputs
    options: tuple[tuple[OperatorSpec, float], ...]  # the first is dense and adds none
    call_counts: float = 1  # of its weight, in proportion to other layers


@dataclass(frozen=True)
class NeuronCurve:
    """How many hidden neurons may be kept, and the expected output error."""

    group: NeuronGroup
    options: tuple[tuple[int, float], ...]  # the first keeps all
    each: float = 0.0  # what a neuron costs between its layers: a kernel of its own
    order: Tensor | None = None  # in which neurons are kept, where no reader is fitted without the others


Price = Callable[[str, OperatorSpec, int, int], float]  # of a layer with so many outputs and inputs left


@dataclass
class Allocation:
    """A choice for each curve, by its place among the options."""

    layers: Mapping[str, LayerCurve]
    neurons: Sequence[NeuronCurve]
    price: Price
    rest: float = 0.0  # what all else costs, which stays as it is
    chosen: dict[str | int, int] = field(default_factory=dict)  # layer or number of the neurons → option

    def __post_init__(self) -> None:
        self._around: dict[str, list[int]] = {}  # layer → the groups that it writes or reads
        for number, curve in enumerate(self.neurons):
            for name in curve.group.layers:
                self._around.setdefault(name, []).append(number)

    def spec(self, layer: str) -> OperatorSpec:
        return self.layers[layer].options[self.chosen.get(layer, 0)][0]

    def left(self, number: int) -> int:
        """How many neurons of a group are left."""
        return self.neurons[number].options[self.chosen.get(number, 0)][0]

    def read_by(self, reader: str) -> tuple[NeuronGroup, int] | None:
        """The neurons that a layer reads and how many of them are left, None where all are."""
        for number in self._around.get(reader, ()):
            group = self.neurons[number].group
            if reader in group.readers and self.left(number) < group.size:
                return group, self.left(number)
        return None

    def compared(self) -> list[tuple[NeuronGroup, Tensor]]:
        """Numbers in which queries and keys are compared, where some go, and those that are left."""
        return [
            (curve.group, curve.order[: self.left(number)])
            for number, curve in enumerate(self.neurons)
            if curve.order is not None and self.left(number) < curve.group.size
        ]

    @property
    def cost(self) -> float:
        """Of the whole model."""
        between = sum(self.left(number) * curve.each for number, curve in enumerate(self.neurons))
        return self.rest + between + sum(self._cost(name) for name in self.layers)

    @property
    def dense_cost(self) -> float:
        """Of the whole model as it was."""
        between = sum(curve.group.size * curve.each for curve in self.neurons)
        layers = sum(self.price(name, OperatorSpec(), *curve.size) for name, curve in self.layers.items())
        return self.rest + between + layers

    def _cost(self, name: str) -> float:
        outputs, inputs = self.layers[name].size
        for number in self._around.get(name, ()):
            group = self.neurons[number].group
            gone = group.size - self.left(number)
            outputs -= gone * group.outputs(name) if name in group.writers else 0
            inputs -= gone * group.width if name in group.readers else 0
        return self.price(name, self.spec(name), outputs, inputs)

    def _cost_around(self, key: str | int) -> float:
        """Of the layers that a choice changes, and of what lies between them."""
        if isinstance(key, str):
            return self._cost(key)
        curve = self.neurons[key]
        return self.left(key) * curve.each + sum(map(self._cost, curve.group.layers))

    def _options(self, key: str | int) -> Sequence[tuple[object, float]]:
        return self.layers[key].options if isinstance(key, str) else self.neurons[key].options

    def moves(self) -> list[tuple[float, float, str | int, int]]:
        """Every single change of a choice: how much output error it adds, what it saves, and what it changes."""
        found = []
        for key in [*self.layers, *range(len(self.neurons))]:
            here, options = self.chosen.get(key, 0), self._options(key)
            before = self._cost_around(key)
            for place, (_, output_error) in enumerate(options):
                if place != here:
                    self.chosen[key] = place
                    saved = before - self._cost_around(key)
                    found.append((output_error - options[here][1], saved, key, place))
            self.chosen[key] = here
        return found


def multiply_adds(layers: Mapping[str, LayerCurve]) -> Price:
    """What layers cost, counted as often as their weights are used."""
    return lambda name, spec, outputs, inputs: layers[name].call_counts * spec.macs(outputs, inputs, layers[name].size)


def parameters(layers: Mapping[str, LayerCurve]) -> Price:
    """How many weights layers have."""
    return lambda name, spec, outputs, inputs: spec.macs(outputs, inputs, layers[name].size)


def allocate(
    layers: Mapping[str, LayerCurve],
    neurons: Sequence[NeuronCurve],
    budget: float,
    price: Price | None = None,
    rest: float = 0.0,
) -> Allocation:
    """The choices that add least output error and leave at most this share of what the model costs.

    price: of a layer; None: its multiply-adds. rest: what all costs that stays as it is. Greedy: always the change that
    adds least error for what it saves; at the end, what the last change saved too much is given back where it helps
    most. Sensitive layers, whose error is large, stay dense by themselves.

    >>> even = LayerCurve((8, 8), ((OperatorSpec(), 0.0), (OperatorSpec(rank=2), 1.0)))
    >>> fragile = LayerCurve((8, 8), ((OperatorSpec(), 0.0), (OperatorSpec(rank=2), 9.0)))
    >>> found = allocate({"a": even, "b": fragile}, [], 0.8)
    >>> str(found.spec("a")), str(found.spec("b")), found.cost
    ('rank 2', 'dense', 96.0)
    """
    found = Allocation(layers, neurons, multiply_adds(layers) if price is None else price, rest)
    limit = budget * found.dense_cost
    while found.cost > limit:
        moves = [move for move in found.moves() if move[1] > 0]
        if not moves:
            fixed = f"; {rest / found.dense_cost:.0%} of the cost lies in what stays as it is" if rest else ""
            raise InvalidOption(
                f"budget {budget:g} is below the smallest that can be reached here, "
                f"{found.cost / found.dense_cost:.3f}{fixed}"
            )
        _, _, key, place = min(moves, key=lambda move: (max(move[0], 0.0) / move[1], move[0], -move[1]))
        found.chosen[key] = place
    while True:
        room = limit - found.cost
        better = [move for move in found.moves() if move[0] < 0 and -move[1] <= room]
        if not better:
            return found
        _, _, key, place = min(better, key=lambda move: move[0])
        found.chosen[key] = place


def falling(options: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """A curve of (size, output error), largest first, in which a smaller size never has less error: noise is ignored.

    >>> falling([(4, 0.0), (3, 0.2), (2, 0.1)])
    [(4, 0.0), (3, 0.2), (2, 0.2)]
    """
    found = list(options[:1])
    for (_, before), (size, output_error) in pairwise(options):
        found.append((size, max(output_error, before, found[-1][1])))
    return found
