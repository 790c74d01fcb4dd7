"""Packages of others: Torch-Pruning where it can follow a model, ONNX Runtime called like the model itself."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.baselines.compare import best_times
from crystallite.baselines.onnx_runtime import InOnnxRuntime
from crystallite.baselines.torch_pruning import pruned_by_graph
from crystallite.data.batch import Batch
from crystallite.validation.cost import count_macs
from tests.helpers.prunable import Attention, batch, convolutions, perceptron
from tests.helpers.tolerance import assert_close


@pytest.mark.parametrize(
    ("net", "some", "heads"),
    [
        (perceptron(), batch(4, 8), {}),
        (convolutions(), batch(4, 2, 6, 6), {}),
        (Attention(), batch(2, 5, 32), {"query": 4, "key": 4, "value": 4}),
    ],
    ids=["perceptron", "convolutions", "attention"],
)
def test_torch_pruning_drops_what_does_nothing(net, some, heads):
    pytest.importorskip("torch_pruning")
    names = [name for name, module in net.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    limit = int(0.55 * count_macs(net, some))
    small = pruned_by_graph(net, names, heads, some, limit)
    assert 0.5 * limit < count_macs(small, some) <= limit
    assert_close(some.run(small), some.run(net))


def test_torch_pruning_says_what_it_cannot_do():
    pytest.importorskip("torch_pruning")
    net = nn.Sequential(nn.Linear(8, 4)).eval()
    with pytest.raises(cx.InvalidOption, match="cannot be made so small"):
        pruned_by_graph(net, ["0"], {}, batch(2, 8), 40)
    with pytest.raises(cx.InvalidOption, match="Torch-Pruning cannot prune this model: ZeroDivisionError"):
        pruned_by_graph(Broken(), ["0"], {}, batch(2, 8), 40)


class Broken(nn.Module):
    def forward(self, x):
        return x / (1 // 0)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, scale=None):
        hidden = torch.tanh(self.first(x if scale is None else x * scale))
        return {"logits": self.second(hidden), "states": (hidden,)}


@pytest.mark.parametrize("int8", [False, True])
def test_onnx_runtime_is_called_like_the_model(int8):
    pytest.importorskip("onnxruntime")
    net = Named().eval()
    scale = torch.rand(6, 8)
    made = Batch(0, 6, (), {"x": torch.randn(6, 8), "scale": scale}, torch.zeros(6))
    session = InOnnxRuntime(net, made, int8=int8)
    other = Batch(0, 3, (), {"x": torch.randn(3, 8), "scale": scale[:3]})
    expected, found = other.run(net), other.run(session)
    assert found["states"][0].shape == (3, 16)
    if int8:
        assert not torch.equal(found["logits"], expected["logits"])
        assert (found["logits"] - expected["logits"]).norm() < 0.1 * expected["logits"].norm()
    else:
        assert_close(found["logits"], expected["logits"])
        assert_close(found["states"][0], expected["states"][0])
    assert set(best_times({"torch": net, "onnx": session}, other)) == {"torch", "onnx"}


@pytest.mark.slow
def test_onnx_runtime_is_called_like_a_decoder():
    """Its cache, which is no result, is no part of the structure either."""
    pytest.importorskip("onnxruntime")
    from tests.helpers import tiny_transformers as tiny

    model, (first, other) = tiny.build("opt"), tiny.batches("opt")
    session = InOnnxRuntime(model, Batch(0, 3, (), first))
    assert_close(session(**other).logits, model(**other).logits.detach())
