"""Exported to ONNX and run by onnxruntime: the same outputs from fewer bytes."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from tests.helpers.tolerance import assert_close

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")

# torch's exporter and onnxscript warn about their own internals
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def mask_(weight, k, rng):
    """Zero a weight outside k scattered blocks."""
    rows, cols = (rng.permutation(np.arange(n) % k) for n in weight.shape[:2])
    keep = torch.from_numpy(rows[:, None] == cols)
    with torch.no_grad():
        weight *= keep.view(*keep.shape, *[1] * (weight.ndim - 2))


def stack():
    rng = np.random.default_rng(0)
    net = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 96))
    for layer in (net[0], net[3], net[5]):
        mask_(layer.weight, 4, rng)
    blocks = cx.BlockChain.from_dense([net[0], net[3], net[5]], [nn.Sequential(net[1], net[2]), net[4]])
    return net, blocks, torch.randn(5, 96)


def linear():
    net = nn.Linear(90, 60)
    mask_(net.weight, 3, np.random.default_rng(0))
    return net, cx.BlockLinear.from_dense(net.weight, net.bias, cx.decompose(net.weight)), torch.randn(5, 90)


def convolution():
    net = nn.Conv2d(24, 36, 3, padding=1, stride=2)
    mask_(net.weight, 3, np.random.default_rng(0))
    return net, cx.BlockConv.from_dense(net), torch.randn(2, 24, 9, 9)


class Gated(nn.Module):
    def __init__(self, first, gate, second):
        super().__init__()
        self.first, self.gate, self.second = first, gate, second

    def forward(self, x):
        return self.second(nn.functional.silu(self.gate(x)) * self.first(x))


def feed_forward():
    rng = np.random.default_rng(0)
    first, gate, second = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)
    rows, cols = rng.permutation(np.arange(256) % 4), rng.permutation(np.arange(64) % 4)
    with torch.no_grad():
        for layer in (first, gate):
            layer.weight *= torch.from_numpy(rows[:, None] == cols)
        second.weight *= torch.from_numpy(cols[:, None] == rows)
    return (
        Gated(first, gate, second),
        cx.BlockFeedForward.from_dense(first, nn.SiLU(), second, gate),
        torch.randn(5, 64),
    )


def recurrent():
    net = nn.GRU(16, 256)
    with torch.no_grad():
        gates = net.weight_hh_l0.view(3, 256, 256)
        gates[:, :128, 128:] = gates[:, 128:, :128] = 0
    return net, cx.BlockRecurrent.from_dense(net), torch.randn(7, 2, 16)


CASES = [linear, stack, convolution, feed_forward, recurrent]


def only_output(result):
    """Of a recurrent network the sequence; its states are compared elsewhere."""
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("case", CASES)
def test_same_outputs_from_fewer_bytes(case, tmp_path):
    torch.manual_seed(0)
    dense, blocks, x = case()
    sizes = {}
    for name, module in (("dense", dense), ("blocks", blocks)):
        file = tmp_path / f"{name}.onnx"
        exported = torch.onnx.export(module.eval(), (x,), dynamo=True, verbose=False)
        exported.save(file, external_data=False)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        y = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert_close(torch.from_numpy(y), only_output(dense(x)))
        sizes[name] = file.stat().st_size
    weights = [sum(p.numel() for p in module.parameters()) for module in (dense, blocks)]
    assert sizes["blocks"] < sizes["dense"] - 2 * (weights[0] - weights[1])  # of 4 bytes each, half may be overhead


@pytest.mark.parametrize("case", CASES)
def test_a_saved_program_computes_the_same(case, tmp_path):
    torch.manual_seed(0)
    dense, blocks, x = case()
    file = Path(tmp_path / "program.pt2")
    torch.export.save(torch.export.export(copy.deepcopy(blocks).eval(), (x,)), file)
    assert_close(only_output(torch.export.load(file).module()(x)), only_output(dense.eval()(x)))
