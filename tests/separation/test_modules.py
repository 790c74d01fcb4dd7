"""A network is split along the modules that were found in it."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.data.batch import batches
from crystallite.separation import find_chains, upgrade
from crystallite.separation.modules import module_partition
from tests.helpers.tasks import block_network, digits, mlp


def heads(logits, labels):
    return F.cross_entropy(logits.unflatten(1, (-1, 10)).flatten(0, 1), labels.flatten())


class Pairs:
    """Digits side by side, drawn anew every time.

    shared: pixels at the end of a digit that lie on the first ones of the next; repeated: how often all are the same.
    """

    def __init__(self, k, order, part, shared=0, repeated=0.0):
        self.k, self.order, self.part, self.shared, self.repeated = k, order, part, shared, repeated

    def __iter__(self):
        for _ in range(40):
            yield self.draw(128)

    def draw(self, samples):
        images, labels = digits()
        index = self.part[torch.randint(len(self.part), (samples, self.k))]
        index = torch.where(torch.rand(samples, 1) < self.repeated, index[:, :1], index)
        x = torch.zeros(samples, len(self.order))
        for task in range(self.k):
            start = task * (64 - self.shared)
            x[:, start : start + 64] += images[index[:, task]].flatten(1)
        return x[:, self.order], labels[index]


def train(model, data, epochs, rate=2e-3):
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(epochs * 40):
        x, y = data.draw(128)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / (epochs * 40))
        optimizer.zero_grad()
        heads(model(x), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def accuracies(model, x, y):
    return (model(x).unflatten(1, (-1, 10)).argmax(2) == y).float().mean(0)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3])
def test_every_head_of_the_split_network_is_as_good_as_dense(k):
    torch.manual_seed(k)
    order, index = torch.randperm(64 * k), torch.randperm(len(digits()[0]))
    data, test = Pairs(k, order, index[:1400]), Pairs(k, order, index[1400:])
    net = train(mlp(64 * k, 10 * k, 96), data, 8)
    found = cx.discover(net, data.draw(1500)[0])
    assert found.k == k
    small = upgrade(net, modules=found, data=data, loss=heads, epochs=10, learning_rate=5e-3)
    dense = train(net, data, 10)
    x, y = test.draw(4000)
    assert (accuracies(small, x, y) >= accuracies(dense, x, y) - 0.005).all()
    parts = cx.subnetworks(small)
    assert len(parts.parts) == k
    for task, outputs in enumerate(parts.outputs):
        assert set((outputs // 10).tolist()) == {task}


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "repeated"), [(16, 0.0), (32, 0.0), (0, 0.25), (0, 0.5)])
def test_tasks_may_overlap_or_agree(shared, repeated):
    """Pixels of both tasks are copied to both; images that agree help only who sees both: within a point."""
    torch.manual_seed(0)
    order, index = torch.randperm(128 - shared), torch.randperm(len(digits()[0]))
    data, test = (Pairs(2, order, part, shared, repeated) for part in (index[:1400], index[1400:]))
    net = train(mlp(128 - shared, 20, 96), data, 8)
    found = cx.discover(net, data.draw(1500)[0])
    assert found.outputs.tolist() == [0] * 10 + [1] * 10
    both = (order >= 64 - shared) & (order < 64)
    called = torch.from_numpy(found.shared.any(0))
    assert called.any() == bool(shared)
    assert (called & both).sum() >= 0.7 * called.sum()
    small = upgrade(net, modules=found, data=data, loss=heads, epochs=10, learning_rate=5e-3)
    dense = train(net, data, 10)
    x, y = test.draw(4000)
    assert (accuracies(small, x, y) >= accuracies(dense, x, y) - 0.01).all()
    assert len(cx.subnetworks(small).parts) == 2


def planted(seed=0):
    model, parts = block_network([(4, 6, 3), (5, 4, 2)], np.random.default_rng(seed))
    return model, parts, torch.randn(300, 9)


def test_labels_are_those_of_the_modules_and_dormant_neurons_are_shared_out():
    model, _, x = planted()
    model[0].weight.data[:, 2] = 0
    found = cx.discover(model, x)
    partition = module_partition(found, model, find_chains(model), next(batches(x)))
    labels = partition.labels[0]
    assert found.inputs[2] == -1
    assert np.array_equal(labels["hidden 1"], found.hidden["0"])
    assert np.array_equal(labels["out"], found.outputs)
    live = found.inputs >= 0
    assert np.array_equal(labels["in"][live], found.inputs[live])
    assert np.bincount(labels["in"]).min() == 4


def test_one_module_is_no_split():
    net = mlp(6, 3)
    x = torch.randn(200, 6)
    with pytest.raises(cx.InvalidOption, match="the network proposes no split"):
        upgrade(net, modules=cx.discover(net, x), data=[x])


def test_layers_that_discovery_knows_nothing_about_are_refused():
    model, _, x = planted()
    found = cx.discover(model, x)
    deeper = nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), *model)
    with pytest.raises(cx.InvalidOption, match="no labels for the inputs of 2"):
        upgrade(deeper, modules=found, data=[x])


@pytest.mark.parametrize("given", [{}, {"blocks": 2, "modules": True}])
def test_one_way_to_say_what_the_blocks_are(given):
    model, _, x = planted()
    given = {**given, **({"modules": cx.discover(model, x)} if "modules" in given else {})}
    with pytest.raises(cx.InvalidOption, match="expected one of blocks=k"):
        upgrade(model, data=[x], **given)
