"""BlockConv against the masked convolution it was cut from: before, after, undone, reloaded and exported."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.core.compiling import COMPILES
from crystallite.operators.conv import _FEW_CHANNELS, BlockConv, channel_structure
from crystallite.operators.runtime.conv_engine import Convolving
from tests.helpers.planted.conv import SETTINGS, SIZES, masked, signal
from tests.helpers.tolerance import assert_close

STRUCTURES = ["equal", "ragged", "one block", "dormant", "empty", "singletons"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("conv_type", SIZES)
def test_same_outputs_and_undone(conv_type, kind, dtype):
    conv = masked(kind, conv_type, dtype)
    layer = BlockConv.from_dense(conv)
    for batch in [(2,), (), (0,)]:
        x = signal(conv, batch)
        assert_close(layer(x), conv(x))
    restored = layer.to_dense()
    assert type(restored) is conv_type
    assert torch.equal(restored.weight, conv.weight)
    assert torch.equal(restored.bias, conv.bias)
    assert repr(restored) == repr(conv)
    assert layer.n_blocks == channel_structure(conv).n_blocks


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["ragged", "dormant", "empty"])
@pytest.mark.parametrize("conv_type", [nn.Conv1d, nn.Conv2d])
def test_same_settings(conv_type, kind, settings):
    conv = masked(kind, conv_type, torch.float64, **settings)
    layer = BlockConv.from_dense(conv)
    assert_close(layer(signal(conv)), conv(signal(conv)))
    assert repr(layer.to_dense()) == repr(conv)
    for name in ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode"):
        assert getattr(layer, name) == getattr(conv, name)


class TestCompiled:
    """Without gradients, blocks of few channels run in one compiled call."""

    @pytest.fixture
    def calls(self, monkeypatch):
        made = []
        run = Convolving.run
        monkeypatch.setattr(Convolving, "run", lambda self, x: made.append(1) or run(self, x))
        return made

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("kind", STRUCTURES)
    @pytest.mark.parametrize("conv_type", [nn.Conv1d, nn.Conv2d])
    def test_same_outputs(self, conv_type, kind, dtype, calls):
        conv = masked(kind, conv_type, dtype)
        layer = BlockConv.from_dense(conv)
        with torch.no_grad():
            for batch in [(3,), (1,), (3,), (), (0,)]:
                x = signal(conv, batch)
                assert_close(layer(x), conv(x))
        one_sample_only = kind == "one block" and 2 * conv.in_channels >= _FEW_CHANNELS
        assert len(calls) == COMPILES * (0 if kind == "empty" else 1 if one_sample_only else 3)

    def test_what_changes_between_calls(self, calls):
        conv, other = (masked("ragged", nn.Conv2d, torch.float32) for _ in range(2))
        layer, x = BlockConv.from_dense(conv).eval(), signal(conv, (2,))
        with torch.no_grad():
            assert_close(layer(x), conv(x))
            conv.weight *= 2
            for part in layer.parts:
                part.weight.data = part.weight.data * 2  # other memory
            assert_close(layer(x), conv(x))
            layer.padding = conv.padding = (2, 2)
            assert_close(layer(x), conv(x))
            other.load_state_dict({name: t.flip(0) for name, t in conv.state_dict().items()})
            other.padding = (2, 2)
            turned = BlockConv.from_dense(other, layer_structure := channel_structure(other))
            assert layer_structure.n_blocks == layer.n_blocks
            order = torch.arange(len(layer.outputs)).flip(0)
            layer.outputs.copy_(layer.outputs[order])  # other contents in the same memory
            layer.bias.copy_(layer.bias[order])
            assert_close(layer(x), turned(x))
            assert_close(copy.deepcopy(layer)(x), other(x))
        assert len(calls) == COMPILES * 6

    def test_settings_that_change_hold_with_gradients_too(self, calls):
        conv = masked("ragged", nn.Conv2d, torch.float32)
        layer, x = BlockConv.from_dense(conv), signal(conv, (2,))
        for name, value in (("padding", (2, 2)), ("dilation", (2, 1)), ("stride", (1, 2))):
            for module in (conv, layer):
                setattr(module, name, value)
            assert_close(layer(x).detach(), conv(x).detach())
        assert not calls

    @pytest.mark.parametrize("settings", SETTINGS)
    @pytest.mark.parametrize("conv_type", [nn.Conv1d, nn.Conv2d])
    def test_same_settings(self, conv_type, settings):
        for kind in ("ragged", "dormant"):
            conv = masked(kind, conv_type, torch.float64, **settings)
            with torch.no_grad():
                assert_close(BlockConv.from_dense(conv)(signal(conv)), conv(signal(conv)))

    @pytest.mark.parametrize("size", [(1, 1), (2, 300), (300, 2), (150, 301), (7, 7)])
    @pytest.mark.parametrize("dilation", [1, 3])
    def test_images_of_many_strips(self, size, dilation, calls):
        torch.manual_seed(0)
        conv = nn.Conv2d(12, 15, (3, 5), padding=(3, 6), dilation=dilation, groups=3)
        x = torch.randn(2, 12, *size)
        before = torch.get_num_threads()
        with torch.no_grad():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert_close(BlockConv.from_dense(conv)(x), conv(x))
        torch.set_num_threads(before)
        assert len(calls) == COMPILES * 2

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    @pytest.mark.parametrize("size", [(1, 1), (3, 5), (7, 7), (14, 14), (17, 31), (90, 91)])
    @pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 3)])
    def test_images_of_the_same_size(self, kernel, size, dtype, calls):
        torch.manual_seed(0)
        for outputs, dilation in [(5, 1), (13, 2), (8, 3)]:  # of a block: rows of tiles, and what is left
            padding = tuple(dilation * (k // 2) for k in kernel)
            conv = nn.Conv2d(12, 3 * outputs, kernel, padding=padding, dilation=dilation, groups=3, dtype=dtype)
            layer, x = BlockConv.from_dense(conv), torch.randn(3, 12, *size, dtype=dtype)
            with torch.no_grad():
                assert_close(layer(x), conv(x))
        assert len(calls) == COMPILES * 3

    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
    def test_only_what_it_knows(self, calls):
        x = torch.randn(2, 8, 9, 9)
        for conv in (nn.Conv2d(8, 8, 3, groups=4, stride=2), nn.Conv2d(8, 8, 3, groups=4, padding_mode="circular"),
                     nn.Conv2d(8, 8, (3, 2), groups=4, padding="same")):  # fmt: skip
            with torch.no_grad():
                assert_close(BlockConv.from_dense(conv)(x), conv(x))
        conv = nn.Conv2d(8, 8, 3, groups=4)
        layer = BlockConv.from_dense(conv)
        with torch.no_grad():
            last = x.to(memory_format=torch.channels_last)
            assert layer(last).is_contiguous(memory_format=torch.channels_last)
        layer(x).sum().backward()  # gradients
        assert layer.parts[0].weight.grad is not None
        assert not calls

    def test_a_description_that_does_not_fit_its_channels_reads_nothing_else(self):
        layer = BlockConv.from_dense(nn.Conv2d(8, 8, 3, groups=4)).eval()
        layer.in_channels = 4
        with torch.no_grad(), pytest.raises(RuntimeError):
            layer(torch.randn(1, 4, 9, 9))


def test_uneven_kernels():
    settings = {"kernel_size": (3, 1), "stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)}
    for kind in ("ragged", "empty"):
        conv = masked(kind, **settings)
        assert_close(BlockConv.from_dense(conv)(signal(conv)), conv(signal(conv)))


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant", "empty"])
def test_groups_stay_apart(kind):
    conv = masked(kind, dtype=torch.float64, groups=2)
    layer = BlockConv.from_dense(conv)
    assert_close(layer(signal(conv)), conv(signal(conv)))
    assert torch.equal(layer.to_dense().weight, conv.weight)
    assert layer.to_dense().groups == layer.groups == 2
    full = np.zeros((12, 20))
    for g, part in enumerate(conv.weight.detach().abs().sum((2, 3)).chunk(2)):
        full[6 * g : 6 * g + 6, 10 * g : 10 * g + 10] = part
    assert channel_structure(conv) == cx.decompose(full)


def test_depthwise():
    conv = nn.Conv1d(6, 12, 3, groups=6)
    layer = BlockConv.from_dense(conv)
    x = torch.randn(2, 6, 9)
    assert (layer.n_blocks, len(layer.parts), layer.macs) == (6, 1, conv.weight.numel())
    assert_close(layer(x), conv(x))


@pytest.mark.parametrize("kind", STRUCTURES)
def test_same_gradients(kind):
    conv = masked(kind, dtype=torch.float64, padding=1)
    layer, inside = BlockConv.from_dense(conv), conv.weight.detach() != 0
    inputs = [signal(conv).requires_grad_() for _ in range(2)]
    for module, x in zip((conv, layer), inputs, strict=True):
        (module(x) ** 2).sum().backward()
    if kind != "empty":
        assert_close(inputs[1].grad, inputs[0].grad)
    assert_close(layer.bias.grad, conv.bias.grad)
    for part in layer.parts:
        part.weight.data = part.weight.grad
    assert_close(layer.weight.detach(), conv.weight.grad * inside)


def test_equal_blocks_are_one_convolution():
    layer = BlockConv.from_dense(masked("equal"))
    assert [(part.groups, part.in_channels, part.out_channels) for part in layer.parts] == [(4, 20, 12)]
    assert layer.macs == 12 * 20 * 9 // 4
    assert repr(layer) == "BlockConv(20, 12, kernel_size=(3, 3), blocks=4, 540 of 2160 multiply-adds per position)"


def test_an_edge_is_any_kernel_position():
    conv = nn.Conv2d(2, 2, 3, bias=False)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 1, 2, 2] = conv.weight[1, 0, 0, 1] = 1
    assert [(r.tolist(), c.tolist()) for r, c in channel_structure(conv).blocks] == [([0], [1]), ([1], [0])]


def test_a_given_structure_cuts():
    """Blocks asked for are what is kept, also where the kernels do not separate; a block without inputs is dormant."""
    conv = nn.Conv1d(4, 4, 1)
    structure = cx.BipartiteStructure.from_labels(np.array([0, 0, 1, 2]), np.array([0, 0, 1, 1]))
    layer = BlockConv.from_dense(conv, structure)
    kept = torch.block_diag(torch.ones(2, 2), torch.ones(1, 2), torch.zeros(1, 0))[..., None]
    assert torch.equal(layer.weight, conv.weight * kept)
    x = torch.randn(2, 4, 5)
    assert_close(layer(x), nn.functional.conv1d(x, conv.weight * kept, conv.bias))


def test_reloaded_copied_cast_exported():
    conv = masked("dormant", padding=1)
    layer, other = BlockConv.from_dense(conv), BlockConv.from_dense(masked("dormant", padding=1))
    x = signal(conv)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert_close(torch.export.export(layer, (x,)).module()(x), layer(x))
    assert_close(layer.double()(x.double()), conv.double()(x.double()))
    assert torch.equal(layer.to_dense().weight, conv.weight)


def test_bad_input():
    conv = nn.Conv2d(4, 4, 3, groups=2)
    with pytest.raises(cx.InvalidOption, match=r"nn.Conv1d, nn.Conv2d, nn.Conv3d, got ConvTranspose2d"):
        BlockConv.from_dense(nn.ConvTranspose2d(4, 4, 3))
    with pytest.raises(cx.InvalidMatrix, match=r"expected shape \(4, 4\)"):
        BlockConv.from_dense(conv, cx.decompose(np.eye(3)))
    with pytest.raises(cx.InvalidMatrix, match=r"joins the groups \[0, 1\]"):
        BlockConv.from_dense(conv, cx.decompose(np.ones((4, 4))))
    layer = BlockConv.from_dense(conv)
    for shape in [(1, 5, 9, 9), (4, 9), (1, 1, 4, 9, 9)]:
        with pytest.raises(cx.InvalidMatrix, match="4 channels and 2 axes"):
            layer(torch.ones(shape))
    with torch.no_grad():
        conv.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(cx.InvalidMatrix, match=r"conv.weight"):
        channel_structure(conv)


def test_channels_in_order_are_not_moved():
    """Blocks that lie one after the other need no table, also where their shapes differ and some channels are idle."""
    conv = nn.Conv2d(9, 8, 3, padding=1)
    kept = torch.zeros(8, 9)
    kept[:2, :4] = kept[2:5, 4:6] = kept[5:7, 6:8] = 1
    with torch.no_grad():
        conv.weight *= kept[:, :, None, None]
    layer, x = BlockConv.from_dense(conv), torch.randn(2, 9, 5, 5)
    assert (layer.inputs, layer.outputs, layer.n_blocks) == (None, None, 3)
    assert_close(layer(x), conv(x))
    assert torch.equal(layer.to_dense().weight, conv.weight)
    reloaded = BlockConv.from_dense(conv)
    reloaded.load_state_dict(layer.state_dict())
    assert torch.equal(reloaded(x), layer(x))
    shuffled = copy.deepcopy(conv)
    with torch.no_grad():
        shuffled.weight.copy_(conv.weight.flip(0))
    turned = BlockConv.from_dense(shuffled)
    assert turned.outputs is not None
    assert_close(turned(x), shuffled(x))


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_the_side_that_is_in_order_is_not_moved(side):
    conv = nn.Conv1d(8, 8, 3)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    kept = torch.block_diag(torch.ones(3, 2), torch.ones(2, 2), torch.ones(3, 4))
    kept = kept[order] if side == "inputs" else kept[:, order]
    with torch.no_grad():
        conv.weight *= kept[..., None]
    layer, x = BlockConv.from_dense(conv), torch.randn(2, 8, 6)
    assert [name for name in ("inputs", "outputs") if getattr(layer, name) is None] == [side]
    assert_close(layer(x), conv(x))
    assert torch.equal(layer.to_dense().weight, conv.weight)
