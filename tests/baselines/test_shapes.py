"""SVD and random blocks: exact where the weights have that shape, and within the limit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.baselines.shapes import decomposed, random_blocks
from crystallite.validation.cost import count_macs
from tests.helpers.prunable import batch, convolutions, perceptron
from tests.helpers.tolerance import assert_close


def low_rank(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 30), nn.ReLU(), nn.Linear(30, 18, bias=False)).double().eval()
    with torch.no_grad():
        for layer in (net[0], net[2]):
            rows, columns = layer.weight.shape
            layer.weight.copy_(torch.randn(rows, rank).double() @ torch.randn(rank, columns).double())
    return net


@pytest.mark.parametrize("rank", [1, 3])
def test_svd_is_exact_at_the_true_rank(rank):
    net, some = low_rank(rank), batch(5, 24)
    some.positional[0].data = some.positional[0].double()
    small = decomposed(net, ["0", "2"], some, 5 * rank * (24 + 30 + 30 + 18))
    assert [layer.out_features for layer in (small[0].down, small[2].down)] == [rank, rank]
    assert_close(some.run(small), some.run(net))


def test_svd_of_recurrent_networks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(8, 16, num_layers=2, bidirectional=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # of rank 2
                parameter.copy_(parameter[:, :2] @ torch.randn(2, parameter.shape[1]))
    x = batch(5, 3, 8)
    total = count_macs(model, x)
    small = decomposed(model, ["0"], x, total * 2 // 3)
    assert count_macs(small, x) <= total * 2 // 3
    assert_close(x.run(small)[0], x.run(model)[0])


def test_svd_of_convolutions():
    net, some = convolutions(alive=12), batch(3, 2, 6, 6)
    with torch.no_grad():
        net[3].weight.copy_((torch.randn(12, 2) @ torch.randn(2, 108)).view(12, 12, 3, 3))
    limit = count_macs(net, some) - 3 * 4 * (12 * 108 - 2 * (12 + 108))
    small = decomposed(net, ["3"], some, limit)
    assert small[3].rank == 2
    assert small[3].stride == (2, 2)
    assert count_macs(small, some) == limit
    assert (some.run(small) - some.run(net)).abs().max() < 1e-4


@settings(max_examples=15)
@given(share=st.floats(0.45, 1.0), hidden=st.integers(16, 40), seed=st.integers(0, 9))
def test_the_cost_keeps_to_the_limit(share, hidden, seed):
    net, some = perceptron(hidden, seed=seed), batch(2, 8)
    limit = int(share * count_macs(net, some))
    factors = decomposed(net, ["0", "2", "4"], some, limit)
    blocks = random_blocks(net, ["0", "2"], some, limit, seed)
    assert count_macs(factors, some) <= limit
    assert count_macs(blocks, some) <= 1.03 * limit
    assert some.run(factors).shape == some.run(blocks).shape == (2, 4)


def count(layer):
    return sum(len(stack) for stack in layer.weights)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_random_blocks_are_as_many_as_needed(blocks):
    net, some = nn.Sequential(nn.Linear(24, 36), nn.ReLU(), nn.Linear(36, 12)).eval(), batch(1, 24)
    small = random_blocks(net, ["0", "2"], some, count_macs(net, some) // blocks)
    for place in (0, 2):
        assert count(small[place]) == blocks
        dense, kept = net[place].weight, small[place].to_dense().weight
        assert (kept != 0).sum() == kept.numel() // blocks
        assert torch.equal(kept[kept != 0], dense[kept != 0])
        assert len({tuple(row.tolist()) for row in kept != 0}) == blocks
    again, other = (random_blocks(net, ["0", "2"], some, 648, seed) for seed in (0, 1))
    assert torch.equal(again[0].to_dense().weight, random_blocks(net, ["0", "2"], some, 648, 0)[0].to_dense().weight)
    assert not torch.equal(again[0].to_dense().weight, other[0].to_dense().weight)


def test_layers_that_are_too_small_stay_dense():
    net, some = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).eval(), batch(1, 64)
    small = random_blocks(net, ["0", "2"], some, 64 * 64 // 8 + 128)
    assert count(small[0]) == 8
    assert isinstance(small[2], nn.Linear)


def test_refusals():
    net, some = convolutions(), batch(1, 2, 6, 6)
    with pytest.raises(cx.InvalidOption, match="0 is a Conv2d"):
        random_blocks(net, ["0", "6"], some, 100)
    net, some = perceptron(), batch(1, 8)
    with pytest.raises(cx.InvalidOption, match="cannot be made so small"):
        random_blocks(net, ["0"], some, 10)
    with pytest.raises(cx.InvalidOption, match="cannot be made so small"):
        decomposed(net, ["0"], some, 10)
