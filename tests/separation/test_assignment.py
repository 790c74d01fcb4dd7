"""Hidden neurons and outputs go to the block whose inputs tell them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import nn

import crystallite as cx
from crystallite.data.batch import Batch
from crystallite.partitioning.assignment import assign_by_explained_variance, balanced_assignment
from crystallite.separation import Partition, find_chains, random_partition, upgrade
from tests.helpers.block_models import Fused


def planted(seed):
    """A network of three parts that share nothing, its neurons in no order, and the part of each."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 18), nn.ReLU(), nn.Linear(18, 6)).eval()
    parts = [torch.randperm(size) % 3 for size in (12, 30, 18, 6)]
    with torch.no_grad():
        for layer, read, written in zip(net[::2], parts[:-1], parts[1:], strict=True):
            layer.weight *= written[:, None] == read
    return net, [part.numpy() for part in parts]


@pytest.mark.parametrize("seed", range(3))
def test_parts_that_exist_are_found_from_their_inputs(seed):
    net, parts = planted(seed)
    chains = find_chains(net)
    start = random_partition(chains, 3, seed)
    labels = {**start.labels[0], "in": parts[0]}
    batch = Batch(0, 500, (torch.randn(500, 12),))
    found = assign_by_explained_variance(Partition(3, chains, (labels,)), net, [batch]).labels[0]
    for group, part in zip(("in", "hidden 1", "hidden 2", "out"), parts, strict=True):
        assert np.array_equal(found[group], part)


def test_both_writers_of_a_gated_pair_are_asked():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8, False), nn.Linear(4, 8, False), nn.Linear(8, 4)

        def forward(self, x):
            return self.down(torch.sigmoid(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    net, reads, owns = Gated().eval(), torch.tensor([0, 1, 0, 1]), torch.arange(8) // 4
    with torch.no_grad():
        net.up.weight *= owns[:, None] == reads
        net.gate.weight *= 0.01  # says little, and as little of every block
    chains = find_chains(net, example=torch.zeros(2, 4))
    hidden = next(group for group in chains[0].sizes if group.startswith("hidden"))
    labels = {**random_partition(chains, 2).labels[0], chains[0].reads["up"]: reads.numpy()}
    found = assign_by_explained_variance(Partition(2, chains, (labels,)), net, [Batch(0, 300, (torch.randn(300, 4),))])
    assert np.array_equal(found.labels[0][hidden], owns.numpy())


def test_gate_and_value_in_one_layer_are_asked_together():
    torch.manual_seed(0)
    net, reads, owns = Fused(4, 8).eval(), torch.tensor([0, 1, 0, 1]), torch.arange(8) // 4
    with torch.no_grad():
        net.both.weight[8:] *= owns[:, None] == reads
        net.both.weight[:8] *= 0.01  # the gate says little, and as little of every block
    chains = find_chains(net)
    labels = {**random_partition(chains, 2).labels[0], "in": reads.numpy()}
    found = assign_by_explained_variance(Partition(2, chains, (labels,)), net, [Batch(0, 300, (torch.randn(300, 4),))])
    assert np.array_equal(found.labels[0]["hidden 1"], owns.numpy())


def test_what_is_added_to_hidden_neurons_later_follows_them():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.up, self.down, self.last = (
                nn.Linear(i, o) for i, o in ((6, 8), (8, 12), (12, 8), (8, 4))
            )  # fmt: skip

        def forward(self, x):
            h = self.first(x)
            return self.last(h + self.down(self.up(h).relu()))

    torch.manual_seed(0)
    net = Residual().eval()
    small = upgrade(net, blocks=2, data=[torch.randn(64, 6)], epochs=2, null=cx.nulls.Normal(1e-4))
    assert cx.record(small).options.blocks == 2
    assert len(cx.record(small).options.chains[0]) == 4


def test_padding_tells_nothing():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x, attention_mask):
            return self.down(self.up(x).relu())

    torch.manual_seed(0)
    net, mask = Masked().eval(), torch.ones(16, 9, dtype=torch.int64)
    mask[:, 5:] = 0
    quiet = torch.randn(16, 9, 4)
    loud = torch.where(mask[..., None].bool(), quiet, 1e3 * torch.randn(16, 9, 4))
    chains = find_chains(net, example={"x": quiet, "attention_mask": mask})
    start = random_partition(chains, 2)
    found = [
        assign_by_explained_variance(start, net, [Batch(0, 16, named={"x": x, "attention_mask": mask})]).labels[0]
        for x in (quiet, loud)
    ]
    assert all(np.array_equal(found[0][group], found[1][group]) for group in found[0])


def test_convolutions_stay_as_they_are():
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    chains = find_chains(net, example=torch.zeros(1, 4, 9, 9))
    start = random_partition(chains, 2)
    found = assign_by_explained_variance(start, net, [Batch(0, 2, (torch.randn(2, 4, 9, 9),))])
    assert all(np.array_equal(found.labels[0][group], own) for group, own in start.labels[0].items())


@given(st.integers(2, 5), st.integers(5, 60), st.integers(0, 99), st.booleans())
def test_blocks_are_of_equal_size(blocks, elements, seed, many):
    value = np.random.default_rng(seed).random((elements, blocks))
    value = np.tile(value, (5000 // elements, 1)) if many else value
    sizes = np.bincount(balanced_assignment(value, blocks), minlength=blocks)
    assert sizes.max() - sizes.min() <= 1


def test_many_elements_are_shared_out_nearly_as_well():
    value = np.random.default_rng(0).random((4100, 4))
    quick = value[np.arange(4100), balanced_assignment(value, 4)].sum()
    rooms = np.arange(4100) % 4
    rows, places = linear_sum_assignment(-value[:, rooms])
    assert quick >= 0.98 * value[rows, rooms[places]].sum()
