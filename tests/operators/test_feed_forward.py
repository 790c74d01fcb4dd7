"""BlockFeedForward against the masked pair it was cut from, in each of its forms: before, after, undone, exported."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.operators.feed_forward import BlockFeedForward
from tests.helpers.block_models import block_linear
from tests.helpers.planted.feed_forward import CASES, HIDDEN, INPUTS, dense_pair
from tests.helpers.tolerance import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def run(modules, x):
    first, activation, second, gate = modules
    return second(activation(first(x)) if gate is None else activation(gate(x)) * first(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("case", CASES)
def test_same_outputs_and_undone(case, gated, dtype):
    modules = dense_pair(case, dtype, gated)
    block = BlockFeedForward.from_dense(*modules)
    assert gated or CASES[case][1] in (None, block.form)
    for shape in [(INPUTS,), (1, INPUTS), (3, 5, INPUTS), (0, INPUTS)]:
        x = torch.randn(shape).to(dtype)
        assert_close(block(x), run(modules, x))
    undone = block.to_dense()
    for found, expected in zip(undone, modules, strict=True):
        if isinstance(expected, nn.Linear):
            assert torch.equal(found.weight, expected.weight)
            assert torch.equal(found.bias, expected.bias)
            assert found.weight.dtype == dtype
    assert undone.activation is modules[1]
    assert (undone.gate is None) == (not gated)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("case", ["equal subnetworks", "dormant neurons", "ragged layers", "channels"])
def test_same_gradients(case, gated, bias):
    modules = dense_pair(case, gated=gated, bias=bias)
    block = BlockFeedForward.from_dense(*modules)
    inputs = [torch.randn(7, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    for x, output in zip(inputs, (lambda x: run(modules, x), block), strict=True):
        (output(x.requires_grad_()) ** 2).sum().backward()
    assert_close(inputs[1].grad, inputs[0].grad)
    for parameter in block.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for found, dense in zip(block.to_dense(), modules, strict=True):
        if isinstance(dense, nn.Linear):
            inside = dense.weight != 0
            assert_close(found.weight * inside, dense.weight.grad * inside)
            assert found.bias is None if dense.bias is None else (found.bias - dense.bias.grad).abs().max() < 1e-12


def test_forms_cost_what_their_blocks_cost():
    """4 subnetworks cost a quarter; layers cost their own blocks; channels theirs, which no other form can see."""
    for case, form in (("equal subnetworks", "pair"), ("equal layers", "layers")):
        block = BlockFeedForward.from_dense(*dense_pair(case))
        assert (block.form, block.macs, block.dense_macs) == (form, 96 * 44 // 4, 96 * 44)
    assert BlockFeedForward.from_dense(*dense_pair("equal subnetworks")).n_blocks == 4
    assert BlockFeedForward.from_dense(*dense_pair("equal layers")).n_blocks == 8
    first, activation, second, _ = dense_pair("channels")
    block = BlockFeedForward.from_dense(first, activation, second)
    expected = sum(
        cx.decompose(first.weight[q]).macs + cx.decompose(second.weight[:, q]).macs
        for q in np.array_split(np.arange(HIDDEN), 4)
    )
    assert (block.form, block.n_channels, block.macs) == ("channels", 4, expected)
    assert block.macs < cx.decompose(first.weight).macs + cx.decompose(second.weight).macs
    assert BlockFeedForward.from_dense(first, activation, second, channels=12).n_channels == 12


def test_a_gate_counts_and_joins():
    """Gate and first share the hidden neurons: an edge of either is one of both."""
    first, gate, second = (nn.Linear(2, 2, bias=False) for _ in range(3))
    with torch.no_grad():
        for layer, weight in ((first, [[1, 0], [0, 0]]), (gate, [[0, 0], [0, 1]]), (second, [[1, 0], [0, 1]])):
            layer.weight.copy_(torch.tensor(weight))
    block = BlockFeedForward.from_dense(first, nn.SiLU(), second, gate)
    assert repr(block) == 'BlockFeedForward(2 → 2 → 2, form="pair", blocks=2, 6 of 12 multiply-adds)'
    with torch.no_grad():
        gate.weight[0, 1] = 1
    assert BlockFeedForward.from_dense(first, nn.SiLU(), second, gate, channels=2).form == "channels"


def test_pair_moves_no_hidden_neuron():
    assert BlockFeedForward.from_dense(*dense_pair("equal subnetworks")).shuffle is None
    shuffled = BlockFeedForward.from_dense(*dense_pair("equal layers")).shuffle
    assert sorted(shuffled.tolist()) == list(range(HIDDEN))


@pytest.mark.parametrize("case", ["dormant neurons", "ragged layers", "channels"])
def test_reloaded_copied_cast(case):
    modules = dense_pair(case, torch.float32, gated=True)
    block, other = BlockFeedForward.from_dense(*modules), BlockFeedForward.from_dense(*modules)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.randn(5, INPUTS)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(x), block(x))
    assert torch.equal(copy.deepcopy(block)(x), block(x))
    again = BlockFeedForward.from_dense(*block.to_dense())
    assert (again.form, again.macs) == (block.form, block.macs)
    assert torch.equal(again(x), block(x))
    assert_close(block.double()(x.double()), run([m and m.double() for m in modules], x.double()))


@pytest.mark.parametrize(("case", "gated"), [("dormant neurons", False), ("ragged layers", True)])
def test_exported(case, gated):
    block = BlockFeedForward.from_dense(*dense_pair(case, torch.float32, gated))
    x = torch.randn(4, INPUTS)
    assert_close(torch.export.export(block, (x,)).module()(x), block(x))


def test_bad_input():
    first, second = nn.Linear(4, 8), nn.Linear(8, 4)
    with pytest.raises(cx.InvalidMatrix, match="second: expected 8 inputs, got 4"):
        BlockFeedForward.from_dense(first, nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(cx.InvalidMatrix, match=r"gate: expected shape \(8, 4\), got \(4, 8\)"):
        BlockFeedForward.from_dense(first, nn.ReLU(), second, gate=second)
    for channels in (0, 9, 2.0):
        with pytest.raises(cx.InvalidOption, match="channels must be an integer from 1 to 8"):
            BlockFeedForward.from_dense(first, nn.ReLU(), second, channels=channels)
    with pytest.raises(cx.InvalidMatrix, match="4 input features"):
        BlockFeedForward.from_dense(first, nn.ReLU(), second)(torch.ones(2, 5))
    with torch.no_grad():
        second.weight[0, 0] = float("inf")
    with pytest.raises(cx.InvalidMatrix, match="finite"):
        BlockFeedForward.from_dense(first, nn.ReLU(), second)


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8])
def test_channels_are_as_many_as_the_width_is_wider(ratio):
    """d–cd–d has c channels W₁^q, W₂^q whose outputs add up, against the sum over channels of dense products."""
    torch.manual_seed(ratio)
    first, second = nn.Linear(6, 6 * ratio), nn.Linear(6 * ratio, 6)
    with torch.no_grad():
        first.weight.mul_(torch.rand_like(first.weight) < 0.3)
        second.weight.mul_(torch.rand_like(second.weight) < 0.3)
    block = BlockFeedForward.from_dense(first, nn.GELU(), second, form="channels")
    assert (block.form, block.n_channels) == ("channels", ratio)
    x = torch.randn(5, 6)
    expected = second.bias + sum(
        nn.functional.gelu(x @ first.weight[q].T + first.bias[q]) @ second.weight[:, q].T
        for q in torch.arange(6 * ratio).chunk(ratio)
    )
    assert_close(block(x), expected)
    assert torch.equal(block.to_dense().second.weight, second.weight)
    assert torch.equal(block.to_dense().first.weight, first.weight)


@pytest.mark.parametrize("form", ["pair", "layers", "channels"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gated", [False, True])
def test_any_form_can_be_forced(case, form, gated):
    modules = dense_pair(case, gated=gated)
    block = BlockFeedForward.from_dense(*modules, form=form)
    x = torch.randn(3, INPUTS, dtype=torch.float64)
    assert block.form == form
    assert_close(block(x), run(modules, x))
    again = BlockFeedForward.from_description(block.describe()).double()
    again.load_state_dict(block.state_dict())
    assert torch.equal(again(x), block(x))


def test_equal_blocks_of_all_channels_are_one_product():
    """Four channels of four equal blocks: one batched product for each layer, not one for each channel."""
    first, second = nn.Linear(16, 64), nn.Linear(64, 16)
    parts = [block_linear(16, 16, 4, seed).weight for seed in range(4)]
    with torch.no_grad():
        first.weight.copy_(torch.cat(parts))
        second.weight.copy_(torch.cat(parts, 1))
    block = BlockFeedForward.from_dense(first, nn.ReLU(), second, form="channels")
    assert block.n_channels == 4
    assert [len(stack) for stack in block.first.weights] == [16]
    assert [len(stack) for stack in block.second.weights] == [16]
