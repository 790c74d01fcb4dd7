"""Which layers are taken apart, and what is said of the others."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.composites import collapse_, expand_
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


def test_attention_is_reported_once_with_its_projection():
    found = find_units(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2)}), ["*"], [])
    assert [(unit.name, unit.kind, unit.reason) for unit in found] == [("a", "attention", "")]
    assert found[0].macs == 4 * 8 * 8
    assert found[0].parameters == 4 * 8 * 8 + 4 * 8


class Renamed(nn.Linear):
    """Inherits what it does."""


class Written(nn.Linear):
    """Has code of its own for the same."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Dropping(nn.Linear):
    """Is one in evaluation only."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Clipped(nn.Linear):
    """Is one for small inputs only."""

    def forward(self, x):
        return super().forward(x.clamp(-9, 9))


class Asked(nn.Linear):
    def forward(self, x, scale=None):
        return super().forward(x)


class Adapted(nn.Linear):
    """Holds more than a layer does."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.extra = nn.Parameter(torch.zeros(outputs))


class RenamedConv(nn.Conv2d):
    def __init__(self, channels):  # nobody else can call this
        super().__init__(channels, channels, 3, padding=1)


class SameConv(nn.Conv2d):
    """Pads by the size of its input: one of PyTorch's for some sizes only."""

    def forward(self, x):
        need = -x.shape[-1] % 2 + 1
        return nn.functional.conv2d(nn.functional.pad(x, (need, 1, 1, 1)), self.weight, self.bias, self.stride)


class Standardised(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Renamed, Written, nn.modules.linear.NonDynamicallyQuantizableLinear])
def test_a_subclass_that_computes_what_a_linear_layer_does_is_one(kind, bias, dtype):
    model = nn.Sequential(kind(20, 30, bias=bias, dtype=dtype))
    (unit,) = find_units(model, ["*"], [])
    assert (unit.kind, unit.reason) == ("linear", "")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [Dropping, Clipped, Asked, Adapted, Scaled])
def test_any_other_subclass_is_left_alone_and_not_changed(kind, training):
    model = nn.Sequential(kind(20, 30)).train(training)
    state = torch.get_rng_state()
    assert f"{kind.__name__} is a Linear with code of its own" in reasons(model)["0"]
    assert model[0].training == training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_whose_forward_was_replaced_is_looked_at():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].forward = lambda x: torch.relu(nn.functional.linear(x, model[0].weight, model[0].bias))
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight, model[1].bias)
    assert "code of its own" in reasons(model)["0"]
    assert reasons(model)["1"] == ""


def test_subclasses_of_convolutions():
    assert reasons(nn.Sequential(RenamedConv(4)))["0"] == ""
    for module in (SameConv(4, 4, 3, stride=2, padding=1), Standardised(4, 4, 3)):
        assert "is a Conv2d with code of its own" in reasons(nn.Sequential(module))["0"]


@pytest.mark.parametrize("kind", [Renamed, Written])
def test_subclasses_are_taken_apart_and_saved(tmp_path, kind):
    torch.manual_seed(0)
    layer = kind(12, 12)
    with torch.no_grad():
        layer.weight.copy_(block_linear(12, 12, 3, 1).weight)
    model, x = nn.Sequential(layer, nn.ReLU(), nn.Linear(12, 4)), torch.randn(200, 12)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small[0], cx.BlockLinear)
    assert_close(small(x), model(x))
    assert torch.equal(restore(small)[0].weight, layer.weight)
    fitted = cx.compress(model, x, budget=0.5)
    before, after = cx.summary(fitted).macs
    assert after <= before / 2
    assert {change.kind for change in cx.summary(fitted).changes} == {kind.__name__, "Linear"}


def test_convolutions_of_a_subclass_become_ordinary_ones(tmp_path):
    torch.manual_seed(0)
    conv = RenamedConv(8)
    with torch.no_grad():
        conv.weight[:4, 4:] = conv.weight[4:, :4] = 0
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    x = torch.randn(120, 8, 6, 6)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small[0], cx.BlockConv)
    assert_close(small(x), model(x))
    assert torch.equal(restore(small)[0].weight, conv.weight)
    fitted = cx.compress(model, x, budget=0.3)
    assert not any(isinstance(module, RenamedConv) for module in fitted.modules())
    loaded = cx.load(cx.save(fitted, tmp_path / "a"))  # nothing of the user's code is left
    assert torch.equal(loaded(x), fitted(x))


