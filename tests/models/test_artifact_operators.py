"""Every operator in every configuration: saved = reloaded, bit for bit, in what it holds and what it computes."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.description import describe
from crystallite.operators.low_rank import LowRankConv, LowRankLinear
from tests.helpers.planted.chain import planted as planted_chain
from tests.helpers.planted.conv import SETTINGS, SIZES, masked, signal
from tests.helpers.planted.feed_forward import CASES, INPUTS, dense_pair
from tests.helpers.planted.linear import STRUCTURES, pair
from tests.helpers.planted.recurrent import INPUT, MODES, flat
from tests.helpers.planted.recurrent import STRUCTURES as RECURRENT
from tests.helpers.planted.recurrent import planted as planted_recurrent

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def same(saved, loaded, *given):
    """Equal state, equal structure, equal outputs in both ways to run."""
    assert repr(loaded) == repr(saved)
    assert describe(loaded) == describe(saved)
    state, again = saved.state_dict(), loaded.state_dict()
    assert list(again) == list(state)
    for name, value in state.items():
        assert again[name].dtype == value.dtype
        assert torch.equal(again[name], value)
    assert not any(value.is_meta for value in (*loaded.parameters(), *loaded.buffers()))
    for way in (torch.enable_grad, torch.no_grad):
        with way():
            found, expected = loaded(*given), saved(*given)
            if isinstance(expected, tuple):
                found, expected = (torch.cat([t.flatten() for t in flat(r)]) for r in (found, expected))
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@pytest.fixture
def reloaded(tmp_path):
    return lambda module: cx.load(cx.save(module, tmp_path / "a"))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", STRUCTURES)
def test_linear(reloaded, kind, dtype, bias):
    _, blocks = pair(kind, dtype, bias)
    model = nn.Sequential(blocks, nn.LayerNorm(60, dtype=dtype))  # without blocks and bias there would be no tensor
    loaded = reloaded(model)
    same(model, loaded, torch.randn(5, 84).to(dtype))
    assert torch.equal(loaded[0].to_dense().weight, blocks.to_dense().weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "dead", "bias"), [(4, 0.0, True), (3, 0.3, False), (1, 0.0, True)])
@pytest.mark.parametrize("shared", [True, False])
def test_chain(reloaded, groups, dead, bias, shared, dtype):
    layers = planted_chain((12, 24, 24, 8), groups, dead=dead, bias=bias, dtype=dtype, shared=shared)
    chain = cx.BlockChain.from_dense(layers, [nn.ReLU(), nn.Sequential(nn.GELU("tanh"), nn.Dropout(0.1))]).eval()
    same(chain, reloaded(chain), torch.randn(5, 12).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant", "empty"])
@pytest.mark.parametrize("conv_type", SIZES)
def test_conv(reloaded, conv_type, kind, dtype):
    conv = masked(kind, conv_type, dtype)
    layer = cx.BlockConv.from_dense(conv)
    same(layer, reloaded(layer), signal(conv))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_conv_settings(reloaded, settings):
    conv = masked("equal", **settings)
    layer = cx.BlockConv.from_dense(conv)
    loaded = reloaded(layer)
    same(layer, loaded, signal(conv))
    assert repr(loaded.to_dense()) == repr(conv)


def test_grouped_conv(reloaded):
    conv = masked("dormant", groups=2)
    layer = cx.BlockConv.from_dense(conv)
    same(layer, reloaded(layer), signal(conv))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("case", CASES)
def test_feed_forward(reloaded, case, gated, bias):
    block = cx.BlockFeedForward.from_dense(*dense_pair(case, gated=gated, bias=bias))
    same(block, reloaded(block), torch.randn(3, INPUTS).double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_feed_forward_dtypes(reloaded, dtype):
    block = cx.BlockFeedForward.from_dense(*dense_pair("ragged layers", dtype))
    same(block, reloaded(block), torch.randn(3, INPUTS).to(dtype))


@pytest.mark.parametrize("structure", RECURRENT)
@pytest.mark.parametrize("mode", MODES)
def test_recurrent(reloaded, mode, structure):
    blocks = cx.BlockRecurrent.from_dense(planted_recurrent(mode, structure), smallest=1)
    same(blocks, reloaded(blocks), torch.randn(4, 2, INPUT).double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{"layers": 2, "bidirectional": True}, {"bias": False}, {"layers": 2, "batch_first": True, "dropout": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RNN_RELU", "LSTM"])
def test_recurrent_options(reloaded, mode, options, dtype):
    blocks = cx.BlockRecurrent.from_dense(planted_recurrent(mode, "fan", dtype=dtype, **options)).eval()
    same(blocks, reloaded(blocks), torch.randn(4, 2, INPUT).to(dtype))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_low_rank(reloaded, dtype, bias):
    linear = LowRankLinear(nn.Linear(84, 3, False, dtype=dtype), nn.Linear(3, 60, bias, dtype=dtype))
    same(linear, reloaded(linear), torch.randn(5, 84).to(dtype))


def test_low_rank_convolution(reloaded):
    layer = LowRankConv(nn.Conv2d(3, 2, 3, stride=2, padding=1, bias=False), nn.Conv2d(2, 8, 1))
    same(layer, reloaded(layer), torch.randn(2, 3, 9, 9))


def test_networks_of_usual_modules(reloaded):
    """What stands around operators in sequential networks, with settings that are not the defaults."""
    conv = cx.BlockConv.from_dense(masked("equal", padding=1))
    image = nn.Sequential(
        nn.Conv2d(3, 20, (3, 5), stride=(1, 2), padding=(1, 2), bias=False),
        nn.BatchNorm2d(20, eps=1e-3, momentum=None),
        nn.PReLU(20),
        nn.MaxPool2d(2, ceil_mode=True),
        conv,
        nn.GroupNorm(3, 12, affine=False),
        nn.AvgPool2d((2, 1), count_include_pad=False),
        nn.AdaptiveAvgPool2d((2, None)),
        nn.Dropout2d(0.3),
        nn.Flatten(2),
        nn.LayerNorm(10, bias=False),
        nn.LazyLinear(4),
    )
    image(torch.randn(2, 3, 9, 17))  # the lazy layer becomes a linear one
    image.eval()
    assert type(image[-1]) is nn.Linear
    same(image, reloaded(image), torch.randn(2, 3, 9, 17))


class First(nn.Module):
    def forward(self, given):
        return given[0]


def test_sequences_and_shared_modules(tmp_path):
    """Embeddings, recurrent modules and an activation that stands in two places."""
    relu = nn.ReLU()
    layers = nn.Sequential(nn.Embedding(9, 7, padding_idx=2), relu, nn.LSTM(7, 4, 2, bidirectional=True))
    head = nn.Sequential(nn.RMSNorm(8), relu, pair("equal", bias=False)[1], relu)
    model = nn.ModuleList([layers, head]).eval()
    loaded = cx.load(cx.save(model, tmp_path / "a"))
    assert repr(loaded) == repr(model)
    tokens = torch.randint(9, (3, 4))
    assert torch.equal(loaded[0](tokens)[0], layers(tokens)[0])
    assert [type(m) for m in loaded[1]] == [type(m) for m in head]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_kept(reloaded, training):
    model = nn.Sequential(pair("equal")[1], nn.Dropout(0.5)).train(training)
    assert all(m.training is training for m in reloaded(model).modules())
