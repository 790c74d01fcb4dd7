"""The neurons between layers: who writes and reads them, what is stored of them, and what may happen to them."""

import pytest
import torch
from torch import nn

from crystallite.baselines.layers import find_layers
from crystallite.compression.pruning import find_prunable
from crystallite.data.batch import Batch
from crystallite.graph.neuron_groups import (
    NeuronGroup,
    find_neuron_groups,
    neuron_groups,
    score_group,
    trace_batch,
    value_group,
    without,
)
from crystallite.graph.trace import trace
from crystallite.graph.trials import acts_alone, can_remove, can_rotate, compares_alone
from tests.helpers.networks import Gated, ResNet
from tests.helpers.prunable import Attention, batch
from tests.helpers.tolerance import assert_close
from tests.helpers.transformers_models import CASES, llama


@pytest.mark.parametrize("between", [nn.Softmax(-1), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)])
def test_neurons_that_feel_each_other_must_stay(between):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 2))
    assert find_prunable(model, {"0", "2"}, Batch(0, 3, (torch.randn(3, 4),))).groups == ()


def test_an_attention_has_heads_and_numbers_of_heads():
    net, some = Attention(), batch(2, 5, 32)
    heads, pair = find_neuron_groups(net, find_layers(net), some)
    assert heads == NeuronGroup(4, ("query", "key", "value"), ("output",), heads=4, width=8)
    assert pair == NeuronGroup(64, ("up",), ("down",))
    assert acts_alone(net, pair, some)
    assert can_remove(net, [heads, pair], some)
    (attention,) = trace_batch(net, some).attentions
    values, scores = value_group(net, attention), score_group(net, attention, torch.arange(8))
    assert values == NeuronGroup(32, ("value",), ("output",), heads=4, embedded=True)
    assert scores == NeuronGroup(32, ("query", "key"), (), heads=4, width=0, embedded=True)
    assert can_rotate(net, values, some)
    assert can_rotate(net, scores, some)
    assert compares_alone(net, scores, some)
    assert set(find_prunable(net, find_layers(net), some).groups) == {pair, values, scores}


def test_a_gate_writes_too():
    found = neuron_groups(Gated(), trace(Gated()))
    assert [(group.writers, group.readers) for group in found.values() if "down" in group.readers] == [
        (("gate", "up"), ("down",))
    ]


def test_a_stream_has_several_writers_and_readers():
    (stream,) = (g for g in neuron_groups(ResNet(), trace(ResNet())).values() if "stem" in g.writers)
    assert {"stem", "blocks.0.second", "blocks.1.second"} <= set(stream.writers)
    assert {"blocks.0.first", "blocks.1.first"} <= set(stream.readers)
    assert len(stream.passed) > 1


def test_trials_leave_the_model_as_it_is():
    net, some = Attention(), batch(2, 5, 32)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    find_prunable(net, find_layers(net), some)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_groups_that_overlap_go_together():
    """Of grouped queries, heads of keys and values are one group, the queries for each of them another one."""
    model, some = llama()
    names = [name for name in find_layers(model) if ".0." in name]
    groups = [g for g in find_neuron_groups(model, names, some) if g.heads == g.size]
    assert [(g.size, len(g.writers)) for g in groups] == [(2, 3), (2, 1)]
    small = without(model, [(group, torch.tensor([1])) for group in groups])
    layer = small.model.layers[0].self_attn
    assert [layer.q_proj.out_features, layer.k_proj.out_features, layer.o_proj.in_features] == [8, 8, 8]
    old = model.model.layers[0].self_attn
    assert torch.equal(layer.q_proj.weight, old.q_proj.weight[24:])
    assert torch.equal(layer.v_proj.weight, old.v_proj.weight[8:])
    with torch.no_grad():
        old.o_proj.weight[:, :24] = 0
    assert_close(some.run(small).logits, some.run(model).logits)


@pytest.mark.parametrize("name", CASES)
def test_models_that_drop_layers_or_keep_caches_have_prunable_neurons(name):
    model, some, pairs = CASES[name]()
    found = find_prunable(model, find_layers(model), some)
    assert pairs <= {group.layers for group in found.groups}


def test_channels_of_grouped_convolutions_stay():
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1))
    assert find_prunable(net, {"0", "2", "4"}, batch(2, 4, 6, 6)).groups == ()
