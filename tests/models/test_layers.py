"""Which layers are taken apart, and what is said of the others."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.layers import find_units
from crystallite.reorganization.restore import restore
from tests.helpers.block_models import assert_same_state, block_linear
from tests.helpers.tolerance import assert_close


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(3, 3))


def reasons(model):
    return {unit.name: unit.reason for unit in find_units(model, ["*"], [])}


def with_hook(attach):
    layer = nn.Linear(3, 3)
    getattr(layer, attach)(lambda *_: None)
    return layer


def with_another_forward():
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: nn.Linear.forward(layer, 2 * x)
    return layer


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Embedding(9, 3), "table"),
        (nn.EmbeddingBag(9, 3), "table"),
        (nn.Bilinear(3, 3, 3), "no block operator for Bilinear"),
        (nn.GRUCell(3, 3), "no block operator for GRUCell"),
        (nn.ConvTranspose2d(3, 3, 3), "no block operator for ConvTranspose2d"),
        (nn.LSTM(3, 4, proj_size=2), "proj_size"),
        (Scaled(3, 3), "Scaled is a Linear with code of its own"),
        (with_hook("register_forward_hook"), "hooks"),
        (with_hook("register_forward_pre_hook"), "hooks"),
        (with_another_forward(), "its forward was replaced"),
        (Own(), "no block operator for Own"),
    ],
)
def test_left_alone_with_a_reason(module, reason):
    model = nn.Sequential(nn.Linear(3, 3), module)
    assert reason in reasons(model)["1"]
    assert reasons(model)["0"] == ""
    before = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("0")}
    small = cx.reorganize(model, level=0.5, rule="neyman", fold=False, only_if_faster=False)
    assert type(small[1]) is type(module)
    for name, value in before.items():
        assert torch.equal(small.state_dict()[name], value)


def test_attention_is_reported_once_and_its_projection_with_it():
    found = reasons(nn.MultiheadAttention(8, 2))
    assert list(found) == ["", "out_proj"]
    assert "itself" in found[""]
    assert "code of its own" in found["out_proj"]


def test_containers_and_norms_are_not_layers():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "layers": nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])})
    assert list(reasons(model)) == ["layers.0"]


@pytest.mark.parametrize("tie", ["weight", "bias", "module"])
def test_tied_layers_are_left_alone(tie):
    first, second = block_linear(8, 8, 2, 1), nn.Linear(8, 8)
    if tie == "module":
        second = first
    else:
        setattr(second, tie, getattr(first, tie))
    model, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(2, 8)
    small = cx.reorganize(model, level=0.5, rule="neyman", only_if_faster=False)
    assert all("left alone" in c.became for c in cx.summary(small).changes)
    assert_same_state(small, model)
    assert torch.equal(small(x), model(x))


def test_the_fused_kernel_of_a_transformer_layer_is_left_out(monkeypatch):
    """It reads the weights of its layers, which blocks would have to fill up for every call."""
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu").eval()
    with torch.no_grad():
        model.linear1.weight.copy_(block_linear(16, 32, 4, 1).weight)
    small, x = cx.reorganize(model, level=None, only_if_faster=False), torch.randn(2, 3, 16)
    assert isinstance(small.linear1, cx.BlockLinear)
    monkeypatch.setattr(cx.BlockLinear, "weight", property(lambda self: pytest.fail("filled up")))
    with torch.no_grad():
        assert_close(small(x), model(x))
    monkeypatch.undo()
    again = restore(small)
    assert again.activation_relu_or_gelu == model.activation_relu_or_gelu == 2
    assert_same_state(again, model)
