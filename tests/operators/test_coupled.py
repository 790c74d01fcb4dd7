"""Coupled blocks against the dense layer they stand for: before, after, undone, reloaded and exported."""

import copy

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.operators.coupled import BorderedLinear, CoupledLinear
from tests.helpers.planted.coupled import HUBS, bordered, coupled
from tests.helpers.planted.linear import planted
from tests.helpers.tolerance import assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
STRUCTURES = ["equal", "ragged", "one block", "dormant", "empty"]


def gradients(layer, x):
    """Gradients of the input and, as those of a dense weight, of the parts."""
    x = x.clone().requires_grad_()
    (layer(x) ** 2).sum().backward()
    for parameter in layer.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # None: no entries
    return x.grad, layer.weight.detach(), layer.bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("n_hubs", HUBS.values(), ids=HUBS)
def test_border_computes_the_same(kind, n_hubs, dtype):
    dense, layer = bordered(kind, n_hubs, dtype)
    for shape in [(84,), (1, 84), (3, 5, 84), (0, 84)]:
        x = torch.randn(shape).to(dtype)
        assert_close(layer(x), dense(x))
    restored = layer.to_dense()
    assert torch.equal(restored.weight, dense.weight)
    assert torch.equal(restored.bias, dense.bias)
    assert layer.macs <= dense.weight.numel()


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant"])
@pytest.mark.parametrize("n_hubs", HUBS.values(), ids=HUBS)
def test_border_has_the_same_gradients(kind, n_hubs):
    dense, layer = bordered(kind, n_hubs)
    inside = dense.weight.detach() != 0
    x = torch.randn(7, 84, dtype=torch.float64)
    (x_dense, w_dense, b_dense), (x_found, w_found, b_found) = gradients(dense, x), gradients(layer, x)
    assert_close(x_found, x_dense)
    assert_close(w_found, w_dense * inside)
    assert_close(b_found, b_dense)


def test_border_of_found_hubs():
    """The way a user gets there: `hubs` finds the border, and the layer is exact on it."""
    weight = planted("equal")
    weight[7], weight[:, 11] = 1.0, 2.0
    found = cx.hubs(weight)
    layer = BorderedLinear.from_dense(weight, None, found)
    assert (found.hub_rows.tolist(), found.hub_cols.tolist(), layer.n_blocks) == ([7], [11], 4)
    assert torch.equal(layer.to_dense().weight, weight)
    assert layer.n_hubs == 2
    assert layer.macs == found.structure.macs + 84 + 59


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_low_rank_computes_the_same(kind, rank, dtype):
    _dense, layer = coupled(kind, rank, dtype)
    exact = layer.to_dense().double()
    with torch.no_grad():  # the sum B + UV itself is rounded in a narrow dtype
        exact.weight.copy_(layer.blocks.weight.double() + layer.up.double() @ layer.down.double())
    for shape in [(84,), (1, 84), (3, 5, 84), (0, 84)]:
        x = torch.randn(shape).to(dtype)
        assert_close(layer(x), exact(x.double()).to(dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["equal", "ragged", "one block", "dormant"])
def test_low_rank_has_the_gradients_of_its_weight(kind, bias):
    """∂L/∂U = (∂L/∂W) Vᵀ and ∂L/∂V = Uᵀ (∂L/∂W) with the dense layer's ∂L/∂W."""
    dense, layer = coupled(kind, 3, bias=bias)
    assert torch.equal(layer.weight, dense.weight)
    up, down = layer.up.detach().clone(), layer.down.detach().clone()
    x = torch.randn(7, 84, dtype=torch.float64)
    x_dense, w_dense, b_dense = gradients(dense, x)
    x_found, _, b_found = gradients(layer, x)
    assert_close(x_found, x_dense)
    assert_close(layer.up.grad, w_dense @ down.T)
    assert_close(layer.down.grad, up.T @ w_dense)
    assert_close(layer.blocks.weight, w_dense * (planted(kind) != 0))
    if bias:
        assert_close(b_found, b_dense)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_coupling(dtype):
    """Without blocks and bias the dtype is that of the coupling."""
    for dense, layer in (bordered("empty", (3, 4), dtype, bias=False), coupled("empty", 2, dtype, bias=False)):
        x = torch.randn(5, 84).to(dtype)
        assert_close(layer(x), dense(x))
        assert torch.equal(layer.to_dense().weight, dense.weight)
        assert layer.to_dense().weight.dtype == dtype


@pytest.mark.parametrize("make", [lambda: bordered("ragged", (3, 4)), lambda: coupled("ragged", 2)])
def test_reloaded_copied_exported(make):
    layer, other = make()[1], make()[1]
    x = torch.randn(5, 84, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))
    assert (layer.in_features, layer.out_features) == (84, 60)
    assert layer.n_blocks == cx.decompose(planted("ragged")).n_blocks
    assert "\n" not in repr(layer)


HUB_IN_A_BLOCK = cx.BorderedStructure(np.array([1]), np.array([], int), cx.decompose(np.eye(3)), True)


def blocks_of(size):
    return cx.BlockLinear.from_dense(torch.eye(size), None, cx.decompose(np.eye(size)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CoupledLinear.from_parts(blocks_of(3), torch.ones(2, 1), torch.ones(1, 3)), "up: expected 3 rows"),
        (lambda: CoupledLinear.from_parts(blocks_of(3), torch.ones(3, 2), torch.ones(1, 3)), r"down: .*\(2, 3\)"),
        (lambda: CoupledLinear.from_parts(blocks_of(3), torch.ones(3), torch.ones(1, 3)), "up: expected a 2-D"),
        (lambda: CoupledLinear.from_parts(blocks_of(3), torch.ones(3, 1).double(), torch.ones(1, 3)), "one dtype"),
        (lambda: BorderedLinear.from_dense(torch.ones(2, 3), None, cx.hubs(np.eye(3))), "weight: expected"),
        (lambda: BorderedLinear.from_dense(torch.eye(3), None, HUB_IN_A_BLOCK), "hub row 1 must be dormant"),
        (lambda: bordered("equal", (1, 1))[1](torch.ones(2, 83).double()), "84 input features"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(cx.InvalidMatrix, match=message):
        make()