def test_containers_and_norms_are_not_layers():
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "layers": nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])})
    assert list(reasons(model)) == ["layers.0"]


@pytest.mark.parametrize("tie", ["weight", "bias"])
def test_tied_layers_are_left_alone(tie):
    first, second = block_linear(8, 8, 2, 1), nn.Linear(8, 8)
    setattr(second, tie, getattr(first, tie))
    model, x = nn.Sequential(first, nn.ReLU(), second), torch.randn(2, 8)
    small = cx.reorganize(model, level=0.5, rule="neyman", only_if_faster=False)
    assert all("left alone" in c.became for c in cx.summary(small).changes)
    assert_same_state(small, model)
    assert torch.equal(small(x), model(x))


class Part(nn.Module):
    """Code of the user's around a module that others use as well."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) + x


def several(layer):
    relu = nn.ReLU()
    return nn.Sequential(layer, relu, nn.Sequential(layer, relu), nn.Linear(8, 8), relu, nn.Linear(8, 8))


def test_a_module_in_several_places_is_one_before_after_undone_and_reloaded(tmp_path):
    torch.manual_seed(0)
    layer = block_linear(8, 8, 2, 1)
    model, x = several(layer), torch.randn(5, 8)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert [change.name for change in cx.summary(small).changes] == ["0", "3", "5"]
    assert isinstance(small[0], cx.BlockLinear)
    assert small[2][0] is small[0]
    assert small[2][1] is small[1]
    assert_close(small(x), model(x))
    loaded = cx.load(cx.save(small, tmp_path / "a"))
    assert loaded[2][0] is loaded[0]
    assert loaded[2][1] is loaded[1]
    assert torch.equal(loaded(x), small(x))
    for each in (restore(small), restore(loaded)):
        assert each[2][0] is each[0]
        assert_same_state(each, model)


def test_the_same_inside_code_of_its_own(tmp_path):
    torch.manual_seed(0)
    layer = block_linear(8, 8, 2, 1)

    def made(layer):
        return nn.Sequential(Part(layer), nn.ReLU(), Part(layer), nn.Linear(8, 3))

    model, x = made(layer), torch.randn(5, 8)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small[0].layer, cx.BlockLinear)
    assert small[2].layer is small[0].layer
    loaded = cx.load(cx.save(small, tmp_path / "a"), into=made(nn.Linear(8, 8)))
    assert loaded[2].layer is loaded[0].layer
    assert torch.equal(loaded(x), small(x))
    assert len(list(loaded.parameters())) == len(list(small.parameters()))
    assert_close(small(x), model(x))


def test_a_run_whose_nn_sequential_is_used_in_part_elsewhere_stays_layers():
    torch.manual_seed(0)
    inner = nn.Sequential(block_linear(8, 8, 2, 1), nn.ReLU(), block_linear(8, 8, 2, 2))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner[0](x)

    model, x = nn.Sequential(inner, First()), torch.randn(4, 8)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small[0][2], cx.BlockLinear)
    assert_close(small(x), model(x))


def test_an_activation_that_others_use_outlives_the_chain_that_takes_it_in():
    torch.manual_seed(0)
    relu = nn.ReLU()
    chain = nn.Sequential(block_linear(8, 8, 2, 1), relu, block_linear(8, 8, 2, 1))
    model, x = nn.Sequential(chain, Part(relu), nn.Linear(8, 2)), torch.randn(4, 8)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small[0][0], cx.BlockChain)
    assert isinstance(small[1].layer, nn.ReLU)
    assert_close(small(x), model(x))
    assert_same_state(restore(small), model)


def test_shared_attention_is_expanded_once():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2)
    model = expand_(nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention])}))
    assert model["a"] is model["b"][0]
    assert [unit.name for unit in find_units(model, ["*"], [])] == ["a.q", "a.k", "a.v", "a.out"]
    model = collapse_(model)
    assert model["a"] is model["b"][0]
    assert_same_state(model["a"], attention)


def test_a_layer_in_two_encoders_turns_off_the_fused_kernel_of_both():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    first, second = (nn.TransformerEncoder(layer, 1) for _ in range(2))
    second.layers[0] = first.layers[0]
    model = nn.ModuleList([first, second]).eval()
    assert first.use_nested_tensor
    expand_(model)
    assert not first.use_nested_tensor
    assert not second.use_nested_tensor
    collapse_(model)
    assert second.use_nested_tensor


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
