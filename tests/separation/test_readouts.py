"""While they are trained, blocks learn the whole task too."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.data.batch import batches
from crystallite.separation import find_chains, random_partition, upgrade
from crystallite.separation.readouts import readouts_for
from tests.helpers import digits


def readouts(net, x, **options):
    partition = random_partition(find_chains(net, example=x, **options), 2)
    return readouts_for(net.eval(), partition, next(batches([x]))), partition


@pytest.mark.parametrize(("ignore", "layer", "group"), [([], "2", "hidden 2"), (["4"], "2", "hidden 2")])
def test_each_block_reads_its_own_last_hidden_neurons(ignore, layer, group):
    net, x = digits.network(), torch.randn(5, 64)
    found, partition = readouts(net, x, ignore=ignore)
    assert found.layer == layer
    for b, own in enumerate(found.members):
        assert torch.equal(own, torch.from_numpy(np.flatnonzero(partition.labels[0][group] == b)))
    hidden = torch.randn(5, 96)
    with torch.no_grad():
        assert all(not said.any() and said.shape == (5, 10) for said in found(hidden))
        found.maps[0].weight.fill_(1.0)
        expected = hidden[:, found.members[0]].relu().sum(1)
        assert torch.allclose(next(found(hidden)), expected[:, None].expand(-1, 10))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        return self.layers(x).mean(1)


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (Pooled(), torch.randn(3, 5, 8)),
        (nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(2, 4, 8, 8)),
        (nn.Sequential(Pooled(), nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 5, 8)),
    ],
)
def test_other_models_have_none(net, x):
    assert readouts(net, x)[0] is None
    with pytest.raises(cx.InvalidOption, match="block_loss: needs a loss, and one chain"):
        upgrade(net, blocks=2, data=[(x, net(x).detach())], loss=F.mse_loss, block_loss=1.0)


def test_blocks_come_to_know_more_than_their_own_outputs():
    """Every block sees all four sources, but answers for one output of two."""
    torch.manual_seed(0)
    sources = torch.randn(2000, 4)
    x, y = sources.repeat(1, 2), sources.abs().unflatten(1, (2, 2)).sum(2)
    data = list(zip(x.split(50), y.split(50), strict=True))
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for a, b in data * 10:
        optimizer.zero_grad()
        F.mse_loss(net(a), b).backward()
        optimizer.step()
    unknown = []
    for weight in (0.0, 1.0):
        small = upgrade(net, blocks=2, data=data, loss=F.mse_loss, epochs=8, block_loss=weight, learning_rate=5e-3)
        assert cx.record(small).options.recipe.block_loss == weight
        labels = {group: np.array(own) for group, own in cx.record(small).options.labels[0].items()}
        with torch.no_grad():
            hidden = cx.restore(small)[:4](x)
        unknown.append(max(unexplained(hidden[:, labels["hidden 2"] == b], y[:, labels["out"] != b]) for b in range(2)))
    assert unknown[1] < 0.5 * unknown[0]


def unexplained(hidden, y):
    """The share of the variance that least squares does not read from some neurons."""
    ones = torch.cat([hidden, torch.ones(len(hidden), 1)], 1)
    rest = y - ones @ torch.linalg.lstsq(ones, y, driver="gelsd").solution
    return float(rest.var() / y.var())


def test_blocks_along_modules_are_left_to_their_own_tasks():
    loader, *_ = digits.data()
    net = digits.network()
    given = random_partition(find_chains(net, ignore=["4"]), 2)
    small = upgrade(net, data=loader, loss=F.cross_entropy, epochs=1, partition=given, learning_rate=5e-3)
    assert cx.record(small).options.recipe.block_loss == 0.0


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight):
    with pytest.raises(cx.InvalidOption, match="block_loss must be"):
        upgrade(digits.network(), blocks=2, data=[torch.randn(8, 64)], block_loss=weight)
