"""Block operators as citizens of PyTorch: whatever happens to their tensors, results are those of the dense layer."""

import copy
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

import crystallite as cx
from crystallite.core.compiling import COMPILES
from tests.helpers.planted.chain import dense, planted
from tests.helpers.tolerance import assert_close


def layer(rows=48, cols=64, k=4, dead=False):
    """A masked linear layer and its blocks."""
    torch.manual_seed(0)
    net = nn.Linear(cols, rows)
    label = [torch.arange(n) % k for n in (rows, cols)]
    with torch.no_grad():
        net.weight *= (label[0][:, None] == label[1]) & (not dead)
    return net, cx.BlockLinear.from_dense(net.weight, net.bias, cx.decompose(net.weight))


def chain(activation=None):
    layers = planted((24, 36, 20), 4, dtype=torch.float32)
    activation = activation or nn.ReLU()
    return dense(layers, [activation]), cx.BlockChain.from_dense(layers, [activation])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
def test_dormant_outputs_may_be_changed_in_place(batch, grad):
    net, blocks = layer(dead=True)
    bias = blocks.bias.detach().clone()
    with torch.set_grad_enabled(grad):
        y = nn.Sequential(blocks, nn.ReLU(inplace=True))(torch.randn(batch, 64))
    assert_close(y, torch.relu(net.bias).expand(batch, -1))
    assert torch.equal(blocks.bias, bias)
    first, second = nn.Linear(4, 6), nn.Linear(6, 4)
    with torch.no_grad():
        first.weight[:3] = 0
    pair = cx.BlockFeedForward.from_dense(first, nn.ReLU(inplace=True), second)
    x = torch.randn(batch, 4)
    with torch.set_grad_enabled(grad):
        assert_close(pair(x), second(torch.relu(first(x))))
        assert_close(pair(x), second(torch.relu(first(x))))


def test_another_dtype_is_refused_as_a_dense_layer_refuses_it():
    _, blocks = layer()
    x = torch.randn(5, 64)
    with torch.no_grad():
        blocks(x)
        blocks.bfloat16()
        with pytest.raises(RuntimeError, match="type"):
            blocks(x)
        assert blocks(x.bfloat16()).dtype == torch.bfloat16


def test_parameters_that_are_not_contiguous_are_followed():
    _, blocks = layer()
    x = torch.randn(20, 64)
    with torch.no_grad():
        blocks.weights[0].data = blocks.weights[0].data.transpose(1, 2).contiguous().transpose(1, 2)
        before = blocks(x)
        blocks.weights[0].mul_(2)
        blocks.bias.zero_()
        assert_close(blocks(x), x @ blocks.weight.T)
        assert not torch.equal(before, blocks(x))


class Doubled(nn.Module):
    def forward(self, value):
        return 2 * value


def test_parametrizations_are_followed():
    _, blocks = layer()
    x = torch.randn(20, 64)
    with torch.no_grad():
        before = blocks(x)
        bias = blocks.bias.clone()
        parametrize.register_parametrization(blocks, "bias", Doubled())
        assert_close(blocks(x), before + bias)
        blocks.parametrizations.bias.original.add_(1)
        assert_close(blocks(x), before + bias + 2)


