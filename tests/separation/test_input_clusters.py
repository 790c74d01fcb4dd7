"""Inputs that vary together stay together, unless an output can read one block only."""

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.separation import cluster_partition, find_chains, upgrade


def network(inputs):
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8))


def copies():
    """Eight sources, four noisy copies of each, scrambled; the source of every input."""
    torch.manual_seed(0)
    order = torch.randperm(32)
    read = torch.randn(600, 8).repeat_interleave(4, 1)[:, order] + 0.1 * torch.randn(600, 32)
    return read, (order // 4).numpy()


@pytest.mark.parametrize("blocks", [2, 4, 8])
def test_copies_go_to_one_block(blocks):
    read, source = copies()
    labels = cluster_partition(find_chains(network(32)), blocks, {"0": read}).labels[0]["in"]
    assert np.bincount(labels).tolist() == [32 // blocks] * blocks
    assert all(len(set(labels[source == s])) == 1 for s in range(8))


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_a_line_is_cut_into_pieces(blocks):
    torch.manual_seed(0)
    noise, order = torch.randn(4000, 64), torch.randperm(60)
    read = sum(noise[:, i : i + 60] for i in range(5))[:, order]
    labels = cluster_partition(find_chains(network(60)), blocks, {"0": read}).labels[0]["in"]
    along = labels[np.argsort(order.numpy())]
    assert np.count_nonzero(along[1:] != along[:-1]) == blocks - 1
    assert np.ptp(np.bincount(along)) <= 3


def test_regions_weigh_what_varies_and_constants_fill_up():
    """Inputs of one source vary three times as much as those of the other, so fewer of them weigh as much."""
    torch.manual_seed(0)
    read = torch.cat([3 * torch.randn(500, 1).expand(-1, 10), torch.randn(500, 1).expand(-1, 18)], 1)
    read = torch.cat([read + 0.1 * torch.randn(500, 28), torch.full((500, 12), 0.7)], 1)
    labels = cluster_partition(find_chains(network(40)), 2, {"0": read}).labels[0]["in"]
    assert len(set(labels[:10])) == len(set(labels[10:28])) == 1
    assert np.bincount(labels).tolist() == [20, 20]


@pytest.mark.parametrize("live", [0, 2])
def test_inputs_may_be_constant(live):
    read = torch.zeros(50, 12)
    read[:, :live] = torch.randn(50, live)
    labels = cluster_partition(find_chains(network(12)), 4, {"0": read}).labels[0]["in"]
    assert np.bincount(labels).tolist() == [3] * 4


@pytest.mark.parametrize(("ignore", "blocks_of_a_source"), [("4", 1), ((), 4)])
def test_regions_are_for_blocks_that_are_read_together(ignore, blocks_of_a_source):
    read, source = copies()
    net = network(32)
    with torch.no_grad():
        for layer in net[::2]:
            layer.weight.mul_(4)  # as if trained
    small = upgrade(net, blocks=4, data=[read], epochs=10, ignore=ignore)
    labels = np.array(cx.record(small).options.labels[0]["in"])
    assert {len(set(labels[source == s])) for s in range(8)} == {blocks_of_a_source}
