"""Layers of low rank: what the layer they stand for has, before, after, undone, saved and loaded."""

import copy

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.description import build, describe
from crystallite.operators.low_rank import LowRankConv, LowRankLinear
from tests.helpers.tolerance import assert_close

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def linear(bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return LowRankLinear.from_factors(
        torch.randn(6, 2, dtype=dtype), torch.randn(2, 5, dtype=dtype), torch.randn(6, dtype=dtype) if bias else None
    )


def convolution(dimensions, **settings):
    torch.manual_seed(0)
    kind = KINDS[dimensions]
    return LowRankConv(kind(4, 2, 3, bias=False, **settings), kind(2, 7, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_linear_layer_says_what_the_dense_one_says(bias, dtype):
    layer = linear(bias, dtype)
    dense = layer.to_dense()
    assert type(dense) is nn.Linear
    for name in ("in_features", "out_features"):
        assert getattr(layer, name) == getattr(dense, name)
    assert torch.equal(layer.weight, dense.weight)
    assert (layer.bias is None) == (dense.bias is None) == (not bias)
    assert layer.macs == 2 * (5 + 6)
    x = torch.randn(3, 4, 5, dtype=dtype)
    assert_close(layer(x), dense(x))


@pytest.mark.parametrize("dimensions", KINDS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"stride": 2, "padding": 1}, {"dilation": 2}, {"padding": "same"}, {"padding": 1, "padding_mode": "circular"}],
    ids=str,
)
def test_a_convolution_says_what_the_dense_one_says(dimensions, settings):
    layer = convolution(dimensions, **settings)
    dense = layer.to_dense()
    names = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"]
    assert {name: getattr(layer, name) for name in names} == {name: getattr(dense, name) for name in names}
    x = torch.randn(2, 4, *[9] * dimensions)
    assert_close(layer(x), dense(x))
    with pytest.raises(AttributeError, match="nothing"):
        _ = layer.nothing


@pytest.mark.parametrize("layer", [linear(), linear(bias=False), convolution(2, padding=1)], ids=repr)
def test_described_built_and_loaded(layer):
    built = build(describe(layer), "a.json").to_empty(device="cpu")
    built.load_state_dict(layer.state_dict())
    assert repr(built) == repr(layer)
    assert torch.equal(built.weight, layer.weight)


def test_gradients_reach_the_factors_through_the_product():
    layer = linear()
    layer.weight.sum().backward()
    assert all(part.weight.grad is not None for part in (layer.down, layer.up))


def test_a_compressed_model_holds_them_and_is_copied_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Softmax(-1), nn.Linear(40, 4))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(40, 3) @ torch.randn(3, 40) / 8)
    x = torch.randn(300, 40)
    small = cx.compress(model, x, budget=0.3)
    assert isinstance(small[0], LowRankLinear)
    assert tuple(small[0].weight.shape) == (40, 40)
    assert torch.equal(copy.deepcopy(small)(x), small(x))
    cx.save(small, tmp_path / "small")
    assert torch.equal(cx.load(tmp_path / "small")(x), small(x))


@pytest.mark.parametrize("factors", [((6, 2), (3, 5)), ((6,), (2, 5))])
def test_factors_that_do_not_fit_are_refused(factors):
    with pytest.raises(cx.InvalidMatrix, match="expected factors"):
        LowRankLinear.from_factors(*(torch.ones(size) for size in factors), None)


@pytest.mark.parametrize("rank", [1, 3])
def test_hostile_descriptions_are_refused(rank):
    for layer in (linear(), convolution(1)):
        plain = describe(layer)
        name = "in_features" if isinstance(layer, LowRankLinear) else "in_channels"
        plain["up"]["arguments"][name] = rank
        with pytest.raises(cx.CheckpointError, match=r"a\.json"):
            build(plain, "a.json")
