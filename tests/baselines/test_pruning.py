"""Groups are found with everything that belongs to them, and what does nothing goes first."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.baselines.layers import find_layers, input_norms
from crystallite.baselines.pruning import find_removable, pruned, scores
from crystallite.data.batch import Batch
from crystallite.graph.neuron_groups import NeuronGroup, without
from crystallite.validation.cost import count_macs
from tests.helpers.prunable import Attention, batch, convolutions, perceptron
from tests.helpers.tolerance import assert_close

PLANTED = {
    "perceptron": (perceptron, batch(16, 8), 8 / 32),
    "convolutions": (convolutions, batch(4, 2, 6, 6), 4 / 12),
    "attention": (Attention, batch(3, 5, 32), 1 / 2),
}


@pytest.fixture(params=PLANTED)
def planted(request):
    make, some, share = PLANTED[request.param]
    return make(), some, share


@pytest.mark.parametrize("wanda", [False, True])
def test_what_does_nothing_goes_without_error(planted, wanda):
    """At the cost of the network without its dead parts, both scores keep exactly the live ones."""
    net, some, share = planted
    names = find_layers(net)
    groups = find_removable(net, names, some)
    alive = without(net, [(g, scores(net, g).argsort(descending=True)[: round(share * g.size)]) for g in groups])
    limit = count_macs(alive, some)
    small = pruned(net, groups, some, limit, input_norms(net, names, [some]) if wanda else None)
    assert count_macs(small, some) == limit < count_macs(net, some)
    assert_close(some.run(small), some.run(net))


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5, 0.9])
def test_the_cost_keeps_to_the_limit(planted, share):
    net, some, _ = planted
    limit = int(share * count_macs(net, some))
    small = pruned(net, find_removable(net, find_layers(net), some), some, limit)
    assert 0.5 * limit < count_macs(small, some) <= limit
    assert some.run(small).shape == some.run(net).shape


def test_the_original_is_not_changed():
    net, some = convolutions(), batch(4, 2, 6, 6)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    pruned(net, find_removable(net, find_layers(net), some), some, count_macs(net, some) // 3)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_found_groups_are_those_that_one_would_declare():
    net, some = Attention(), batch(2, 5, 32)
    declared = [
        NeuronGroup.between(net, ["query", "key", "value"], "output", head_size=8),
        NeuronGroup.between(net, ["up"], "down"),
    ]
    found = find_removable(net, find_layers(net), some)
    assert [group.size for group in found] == [4, 64]
    for one, other in zip(declared, found, strict=True):
        assert one.carried.keys() == other.carried.keys()
        assert all(torch.equal(labels, other.carried[place]) for place, labels in one.carried.items())
    assert (found[0].heads, found[0].writers) == (4, ("query", "key", "value"))
    assert found[1].heads == 0
    assert declared == found


def test_heads_whose_number_is_written_in_the_code_stay():
    net, some = Attention(any_heads=False), batch(2, 5, 32)
    assert [group.size for group in find_removable(net, find_layers(net), some)] == [64]


def test_neurons_of_a_layer_that_is_left_alone_stay():
    net, some = perceptron(), batch(2, 8)
    (group,) = find_removable(net, find_layers(net, ignore="4"), some)
    assert {name for name, _ in group.carried} == {"0.weight", "0.bias", "2.weight"}


def test_batch_norms_lose_the_same_channels():
    net, some = convolutions(), batch(2, 2, 6, 6)
    group = find_removable(net, find_layers(net), some)[0]
    kept = torch.tensor([1, 2, 9])
    small = without(net, [(group, kept)])
    assert small[0].out_channels == small[1].num_features == small[3].in_channels == 3
    assert torch.equal(small[1].running_mean, net[1].running_mean[kept])
    masked = convolutions()
    with torch.no_grad():
        masked[3].weight[:, [c for c in range(12) if c not in kept.tolist()]] = 0
    assert_close(some.run(small), some.run(masked))


def test_the_wanda_score_knows_what_is_multiplied():
    """A neuron with large weights on an input that is never there counts less than one with small ones elsewhere."""
    net = nn.Sequential(nn.Linear(2, 2, False), nn.ReLU(), nn.Linear(2, 1, False)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[9.0, 0.0], [0.0, 1.0]]))
        net[2].weight.copy_(torch.ones(1, 2))
    group = NeuronGroup.between(net, ["0"], "2")
    silent = Batch(0, 8, (torch.tensor([[0.0, 1.0]]).repeat(8, 1),))
    assert scores(net, group).argmax() == 0
    norms = input_norms(net, ["0", "2"], [silent, silent])
    assert_close(norms["0"], torch.tensor([0.0, 4.0]))
    assert scores(net, group, norms).argmax() == 1


def test_norms_are_those_of_what_layers_read():
    net, some = convolutions(), batch(4, 2, 6, 6)
    norms = input_norms(net, ["0", "3", "6"], [some, some])
    x = torch.cat([some.positional[0]] * 2)
    assert_close(norms["0"], x.pow(2).sum((0, 2, 3)).sqrt())
    hidden = F.relu(net[1](net[0](x))).detach()
    assert_close(norms["3"], hidden.pow(2).sum((0, 2, 3)).sqrt())
    assert norms["6"].shape == (48,)


def test_nothing_to_take_out():
    net, some = nn.Sequential(nn.Linear(8, 4)).eval(), batch(2, 8)
    with pytest.raises(cx.InvalidOption, match="no hidden neurons"):
        pruned(net, find_removable(net, ["0"], some), some, 10)


def test_a_limit_that_cannot_be_reached():
    net, some = perceptron(), batch(1, 8)
    with pytest.raises(cx.InvalidOption, match="so small: 13 multiply-adds are left, 12"):
        pruned(net, find_removable(net, find_layers(net), some), some, 12)


def test_groups_that_do_not_fit_are_refused():
    net = perceptron()
    with pytest.raises(cx.InvalidOption, match="4: expected one input for each output of 0, in heads of 5"):
        NeuronGroup.between(net, ["0"], "4", head_size=5)
