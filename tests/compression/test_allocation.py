"""Budgets are met, and multiply-adds stay where they are worth most."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite.compression.allocation import LayerCurve, NeuronCurve, allocate
from crystallite.compression.operator_specs import OperatorSpec
from crystallite.core.errors import InvalidOption
from crystallite.graph.neuron_groups import NeuronGroup


def layer(size, sensitivity, ranks=(6, 4, 2, 1)):
    """A layer whose damage grows as its rank falls."""
    options = [(OperatorSpec(), 0.0), *((OperatorSpec(rank), sensitivity / rank) for rank in ranks)]
    return LayerCurve(size, tuple(options))


def output_error(allocation):
    return sum(curve.options[allocation.chosen.get(name, 0)][1] for name, curve in allocation.layers.items())


@settings(max_examples=60)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4), st.floats(0.15, 1.0))
def test_a_budget_is_met_and_close_to_the_best_choice(sensitivities, budget):
    layers = {str(i): layer((16, 16), value) for i, value in enumerate(sensitivities)}
    found = allocate(layers, [], budget)
    assert found.cost <= budget * 256 * len(layers)
    best = min(
        sum(curve.options[i][1] for curve, i in zip(layers.values(), places, strict=True))
        for places in itertools.product(range(5), repeat=len(layers))
        if sum(
            curve.options[i][0].macs(16, 16, (16, 16)) for curve, i in zip(layers.values(), places, strict=True)
        ) <= budget * 256 * len(layers)
    )  # fmt: skip
    assert best <= output_error(found) <= 3 * best + 1e-12


def test_a_fragile_layer_stays_dense():
    found = allocate({"a": layer((16, 16), 1.0), "b": layer((16, 16), 1e6), "c": layer((16, 16), 1.0)}, [], 0.6)
    assert [str(found.spec(name)) for name in "abc"][1] == "dense"


def test_neurons_count_in_every_layer_that_has_them():
    layers = {
        "up": LayerCurve((64, 16), ((OperatorSpec(), 0.0),)),
        "down": LayerCurve((16, 64), ((OperatorSpec(), 0.0),)),
    }
    net = nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)})
    options = ((64, 0.0), (48, 0.1), (32, 0.2), (16, 0.5))
    neurons = NeuronCurve(NeuronGroup.between(net, ["up"], "down"), options)
    found = allocate(layers, [neurons], 0.5)
    assert (found.read_by("down"), found.read_by("up"), found.cost) == ((neurons.group, 32), None, 32 * 32)
    found = allocate(layers, [neurons], 0.75, rest=2048)  # as much again stays as it is
    assert (found.read_by("down"), found.cost, found.dense_cost) == ((neurons.group, 32), 3072, 4096)
    found = allocate(layers, [NeuronCurve(neurons.group, options, each=32)], 0.5)  # a kernel between them
    assert (found.cost, found.dense_cost) == (64 * 32, 64 * 64)


def test_what_stays_as_it_is_is_named_where_a_budget_cannot_be_reached():
    with pytest.raises(InvalidOption, match=r"reached here, 0\.9\d\d; 94% of the cost lies in what stays as it is"):
        allocate({"a": layer((16, 16), 1.0)}, [], 0.5, rest=4000)


def test_what_cannot_be_reached_is_refused():
    with pytest.raises(InvalidOption, match=r"budget 0\.01 is below the smallest that can be reached here, 0\.125"):
        allocate({"a": layer((16, 16), 1.0)}, [], 0.01)
