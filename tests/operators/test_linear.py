"""BlockLinear against the masked dense layer: before, after, undone, saved and reloaded, compiled and exported."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import crystallite as cx
from crystallite.operators.linear import BlockLinear
from crystallite.operators.runtime import engine
from tests.helpers import paper
from tests.helpers.planted.linear import STRUCTURES, pair
from tests.helpers.tolerance import assert_close


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("shape", [(84,), (1, 84), (16, 84), (3, 5, 84), (0, 84)])
def test_same_outputs(kind, dtype, shape):
    dense, blocks = pair(kind, dtype)
    x = torch.randn(shape).to(dtype)
    assert_close(blocks(x), dense(x))
    with torch.no_grad():  # by the compiled kernels
        assert_close(blocks(x), dense(x))


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 3, 4, 15, 16, 17, 500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_number_of_samples_and_threads(kind, threads, samples, dtype, monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_A_TEAM", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    dense, blocks = pair(kind, dtype)
    x = torch.randn(84, samples, dtype=dtype).t()  # not contiguous
    with torch.inference_mode():
        found = blocks(x)
        assert_close(found, dense(x))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert torch.equal(blocks(x), found)  # bit for bit, whoever computes what


def test_not_a_number_stays_where_it_is():
    dense, blocks = pair("equal")
    x = torch.randn(40, 84)
    x[7, 3] = float("nan")
    with torch.inference_mode():
        reached = torch.isnan(blocks(x))
    assert reached.any()
    assert not reached[torch.arange(40) != 7].any()
    row = torch.isnan(blocks(x[7]))
    assert torch.equal(row, reached[7])
    assert torch.equal(row, dense.weight[:, 3] != 0)


def test_blocks_in_order_move_nothing():
    weight = torch.zeros(7, 9)
    weight[:2, :4] = weight[2:5, 4:8] = 1.0  # the last rows and the last column are dormant
    layer = cx.BlockLinear.from_dense(weight, torch.ones(7), cx.decompose(weight))
    assert layer.columns is None
    assert layer.outputs is None
    assert {name for name, _ in layer.named_buffers()} == {"empty"}
    x = torch.randn(5, 9)
    assert_close(layer(x), nn.functional.linear(x, weight, torch.ones(7)))
    with torch.no_grad():
        assert_close(layer(x), nn.functional.linear(x, weight, torch.ones(7)))


def test_blocks_may_share_columns():
    """As the query, key and value of a fused projection do."""
    torch.manual_seed(0)
    weight = torch.zeros(6, 4)
    blocks = [(np.array([0, 2]), np.array([0, 1])), (np.array([1]), np.array([2, 3])), (np.array([3, 5]), np.arange(4))]
    for rows, cols in blocks:
        weight[np.ix_(rows, cols)] = torch.randn(len(rows), len(cols))
    layer = cx.BlockLinear.from_blocks(weight, None, blocks)
    assert layer.n_blocks == 3
    assert torch.equal(layer.to_dense().weight, weight)
    x = torch.randn(20, 4)
    assert_close(layer(x), x @ weight.T)
    with torch.no_grad():
        assert_close(layer(x), x @ weight.T)
    with pytest.raises(cx.InvalidMatrix, match="at most one block"):
        cx.BlockLinear.from_blocks(weight, None, [blocks[0], blocks[0]])


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant"])
def test_compiled_mapped_and_counted(kind):
    """What rewrites or watches a computation sees PyTorch's operations."""
    _, blocks = pair(kind)
    x = torch.randn(16, 84)
    with torch.no_grad():
        expected = blocks(x)
        assert_close(torch.compile(blocks, backend="aot_eager", fullgraph=True)(x), expected)
        assert_close(torch.func.vmap(blocks)(x), expected)
        with FlopCounterMode(display=False) as counter:
            blocks(x)
    assert counter.get_total_flops() == 2 * 16 * blocks.macs
    jacobian = torch.func.vmap(torch.func.jacrev(blocks))(x)
    assert_close(jacobian, blocks.weight.detach().expand(16, -1, -1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [k for k in STRUCTURES if k != "empty"])
def test_same_gradients(kind, bias):
    dense, blocks = pair(kind, torch.float64, bias)
    x = torch.randn(7, 84, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for layer, xi in zip((dense, blocks), inputs, strict=True):
        (layer(xi) ** 2).sum().backward()
    assert_close(inputs[1].grad, inputs[0].grad)
    if bias:
        assert_close(blocks.bias.grad, dense.bias.grad)
    inside = cx.decompose(dense.weight)
    expected = torch.zeros_like(dense.weight)
    for rows, cols in inside.blocks:
        expected[np.ix_(rows, cols)] = dense.weight.grad[np.ix_(rows, cols)]
    for parameter in blocks.weights:
        parameter.data = parameter.grad
    assert_close(blocks.weight.detach(), expected)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_undone_bit_for_bit(kind, dtype):
    dense, blocks = pair(kind, dtype)
    restored = blocks.to_dense()
    assert torch.equal(restored.weight, dense.weight)
    assert torch.equal(restored.bias, dense.bias)
    assert restored.weight.dtype == dtype


@given(
    npst.arrays(
        np.float64,
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        elements=st.sampled_from([0.0, 0.0, 0.0, 1.5, -2.0]),
    )
)
@settings(max_examples=100)
def test_any_structure(w):
    weight = torch.from_numpy(w)
    layer = cx.BlockLinear.from_dense(weight, None, cx.decompose(w))
    assert torch.equal(layer.to_dense().weight, weight)
    x = torch.arange(2.0 * w.shape[1], dtype=torch.float64).view(2, -1)
    assert torch.allclose(layer(x), x @ weight.T, rtol=0, atol=1e-12)
    assert layer.macs == cx.decompose(w).macs


def test_state_dict_deepcopy_and_casts():
    dense, blocks = pair("ragged")
    x = torch.randn(5, 84)
    other = pair("ragged")[1]
    other.load_state_dict(blocks.state_dict())
    assert torch.equal(other(x), blocks(x))
    assert torch.equal(copy.deepcopy(blocks)(x), blocks(x))
    assert_close(blocks.double()(x.double()), dense.double()(x.double()))
    assert blocks.columns.dtype == torch.int64


def test_attributes_of_a_linear_layer():
    dense, blocks = pair("dormant")
    assert (blocks.in_features, blocks.out_features) == (dense.in_features, dense.out_features)
    assert torch.equal(blocks.weight, dense.weight)
    assert torch.equal(blocks.bias, dense.bias)


def test_memory_is_the_blocks_and_two_tables():
    _dense, blocks = pair("equal")
    held = sum(t.numel() for t in [*blocks.parameters(), *blocks.buffers()])
    assert held == 60 * 84 // 4 + 60 + (60 + 84)


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant"])
def test_exported(kind):
    _dense, blocks = pair(kind)
    x = torch.randn(4, 84)
    exported = torch.export.export(blocks, (x,))
    assert_close(exported.module()(x), blocks(x))


def test_training_stays_inside_the_blocks():
    _dense, blocks = pair("dormant")
    before = cx.decompose(blocks.weight)
    optimizer = torch.optim.Adam(blocks.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        blocks(torch.randn(8, 84)).square().sum().backward()
        optimizer.step()
    assert cx.decompose(blocks.weight) == before


def test_a_layer_without_blocks_keeps_its_dtype():
    weight = torch.zeros(3, 4, dtype=torch.float64)
    layer = cx.BlockLinear.from_dense(weight, None, cx.decompose(weight))
    assert torch.equal(layer.to_dense().weight, weight)
    assert layer.float().to_dense().weight.dtype == torch.float32


def test_dormant_outputs_emit_their_bias():
    dense, blocks = pair("empty")
    assert torch.equal(blocks(torch.randn(3, 84)), dense.bias.expand(3, -1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cx.BlockLinear.from_dense(torch.ones(2, 3), None, cx.decompose(np.ones((3, 3)))), "weight: expected"),
        (lambda: cx.BlockLinear.from_dense(torch.eye(3), torch.ones(2), cx.decompose(np.eye(3))), "bias: expected"),
        (lambda: pair("equal")[1](torch.ones(2, 83)), "84 input features"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(cx.InvalidMatrix, match=message):
        make()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_a_directed_matrix_runs_in_frobenius_form(seed, dtype):
    rng = np.random.default_rng(seed)
    nodes = int(rng.integers(1, 40))
    mask = torch.from_numpy(rng.random((nodes, nodes)) < 1.3 / nodes)
    w = torch.from_numpy(rng.normal(size=(nodes, nodes))).to(dtype) * mask
    bias = torch.randn(nodes, dtype=dtype) if seed % 2 else None
    structure = cx.decompose(mask, kind="directed")
    layer = BlockLinear.from_directed(w, bias, structure)
    x = torch.randn(5, nodes, dtype=dtype)
    assert_close(layer(x), nn.functional.linear(x, w, bias))
    assert torch.equal(layer.to_dense().weight, w)
    heard = [len(b) * int(mask[torch.from_numpy(b)].any(0).sum()) for b in structure.blocks]
    assert layer.macs == sum(heard) <= nodes * nodes
    again = BlockLinear.from_description(layer.describe()).to(dtype)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))


def test_blocks_of_a_directed_matrix_stand_in_layer_order():
    d = cx.decompose(paper.M18, kind="directed")
    layer = BlockLinear.from_directed(torch.from_numpy(paper.M18).float(), None, d)
    rows = torch.argsort(layer.outputs)[: layer.writes].numpy()
    np.testing.assert_array_equal(rows, d.P.source[: layer.writes])
    with pytest.raises(cx.InvalidMatrix, match="as the structure has"):
        BlockLinear.from_directed(torch.zeros(3, 3), None, d)
