"""In which blocks neurons are, in which units, and how blocks are fitted."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.annealing import nulls
from crystallite.data.batch import batches
from crystallite.graph.chains import find_chains
from crystallite.graph.neuron_groups import neuron_groups
from crystallite.graph.trace import trace
from crystallite.partitioning.partition import Partition, decorrelated_partition, joint_components, random_partition
from crystallite.separation.refit import refit_
from crystallite.separation.scale import balance_
from crystallite.structure.levels import chain_labels
from tests.helpers.block_models import block_linear


def mlp(activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), activation(), nn.Linear(16, 20), activation(), nn.Linear(20, 8))


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_random_partitions_are_balanced_and_follow_the_seed(blocks):
    chains = find_chains(mlp())
    one, same, other = (random_partition(chains, blocks, seed) for seed in (0, 0, 1))
    for group, size in chains[0].sizes.items():
        counts = np.bincount(one.labels[0][group])
        assert len(counts) == blocks
        assert counts.max() - counts.min() <= (size % blocks > 0)
        assert np.array_equal(one.labels[0][group], same.labels[0][group])
    assert any(not np.array_equal(one.labels[0][g], other.labels[0][g]) for g in chains[0].sizes)


def test_spread_inputs_with_copies_go_to_different_blocks():
    net = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    sources = torch.randn(500, 8)
    order = torch.randperm(32)
    read = sources.repeat_interleave(4, 1)[:, order] + 0.01 * torch.randn(500, 32)
    labels = decorrelated_partition(find_chains(net), 4, {"0": read}).labels[0]["in"]
    assert np.bincount(labels).tolist() == [8] * 4
    for source in range(8):  # its four copies
        assert set(labels[(order // 4 == source).numpy()]) == {0, 1, 2, 3}


def test_spread_inputs_may_be_constant():
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
    labels = decorrelated_partition(find_chains(net), 2, {"0": torch.zeros(10, 6)}).labels[0]["in"]
    assert np.bincount(labels).tolist() == [3, 3]


def test_neighbours_of_a_line_alternate():
    """What each input shares with its neighbours decides, so every block sees all of the line, coarsely."""
    net = nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 4))
    torch.manual_seed(0)
    noise = torch.randn(4000, 42, dtype=torch.float64)
    read = noise[:, :-2] + noise[:, 1:-1] + noise[:, 2:]
    given = read.clone()
    labels = decorrelated_partition(find_chains(net), 2, {"0": read}).labels[0]["in"]
    assert torch.equal(read, given)
    assert np.bincount(labels).tolist() == [20, 20]
    assert np.count_nonzero(labels[1:] == labels[:-1]) <= 6  # a random partition has 19 or so


def test_joint_components_are_those_of_the_chain():
    net = mlp()
    partition = random_partition(find_chains(net), 4)
    weights = {name: net.get_submodule(name).weight.detach() * partition.mask(name) for name in partition.layers}
    weights["0"][:3] = 0
    found = joint_components(partition.chains[0], weights)
    for mine, theirs in zip(found.values(), chain_labels(list(weights.values())), strict=True):
        assert np.array_equal(mine < 0, theirs < 0)
        pairs = {(a, b) for a, b in zip(mine.tolist(), theirs.tolist(), strict=True)}
        assert len(pairs) == len(set(mine.tolist())) == len(set(theirs.tolist()))


def test_impossible_partitions_are_refused():
    chains = find_chains(mlp())
    with pytest.raises(cx.InvalidOption, match="too few for 9 blocks"):
        random_partition(chains, 9)
    with pytest.raises(cx.InvalidOption, match="at least 2"):
        random_partition(chains, 1)
    with pytest.raises(cx.InvalidOption, match="expected 12 labels for in"):
        Partition(2, chains, ({"in": np.zeros(12, int)},))
    with pytest.raises(cx.InvalidOption, match="that can be separated matches targets"):
        find_chains(nn.Sequential(nn.ReLU()))


def rms(weight, null, axis):
    return (weight.detach() / null.scale).square().mean(axis).sqrt()


def balanced_assignment(net, x):
    initial = nulls.for_module(net)
    layers = balance_(net, neuron_groups(net, trace(net, x)).values(), initial, lambda: net(x))
    return layers, initial


def test_units_are_balanced_without_a_change_of_function():
    net, x = mlp(), torch.randn(64, 12)
    torch.manual_seed(1)
    with torch.no_grad():
        expected = net(x)
        for before, after, size in ((net[0], net[2], 16), (net[2], net[4], 20)):
            factor = torch.exp2(torch.randint(-6, 7, (size,)).float())
            before.weight.mul_(factor[:, None])
            before.bias.mul_(factor)
            after.weight.div_(factor)
        assert torch.equal(net(x), expected)
        layers, initial = balanced_assignment(net, x)
        assert torch.equal(net(x), expected)  # to the last bit
    assert layers == ["2", "4"]
    for before, after in (("0", "2"), ("2", "4")):
        incoming = rms(net.get_submodule(before).weight, initial[f"{before}.weight"], 1)
        outgoing = rms(net.get_submodule(after).weight, initial[f"{after}.weight"], 0)
        assert (incoming / outgoing).log2().abs().max() <= 1.2  # a factor of 2, and what other layers still move


def test_units_that_matter_stay():
    net, x = mlp(nn.GELU), torch.randn(64, 12)
    before = [p.detach().clone() for p in net.parameters()]
    layers, _ = balanced_assignment(net, x)
    assert layers == []
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


def test_refit_is_least_squares():
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    net = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)).double()
    partition = random_partition(find_chains(dense), 2)
    x = torch.randn(400, 12, dtype=torch.float64)
    refit_(net, dense, partition, list(batches([x[:150], x[150:]])))
    read = x
    with torch.no_grad():
        for name, target in (("0", dense[0](x)), ("2", dense(x))):
            layer, mask = net.get_submodule(name), partition.mask(name)
            assert not layer.weight[~mask].any()
            _assert_least_squares(layer, mask, read, target)
            assert torch.allclose(layer(read).mean(0), target.mean(0), atol=1e-10)  # the bias
            read = torch.tanh(layer(read))  # what the next layer gets from the compressed net


def test_refit_finds_planted_blocks():
    """Where the dense layers are blocks already, least squares gives them back."""
    dense = nn.Sequential(block_linear(12, 16, 2, 1), nn.ReLU(), nn.Linear(16, 8))
    chains = find_chains(dense, targets=["0"])
    rows, cols = cx.decompose(dense[0].weight.detach()).row_block, cx.decompose(dense[0].weight.detach()).col_block
    partition = Partition(2, chains, ({chains[0].reads["0"]: cols, chains[0].writes["0"]: rows},))
    net = mlp()[:1].append(nn.ReLU()).append(nn.Linear(16, 8))
    refit_(net, dense, partition, list(batches(torch.randn(5000, 12))))
    assert (net[0].weight - dense[0].weight).abs().max() < 0.02 * dense[0].weight.abs().max()


def test_refit_needs_as_many_samples_as_inputs():
    net = mlp()
    partition = random_partition(find_chains(net), 2)
    with pytest.raises(cx.InvalidOption, match="6 inputs, but the data has 4 samples"):
        refit_(net, mlp(), partition, list(batches(torch.randn(4, 12))))


def test_refit_does_not_read_padding():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

        def forward(self, x, attention_mask):
            return self.layers(x)

    torch.manual_seed(0)
    dense, x = Tokens(), torch.randn(40, 5, 6)
    example = {"x": x, "attention_mask": torch.ones(40, 5)}
    partition = random_partition(find_chains(dense, example=example), 2)
    padded = torch.cat([x, 1e3 * torch.randn(40, 3, 6)], 1)
    mask = torch.cat([torch.ones(40, 5), torch.zeros(40, 3)], 1)
    fitted = []
    for batch in (example, {"x": padded, "attention_mask": mask}):
        net = Tokens()
        refit_(net, dense, partition, list(batches(batch)))
        fitted.append(net.layers[0].weight.detach())
    assert torch.allclose(*fitted, rtol=1e-4, atol=1e-6)


class Pair(nn.Module):
    """A feed-forward pair on a residual stream."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_refit_does_not_run_again_what_is_fitted():
    runs = []
    for depth in (2, 5):
        torch.manual_seed(0)
        dense = nn.Sequential(*(Pair() for _ in range(depth)))
        x, net = torch.randn(40, 8), copy.deepcopy(dense)
        partition = random_partition(find_chains(dense, example=x), 2)
        runs.append(0)

        def count(*_):
            runs[-1] += 1

        net[0].up.register_forward_hook(count)
        refit_(net, dense, partition, list(batches([x, x + 1])))
    assert runs[0] == runs[1]


