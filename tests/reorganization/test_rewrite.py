"""Whole models: annealed, decomposed, swapped; equal to the model with the annealed weights, restored, and reported."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.reorganization.restore import DenseFeedForward, restore
from tests.helpers.block_models import (
    Gated,
    annealed,
    assert_same_state,
    block_convolution,
    block_linear,
    block_recurrent,
    outputs_and_gradients,
)
from tests.helpers.planted.chain import planted
from tests.helpers.tolerance import assert_close


class Network(nn.Module):
    """Layers that meet in a residual sum, so that they are swapped one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = planted((48, 48, 48), 4, seed=1, dtype=torch.float32)
        self.norm = nn.LayerNorm(48)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        x = x + self.second(torch.relu(self.first(x)))
        return self.head(self.norm(x))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = block_convolution(nn.Conv2d, 8, 16, 4, seed=1, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = block_convolution(nn.Conv2d, 16, 12, 4, seed=2, stride=2, bias=False)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.norm(self.first(x))))).mean((2, 3)))


class Sequences(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = block_recurrent(kind, 24, 192, 6, batch_first=True, **options)
        self.head = nn.Linear(192 * (1 + self.rnn.bidirectional), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


class Attention(nn.Module):
    """Query, key and value in one matrix: each in blocks, together one block."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([block_linear(24, 24, 4, seed).weight for seed in range(3)]))

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + torch.softmax(query @ key.transpose(-1, -2), -1) @ value


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def sequential():
    first, second, third = planted((16, 32, 32, 8), 4, dtype=torch.float32)
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), second, nn.GELU(), third, nn.Softmax(-1))


KINDS = {
    "linear": (Network, (7, 48), {"first": cx.BlockLinear, "second": cx.BlockLinear, "head": nn.Linear}),
    "convolution": (Images, (3, 8, 9, 9), {"first": cx.BlockConv, "second": cx.BlockConv}),
    "1-D convolution": (
        lambda: nn.Sequential(block_convolution(nn.Conv1d, 6, 6, 3, 1), nn.Tanh()), (2, 6, 9), {"0": cx.BlockConv},
    ),
    "rnn": (lambda: Sequences(nn.RNN, nonlinearity="relu"), (2, 7, 24), {"rnn": cx.BlockRecurrent}),
    "gru": (lambda: Sequences(nn.GRU, num_layers=2), (2, 7, 24), {"rnn": cx.BlockRecurrent}),
    "lstm": (lambda: Sequences(nn.LSTM, bidirectional=True), (2, 7, 24), {"rnn": cx.BlockRecurrent}),
    "gated": (
        lambda: Residual(Gated()), (5, 16), dict.fromkeys(["inner.one", "inner.two", "inner.three"], cx.BlockLinear),
    ),
    "gated, two partitions": (
        lambda: Residual(Gated(strangers=True)), (5, 16), dict.fromkeys(["inner.one", "inner.two"], cx.BlockLinear),
    ),
    "fused qkv": (Attention, (2, 5, 24), {"qkv": cx.BlockLinear}),
    "sequential": (sequential, (5, 16), {"0": cx.BlockChain, "3": nn.Identity}),
    "the model itself": (lambda: block_linear(12, 8, 4, 1), (5, 12), {"": cx.BlockLinear}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind, fold):
    """Before = after in outputs and gradients, undone bit for bit, the model itself untouched."""
    build, shape, expected = KINDS[kind]
    model = build().eval()
    before, x = copy.deepcopy(model), torch.randn(shape)
    small = cx.reorganize(model, level=None, example=x, fold=fold, only_if_faster=False)
    assert {name: type(small.get_submodule(name)) for name in expected} == expected
    for found, wanted in zip(outputs_and_gradients(small, x), outputs_and_gradients(model, x), strict=True):
        assert_close(found, wanted)
    with torch.no_grad():  # without gradients other kernels run
        assert_close(small(x), model(x))
    assert cx.summary(small).macs[1] < cx.summary(small).macs[0]
    assert_same_state(model, before)
    again = restore(small)
    assert_same_state(again, model)
    assert_close(again(x), model(x))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "the model itself"])
def test_saved_reloaded_and_undone(kind, tmp_path):
    build, shape, expected = KINDS[kind]
    model, x = build().eval(), torch.randn(shape)
    small = cx.reorganize(model, level=None, example=x, only_if_faster=False)
    loaded = cx.load(cx.save(small, tmp_path / "small"), into=model).eval()
    assert {name: type(loaded.get_submodule(name)) for name in expected} == expected
    assert torch.equal(loaded(x), small(x))
    assert_same_state(restore(loaded), model)
    assert repr(cx.summary(loaded)) == repr(cx.summary(small))


@pytest.mark.parametrize(
    "options",
    [
        {"level": 0.001, "rule": "neyman"},
        {"level": 0.05},
        {"level": "percolation", "correction": "holm", "rule": "neyman"},
        {"level": 0.3, "null": "empirical", "rule": "neyman"},
    ],
)
@pytest.mark.parametrize("kind", ["linear", "convolution", "gru", "lstm", "gated", "fused qkv", "sequential"])
def test_equals_the_annealed_model(kind, options):
    """Every weight is masked as `anneal` masks it, gate by gate, whatever became of its layer."""
    build, shape, _ = KINDS[kind]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # something for the tests to tell apart
                parameter += 0.5 / parameter[0].numel() ** 0.5 * torch.randn_like(parameter).pow(3)
    x = torch.randn(shape)
    small, oracle = cx.reorganize(model, example=x, **options, only_if_faster=False), annealed(model, **options)
    kept, there = (sum(int(p.count_nonzero()) for p in m.parameters()) for m in (oracle, model))
    assert 0 < kept < there
    assert_same_state(restore(small), oracle)
    for found, wanted in zip(outputs_and_gradients(small, x), outputs_and_gradients(oracle, x), strict=True):
        assert_close(found, wanted)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=5),
    kept=st.floats(0, 0.5),
    activations=st.lists(st.sampled_from([nn.ReLU(), nn.Tanh(), nn.Identity(), nn.Softmax(-1), None]), min_size=4),
    bias=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_sparse_network(sizes, kept, activations, bias, seed):
    """Whatever the zeros are: dormant neurons, dead ends, single neurons, layers without an edge."""
    torch.manual_seed(seed)
    modules = []
    for (inputs, outputs), activation in zip(pairwise(sizes), activations, strict=False):
        layer = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
        with torch.no_grad():
            layer.weight *= torch.rand(outputs, inputs) < kept
        modules += [layer] if activation is None else [layer, activation]
    model, x = nn.Sequential(*modules), torch.randn(3, sizes[0], dtype=torch.float64)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert_close(small(x), model(x))
    before, after = cx.summary(small).macs
    assert sum(int(w.count_nonzero()) for w in model.parameters() if w.ndim > 1) <= after <= before
    assert_same_state(restore(small), model)


def test_initialisations_that_a_config_tells():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model.config = {"initializer_range": 0.3}
    small = cx.reorganize(model, level=0.05, null="init", rule="neyman", only_if_faster=False)
    threshold = cx.nulls.Normal(0.3).threshold(0.05)
    assert threshold > 1 / 8  # so that PyTorch's own initialisation would have kept something
    assert not restore(small)[0].weight.any()


def test_layers_with_different_partitions_are_one_chain_with_a_shuffle():
    first, second = (block_linear(32, 32, 4, seed) for seed in (1, 2))
    small = cx.reorganize(nn.Sequential(first, nn.ReLU(), second), level=None, only_if_faster=False)
    assert isinstance(small[0], cx.BlockChain)
    assert (small[0].n_subnetworks, small[0].macs) == (1, 2 * 32 * 8)
    assert [c.became for c in cx.summary(small).changes] == ["4 blocks in a chain"] * 2


def test_channel_by_channel_where_that_saves_more():
    """Both layers are one block each, but in every quarter of the hidden neurons they fall apart."""
    first, second = nn.Linear(16, 64), nn.Linear(64, 16)
    parts = [block_linear(16, 16, 4, seed).weight for seed in range(4)]
    with torch.no_grad():
        first.weight.copy_(torch.cat(parts))
        second.weight.copy_(torch.cat(parts, 1).roll(1, 0))
    model, x = nn.Sequential(first, nn.GELU(), second, nn.Tanh()), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert small[0].form == "channels"
    assert cx.summary(small).macs == (2048, 512)
    assert_close(small(x), model(x))
    assert_same_state(restore(small), model)


def gated_channels():
    """A gated pair each of whose four channels has blocks of its own."""
    module = Gated(16, 64, 1)
    parts = [block_linear(16, 16, 4, seed).weight for seed in range(4)]
    with torch.no_grad():
        for layer in (module.one, module.three):
            layer.weight.copy_(torch.cat(parts))
        module.two.weight.copy_(torch.cat(parts, 1).roll(1, 0))
    return Residual(module)


def test_a_gated_module_channel_by_channel():
    model, x = gated_channels(), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert [c.became for c in cx.summary(small).changes] == ["feed-forward channel by channel, 32 blocks"] * 3
    assert cx.summary(small).macs == (3072, 768)
    assert_close(small(x), model(x))
    assert_same_state(restore(small), model)


def test_an_activation_used_twice():
    activation, layers = nn.Tanh(), planted((8, 16, 16, 8), 2, dtype=torch.float32)
    model = nn.Sequential(layers[0], activation, layers[1], activation, layers[2])
    small, x = cx.reorganize(model, level=None, only_if_faster=False), torch.randn(3, 8)
    assert isinstance(small[0], cx.BlockChain)
    assert_close(small(x), model(x))
    assert [type(m) for m in restore(small)] == [type(m) for m in model]


def test_a_chain_ends_where_a_layer_does_not_pay():
    layers = [block_linear(16, 16, 4, 1), block_linear(16, 16, 4, 2), nn.Linear(16, 16), block_linear(16, 16, 4, 3)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))
    small, x = cx.reorganize(model, level=None, only_if_faster=False), torch.randn(3, 16)
    kinds = [cx.BlockChain, nn.Identity, nn.Identity, nn.ReLU, nn.Linear, nn.ReLU, cx.BlockLinear, nn.ReLU]
    assert [type(m) for m in small] == kinds
    assert_close(small(x), model(x))
    assert_same_state(restore(small), model)


def test_folding_leaves_nothing_to_move_inside():
    class Pair(nn.Module):  # a residual stream fixes the outer order, so the inner one is what can be folded
        def __init__(self):
            super().__init__()
            self.up, self.down = planted((16, 32, 16), 4, seed=3, dtype=torch.float32)

        def forward(self, x):
            return x + self.down(nn.functional.softplus(self.up(x)))

    small = cx.reorganize(Pair(), level=None, only_if_faster=False)
    assert (small.up.outputs, small.down.columns) == (None, None)
    assert len(small.reorganization.folds) == 1
    assert "1 folded into the weights, 2 moved at run time" in repr(cx.summary(small))
    plain = cx.reorganize(Pair(), level=None, fold=False, only_if_faster=False)
    assert plain.down.columns is not None
    assert not plain.reorganization.folds


def test_what_cannot_be_traced_is_not_folded():
    class Branching(Network):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    model, x = Branching(), torch.randn(3, 48)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small.first, cx.BlockLinear)
    assert_close(small(x), model(x))
    assert "not folded: " in repr(cx.summary(small))


def test_frozen_layers_and_modes_stay():
    model = Network().eval()
    model.first.requires_grad_(False)
    model.second.train()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert not any(p.requires_grad for p in small.first.parameters())
    assert all(p.requires_grad for p in small.second.parameters())
    assert [small.first.training, small.second.training] == [False, True]
    again = restore(small)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [m.training for m in again.modules()] == [m.training for m in model.modules()]


def test_targets_and_ignore():
    model = Network()
    small = cx.reorganize(model, level=None, targets=["first", "second"], ignore="second", only_if_faster=False)
    assert isinstance(small.first, cx.BlockLinear)
    assert isinstance(small.second, nn.Linear)
    assert [c.name for c in cx.summary(small).changes] == ["first"]
    some = cx.reorganize(model, level=0.05, targets="*e*d", rule="neyman", only_if_faster=False)
    assert_same_state(restore(some), annealed(model, {"second", "head"}, level=0.05, rule="neyman"))
    gated = cx.reorganize(Residual(Gated()), level=None, ignore="*two", only_if_faster=False)
    assert isinstance(gated.inner, Gated)
    assert isinstance(gated.inner.one, cx.BlockLinear)


def test_restored_feed_forward_modules_keep_their_layers():
    again = restore(cx.reorganize(gated_channels(), level=None, only_if_faster=False))
    assert isinstance(again.inner, DenseFeedForward)
    small = cx.reorganize(again, level=None, only_if_faster=False)  # it can be taken apart again
    assert small.inner.macs == 768


def test_small_layers_stay_dense_where_blocks_would_be_slower():
    model = nn.Sequential(block_linear(64, 64, 4, 1), nn.Softmax(-1), block_linear(64, 1024, 4, 2))
    small = cx.reorganize(model, level=None)
    assert [type(module) for module in small] == [nn.Linear, nn.Softmax, nn.Linear]
    assert all("would not pay" in change.became for change in cx.summary(small).changes)
    model[2] = block_linear(64, 8192, 4, 2)
    assert isinstance(cx.reorganize(model, level=None)[2], cx.BlockLinear)


def test_transformers_conv1d():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    layer = conv1d(12, 8)
    with torch.no_grad():
        layer.weight.copy_(block_linear(8, 12, 4, 1).weight.T)
    model = nn.Sequential(layer, nn.Tanh())
    small, x = cx.reorganize(model, level=None, only_if_faster=False), torch.randn(2, 3, 8)
    assert isinstance(small[0], cx.BlockLinear)
    assert_close(small(x), model(x))
    again = restore(small)
    assert type(again[0]) is conv1d
    assert_same_state(again, model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cx.reorganize(torch.ones(2, 2), only_if_faster=False), "nn.Module"),
        (lambda: cx.reorganize(nn.ReLU(), only_if_faster=False), "no layer with weights"),
        (
            lambda: cx.reorganize(Network(), targets=["x*"], only_if_faster=False),
            r"targets: no layer with weights matches 'x\*'",
        ),
        (lambda: cx.reorganize(Network(), level=7, only_if_faster=False), "level"),
        (lambda: cx.reorganize(Network(), null="flat", only_if_faster=False), "first.weight: null must be"),
        (
            lambda: cx.reorganize(cx.reorganize(Network(), level=None, only_if_faster=False), level=None),
            "reorganized already",
        ),
        (lambda: restore(Network()), "not made by reorganize"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(cx.CrystalliteError, match=message):
        call()


@pytest.mark.parametrize("level", [None, 0.01])
def test_weights_that_are_not_numbers_are_named(level):
    model = Images()
    with torch.no_grad():
        model.second.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(cx.InvalidMatrix, match=r"second.weight: .*NaN"):
        cx.reorganize(model, level=level, only_if_faster=False)


@pytest.mark.parametrize("form", ["pair", "layers", "channels"])
def test_the_form_of_feed_forward_pairs_can_be_forced(form):
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model, x = nn.Sequential(Gated(16, 48, 4), nn.LayerNorm(16), plain), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, feed_forward=form, channels=2)
    pairs = [m for m in small.modules() if isinstance(m, cx.BlockFeedForward)]
    assert [(p.form, p.n_channels) for p in pairs] == [(form, 2 if form == "channels" else 1)] * 2
    assert_close(small(x), model(x))
    assert_same_state(restore(small), model)
    with pytest.raises(cx.InvalidOption, match="channels must be"):
        cx.reorganize(model, level=None, feed_forward="channels", channels=1000)
    with pytest.raises(cx.InvalidOption, match="form must be one of pair, layers, channels"):
        cx.reorganize(model, level=None, feed_forward="rows")
