"""Operators follow their weights to another device, and nothing comes back to the host on the way.

There is no GPU here. The meta device stands for one: what meets a tensor of the CPU there, asks for a number, or copies
one to the host, which would be silent and slow on a GPU, fails.
"""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.operators.conv import channel_structure
from tests.helpers.block_models import block_convolution, block_linear, block_recurrent


def linear():
    layer = block_linear(24, 18, 3, 0)
    return cx.BlockLinear.from_dense(layer.weight, layer.bias, cx.decompose(layer.weight))


def convolution(kind, **options):
    conv = block_convolution(kind, 12, 8, 2, 0, **options)
    return cx.BlockConv.from_dense(conv, channel_structure(conv))


def feed_forward(form):
    first, second = block_linear(16, 32, 4, 0), block_linear(32, 16, 4, 1)
    return cx.BlockFeedForward.from_dense(first, nn.GELU(), second, form=form)


def chain():
    layers = [block_linear(16, 24, 2, 0), block_linear(24, 20, 2, 1), block_linear(20, 10, 2, 2)]
    return cx.BlockChain.from_dense(layers, [nn.ReLU(), nn.Tanh()])


def attention():
    return cx.ExpandedAttention.from_dense(nn.MultiheadAttention(16, 4, batch_first=True))


OPERATORS = {
    "linear": (linear, (5, 24)),
    "linear, one sample": (linear, (24,)),
    "chain": (chain, (40, 16)),
    "convolution": (lambda: convolution(nn.Conv2d), (2, 12, 7, 7)),
    "convolution with steps": (lambda: convolution(nn.Conv1d, stride=2, padding=1), (2, 12, 9)),
    "feed-forward pair": (lambda: feed_forward("pair"), (3, 4, 16)),
    "feed-forward layers": (lambda: feed_forward("layers"), (3, 4, 16)),
    "feed-forward channels": (lambda: feed_forward("channels"), (3, 4, 16)),
    "RNN": (lambda: cx.BlockRecurrent.from_dense(block_recurrent(nn.RNN, 8, 12, 3)), (5, 2, 8)),
    "GRU": (lambda: cx.BlockRecurrent.from_dense(block_recurrent(nn.GRU, 8, 12, 3, bidirectional=True)), (5, 2, 8)),
    "LSTM": (lambda: cx.BlockRecurrent.from_dense(block_recurrent(nn.LSTM, 8, 12, 3, num_layers=2)), (5, 2, 8)),
    "low rank": (lambda: cx.LowRankLinear(nn.Linear(16, 3, bias=False), nn.Linear(3, 16)), (5, 16)),
    "low-rank convolution": (
        lambda: cx.LowRankConv(nn.Conv2d(4, 2, 3, bias=False), nn.Conv2d(2, 6, 1)),
        (2, 4, 8, 8),
    ),
    "low-rank GRU": (lambda: cx.LowRankRecurrent("GRU", 8, 16, [(2, 4)]), (5, 2, 8)),
    "attention": (attention, (2, 5, 16)),
}


def tensors(outputs):
    return [outputs] if isinstance(outputs, torch.Tensor) else [t for part in outputs for t in tensors(part)]


def called(module, x):
    return (x, x, x) if isinstance(module, cx.ExpandedAttention) else (x,)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_comes_back_to_the_host(name, gradients):
    torch.manual_seed(0)
    make, shape = OPERATORS[name]
    module = make()
    expected = [t.shape for t in tensors(module(*called(module, torch.randn(shape))))]
    module.to("meta").train(gradients)
    x = torch.empty(shape, device="meta", requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        found = tensors(module(*called(module, x)))
    assert {t.device.type for t in found} == {"meta"}
    assert [t.shape for t in found] == expected
    if gradients:
        sum(t.sum() for t in found).backward()
        assert {x.grad.device.type, *(p.grad.device.type for p in module.parameters() if p.grad is not None)} == {
            "meta"
        }


class Careless(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.ones(3)


class Slow(nn.Linear):
    def forward(self, x):
        return super().forward(x.to("cpu").to(x.device))


class Curious(nn.Linear):
    def forward(self, x):
        return super().forward(x) * x.max().item()


class Numpy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(x.numpy().max())


@pytest.mark.parametrize("kind", [Careless, Slow, Curious, Numpy])
def test_the_device_would_have_noticed(kind):
    with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        kind(2, 3).to("meta")(torch.empty(4, 2, device="meta"))
