"""Where what may be spent is worth most: sizes for every layer and every group of hidden neurons under one budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from crystallite.compression.operator_specs import OperatorSpec
from crystallite.core.errors import InvalidOption
from crystallite.graph.neuron_groups import NeuronGroup

__all__ = ["Allocation", "LayerCurve", "NeuronCurve", "Price", "allocate", "parameters"]


@dataclass(frozen=True)
class LayerCurve:
    """What a layer may become, and the output error that each choice is expected to add."""

    size: tuple[int, int]  # outputs, inputs
    options: tuple[tuple[OperatorSpec, float], ...]  # the first is dense and adds none
    call_counts: float = 1  # of its weight in a call of the model, in proportion to other layers


@dataclass(frozen=True)
class NeuronCurve:
    """How many hidden neurons may be kept, and the expected output error."""

    group: NeuronGroup
    options: tuple[tuple[int, float], ...]  # the first keeps all


Price = Callable[[str, OperatorSpec, int, int], float]  # of a layer with so many outputs and inputs left


@dataclass
class Allocation:
    """A choice for each curve, by its place among the options."""

    layers: Mapping[str, LayerCurve]
    neurons: Sequence[NeuronCurve]
    price: Price
    chosen: dict[str | int, int] = field(default_factory=dict)  # layer or number of the neurons → option

    def spec(self, layer: str) -> OperatorSpec:
        return self.layers[layer].options[self.chosen.get(layer, 0)][0]

    def kept(self, reader: str) -> int | None:
        """How many of the neurons that a layer reads are kept, None where all are."""
        for number, curve in enumerate(self.neurons):
            if curve.group.reader == reader and self.chosen.get(number, 0):
                return curve.options[self.chosen[number]][0]
        return None

    def width(self, reader: str) -> int:
        """Inputs of a layer for each of the neurons that it reads."""
        return next((curve.group.width for curve in self.neurons if curve.group.reader == reader), 1)

    @property
    def cost(self) -> float:
        return sum(self._cost(name) for name in self.layers)

    @property
    def dense_cost(self) -> float:
        return sum(self.price(name, OperatorSpec(), *curve.size) for name, curve in self.layers.items())

    def _cost(self, name: str) -> float:
        outputs, inputs = self.layers[name].size
        for number, curve in enumerate(self.neurons):
            left = curve.options[self.chosen.get(number, 0)][0]
            outputs = left if name in curve.group.writers else outputs
            inputs = left * curve.group.width if name == curve.group.reader else inputs
        return self.price(name, self.spec(name), outputs, inputs)

    def _options(self, key: str | int) -> Sequence[tuple[object, float]]:
        return self.layers[key].options if isinstance(key, str) else self.neurons[key].options

    def _touched(self, key: str | int) -> Sequence[str]:
        if isinstance(key, str):
            return [key]
        return list(self.neurons[key].group.layers)

    def moves(self) -> list[tuple[float, float, str | int, int]]:
        """Every single change of a choice: how much output error it adds, what it saves, and what it changes."""
        found = []
        for key in [*self.layers, *range(len(self.neurons))]:
            here, options = self.chosen.get(key, 0), self._options(key)
            before = sum(map(self._cost, self._touched(key)))
            for place, (_, output_error) in enumerate(options):
                if place != here:
                    self.chosen[key] = place
                    saved = before - sum(map(self._cost, self._touched(key)))
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
    layers: Mapping[str, LayerCurve], neurons: Sequence[NeuronCurve], budget: float, price: Price | None = None
) -> Allocation:
    """The choices that add least output error and leave at most this share of what the layers cost.

    price: of a layer; None: its multiply-adds. Greedy: always the change that adds least error for what it saves; at
    the end, what the last change saved too much is given back where it helps most. Sensitive layers, whose error is
    large, stay dense by themselves.

    >>> even = LayerCurve((8, 8), ((OperatorSpec(), 0.0), (OperatorSpec(rank=2), 1.0)))
    >>> fragile = LayerCurve((8, 8), ((OperatorSpec(), 0.0), (OperatorSpec(rank=2), 9.0)))
    >>> found = allocate({"a": even, "b": fragile}, [], 0.8)
    >>> str(found.spec("a")), str(found.spec("b")), found.cost
    ('rank 2', 'dense', 96)
    """
    found = Allocation(layers, neurons, multiply_adds(layers) if price is None else price)
    limit = budget * found.dense_cost
    while found.cost > limit:
        moves = [move for move in found.moves() if move[1] > 0]
        if not moves:
            raise InvalidOption(
                f"budget {budget:g} is below the smallest that can be reached here, {found.cost / found.dense_cost:.3f}"
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