def test_a_layer_makes_good_for_what_its_stream_has_lost():
    """The last layer is fitted to all that is missing of the dense model's output, not to what its own twin writes."""
    torch.manual_seed(0)
    dense, x = nn.Sequential(Pair(), Pair()).double(), torch.randn(400, 8, dtype=torch.float64)
    partition, net = random_partition(find_chains(dense, example=x), 2), copy.deepcopy(dense)
    refit_(net, dense, partition, list(batches([x[:150], x[150:]])))
    with torch.no_grad():
        stream = net[0](x)
        read, target = torch.relu(net[1].up(stream)), dense(x) - stream
    _assert_least_squares(net[1].down, partition.mask("1.down"), read, target)


def _assert_least_squares(layer, mask, read, target):
    centred, goal = read - read.mean(0), target - target.mean(0)
    for row in range(len(mask)):
        own = centred[:, mask[row]]
        ridge = 0.01 * own.square().sum(0).mean()
        stacked = torch.cat([own, ridge.sqrt() * torch.eye(own.shape[1], dtype=torch.float64)])
        aims = torch.cat([goal[:, row], goal.new_zeros(own.shape[1])])
        solved = torch.linalg.lstsq(stacked, aims[:, None]).solution[:, 0]
        assert torch.allclose(layer.weight[row, mask[row]], solved, rtol=1e-8, atol=1e-10)


def test_depthwise_convolutions_stay_in_their_units():
    """They read and write the same channels, so no scale of a channel can be undone behind them."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    layers, _ = balanced_assignment(net, torch.randn(2, 3, 6, 6))
    assert layers == []
