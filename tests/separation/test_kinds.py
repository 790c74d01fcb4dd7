"""Convolutions and recurrent networks come apart as exactly as linear layers, on real images."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence

import crystallite as cx
from crystallite.data.batch import Batch, batches
from crystallite.partitioning.partition import joint_components
from crystallite.partitioning.weights import parameter
from crystallite.separation import find_chains, random_partition, upgrade
from crystallite.separation.refit import refit_
from crystallite.separation.straight_through import attach_, harden_
from tests.helpers import digits
from tests.helpers.tolerance import assert_close


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.body(F.relu(self.stem(x.view(-1, 1, 8, 8)))).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.net = kind(8, 24, batch_first=True, **options)
        self.head = nn.Linear(24 * (2 if self.net.bidirectional else 1), 10)

    def forward(self, x):
        return self.head(self.net(x.view(-1, 8, 8))[0].mean(1))


MODELS = {
    "conv": (Convolutional, {"ignore": ["stem", "head"]}, ("body.0", "body.2")),
    "gru": (lambda: Recurrent(nn.GRU), {}, ("net.weight_ih_l0", "net.weight_hh_l0")),
    "lstm": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        {},
        tuple(f"net.weight_{k}_l{i}{end}" for i in (0, 1) for end in ("", "_reverse") for k in ("ih", "hh")),
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def upgraded(request):
    build, options, weights = MODELS[request.param]
    loader, x, y = digits.data()
    torch.manual_seed(0)
    net = digits.train(build(), loader, 8, 1e-2).eval()
    small = upgrade(
        net, blocks=2, data=loader, loss=F.cross_entropy, epochs=8, learning_rate=1e-2, smoothing=0, **options
    )
    return net, small, weights, x, y


def test_annealing_takes_nothing_away_and_finds_the_blocks(upgraded):
    net, small, weights, *_ = upgraded
    record, state = cx.record(small).options, cx.restore(small).state_dict()
    assert record.layers == weights
    (chain,) = find_chains(net, None, [name for name in ("stem", "head") if hasattr(net, name)])
    for level in (0.05, 0.01, 0.001):
        kept = {}
        for name in weights:
            w = state[parameter(name)]
            kept[name] = cx.anneal(w.flatten(1), record.nulls[parameter(name)], level, rule="neyman").mask.view_as(w)
            assert torch.equal(kept[name], w != 0)
        found = np.concatenate(list(joint_components(chain, kept).values()))
        assert found.max() + 1 == 2


def test_accuracy_is_kept(upgraded):
    net, small, _, x, y = upgraded
    assert digits.accuracy(net, x, y) > 0.7
    assert digits.accuracy(small, x, y) >= digits.accuracy(net, x, y) - 0.03


def test_the_result_runs_as_blocks(upgraded):
    _, small, _, x, _ = upgraded
    kinds = {type(module) for module in small.modules()}
    assert kinds & {cx.BlockConv, cx.BlockRecurrent}
    with torch.no_grad():
        assert_close(small(x), cx.restore(small)(x))


def test_units_of_one_block_do_not_hear_the_other():
    torch.manual_seed(0)
    net = nn.LSTM(6, 8, num_layers=2, bidirectional=True)
    partition = random_partition(find_chains(net, example=torch.zeros(5, 3, 6)), 2)
    for name in partition.layers:
        net, _ = attach_(net, name, partition)
    x = torch.randn(5, 3, 6)
    other = x.clone()
    labels = partition.labels[0]
    other[:, :, labels["in"] == 1] = 9.0
    own = np.tile(labels["hidden 2"], 2) == 0
    with torch.no_grad():
        assert torch.equal(net(x)[0][..., own], net(other)[0][..., own])
        assert not torch.equal(net(x)[0], net(other)[0])
        expected = net(x)[0]
        for name in partition.layers:
            net = harden_(net, name)
        assert type(net) is nn.LSTM
        assert torch.equal(net(x)[0], expected)


@pytest.mark.parametrize(
    ("dense", "inputs"),
    [
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), torch.randn(40, 4, 7, 6)),
        (nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular", bias=False), torch.randn(40, 4, 9)),
        (nn.GRU(4, 6, num_layers=2, bidirectional=True), torch.randn(9, 40, 4)),
        (nn.LSTM(4, 6, batch_first=True, bias=False), torch.randn(40, 9, 4)),
        (nn.RNN(4, 6), torch.randn(300, 4)),
        (nn.GRU(4, 6), pack_sequence([torch.randn(n, 4) for n in (60, 50, 40)])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_where_a_layer_is_blocks_already_least_squares_gives_them_back(dense, inputs):
    example = inputs if isinstance(inputs, torch.Tensor) else torch.zeros(5, 2, 4)
    partition = random_partition(find_chains(dense, ["*"], example=example), 2)
    with torch.no_grad():
        for name in partition.layers:
            weight, mask = dense.get_parameter(parameter(name)), partition.mask(name)
            weight.mul_(mask.view(*mask.shape, *[1] * (weight.ndim - 2)))
    net = copy.deepcopy(dense)
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    refit_(
        net, dense, partition, list(batches(inputs)) if isinstance(inputs, torch.Tensor) else [Batch(0, 1, (inputs,))]
    )
    with torch.no_grad():
        found, expected = (_tensor(one(inputs)) for one in (net, dense))
    assert (found - expected).square().mean() < 0.002 * expected.var()
    for name in partition.layers:
        weight = net.get_parameter(parameter(name))
        assert not weight[~partition.mask(name)].any()


def _tensor(output):
    output = output[0] if isinstance(output, tuple) else output
    return output if isinstance(output, torch.Tensor) else output.data