def test_replaced_activations_and_hooks_are_seen():
    net, blocks = chain()
    x = torch.randn(20, 24)
    with torch.no_grad():
        assert_close(blocks(x), net(x))
        blocks.activations[0] = nn.Tanh()
        assert_close(blocks(x), net[2](torch.tanh(net[0](x))))
        seen = []
        handle = blocks.activations[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        blocks(x)
        assert len(seen) == 1
        handle.remove()
        blocks(x)
        assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own use of it
def test_forward_mode_gradients_of_a_frozen_layer():
    net, blocks = layer()
    blocks.requires_grad_(False)
    x, direction = torch.randn(5, 64), torch.randn(5, 64)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(blocks(forward_ad.make_dual(x, direction))).tangent
    assert_close(tangent, direction @ net.weight.detach().T)


def test_memory_can_still_be_resized():
    _, blocks = layer()
    x = torch.randn(5, 64)
    with torch.no_grad():
        y = blocks(x)
        x.resize_(6, 64)
        kept = blocks.weights[0].detach().clone()
        storage = blocks.weights[0].untyped_storage()
        size = storage.size()
        storage.resize_(0)  # as sharded training does between calls
        storage.resize_(size)
        blocks.weights[0].copy_(kept)
        assert torch.equal(blocks(x[:5]), y)


@pytest.mark.parametrize("dead", [False, True])
def test_autocast_gives_the_dtype_of_a_dense_layer(dead):
    net, blocks = layer(50, 66)
    if dead:
        with torch.no_grad():
            net.weight[::3] = 0
        blocks = cx.BlockLinear.from_dense(net.weight, net.bias, cx.decompose(net.weight))
    x = torch.randn(5, 66)
    conv = nn.Conv1d(8, 8, 3)
    with torch.no_grad():
        conv.weight[::2, 1::2] = conv.weight[1::2, ::2] = 0
    with torch.autocast("cpu", torch.bfloat16):
        assert blocks(x).dtype == net(x).dtype == torch.bfloat16
        assert_close(blocks(x), net(x))
        assert cx.BlockConv.from_dense(conv)(torch.randn(1, 8, 9)).dtype == torch.bfloat16


def test_only_functions_of_single_neurons_stand_between_layers():
    layers = planted((8, 8, 8), 2)
    for activation in (nn.Softmax(-1), nn.Sequential(nn.ReLU(), nn.LayerNorm(8))):
        with pytest.raises(cx.InvalidOption, match="single neurons"):
            cx.BlockChain.from_dense(layers, [activation])


def test_activations_are_copies():
    dropout = nn.Dropout(0.5)
    blocks = cx.BlockChain.from_dense(planted((8, 8, 8), 2), [dropout]).eval()
    assert dropout.training
    assert not blocks.activations[0].training


def test_a_layer_without_inputs():
    blocks = cx.BlockLinear.from_blocks(torch.zeros(4, 0), torch.ones(4), [])
    assert torch.equal(blocks(torch.zeros(3, 0)), torch.ones(3, 4))


def test_any_batch_size_after_export():
    first, second = nn.Linear(6, 12), nn.Linear(12, 6)
    pair = cx.BlockFeedForward.from_dense(first, nn.ReLU(), second)
    x = torch.randn(6, 6)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(pair, (x,), dynamic_shapes=({0: batch},)).module()
    assert_close(exported(x[:2]), second(torch.relu(first(x[:2]))))


def test_many_callers_at_once():
    net, blocks = chain()
    x = torch.randn(70, 24)
    with torch.no_grad():
        expected = net(x)
    wrong = []

    def call(fresh):
        with torch.inference_mode():
            if not torch.allclose(fresh(x), expected, atol=1e-5):
                wrong.append(1)

    for _ in range(20):
        fresh = copy.deepcopy(blocks)  # without a plan: callers make it at the same time
        callers = [threading.Thread(target=call, args=(fresh,)) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert not wrong
    assert np.isfinite(expected.numpy()).all()


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_used_where_they_lie(dtype, batch):
    """Sums are those of float32: nothing is rounded to 16 bits but the outputs, and no wider copy is held."""
    torch.manual_seed(0)
    x = torch.randn(batch, 24).to(dtype)
    dense_chain, blocks = (module.to(dtype) for module in chain())
    with torch.no_grad():
        expected = copy.deepcopy(dense_chain).double()(x.double())
        y = blocks(x)
        assert y.dtype == dtype
        assert (
            torch.equal(y, expected.to(dtype)) or (y - expected).abs().max() <= torch.finfo(dtype).eps * y.abs().max()
        )
        assert blocks._plan.dtype == (dtype if COMPILES else None)  # without numba, PyTorch computes them
        held = [stage.weights for stage in blocks._plan._arrays if hasattr(stage, "weights")]
        assert all(array.itemsize == 2 for arrays in held for array in arrays)


@pytest.mark.skipif(not COMPILES, reason="without numba, all blocks take the products of the processor")
@pytest.mark.parametrize("known", [True, False])
def test_deep_blocks_of_bfloat16_and_many_samples_take_the_products_of_the_processor(monkeypatch, known):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: known)
    net, blocks = (module.bfloat16() for module in layer(rows=576, cols=576, k=2))
    few, many = torch.randn(3, 576).bfloat16(), torch.randn(4, 576).bfloat16()
    with torch.no_grad():
        for x in (few, many):
            assert_close(blocks(x), net(x))
        assert blocks._plan.takes(few)
        assert blocks._plan.takes(many) == (not known)
        assert layer()[1].bfloat16()(many[:, :64]).shape == (4, 48)  # shallow blocks are as before
        assert not blocks._plan.takes(few.float())


def test_weights_and_biases_of_16_bits_may_change_in_place():
    net, blocks = (module.to(torch.float16) for module in layer())
    x = torch.randn(2, 64).to(torch.float16)
    with torch.no_grad():
        before = blocks(x)
        for module in (net, blocks):
            module.bias += 1
        assert_close(blocks(x), before + 1)
        for stack in blocks.weights:
            stack *= 0
        assert_close(blocks(x), net.bias.expand(2, -1))
