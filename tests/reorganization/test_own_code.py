"""Models whose code does more with its layers than call them one after the other: the function stays the same."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.graph.trace import trace
from crystallite.reorganization import rewrite
from crystallite.structure.bipartite import BipartiteStructure
from tests.helpers.block_models import assert_same_state, block_linear, block_recurrent
from tests.helpers.tolerance import assert_close


def model_of(forward, attributes=dict):
    """A model of scattered blocks, in 16 → out 16, with this forward."""

    class Built(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (block_linear(16, 16, 4, seed) for seed in (1, 2, 3))
            self.net = nn.Sequential(block_linear(16, 16, 4, 4), nn.ReLU(), block_linear(16, 16, 4, 5))
            for name, value in attributes().items():
                setattr(self, name, value)

        def hidden(self, x):
            return torch.relu(self.first(x))

    Built.forward = forward
    return Built()


def through_all(self, x):
    return self.last(torch.relu(self.second(self.net(self.hidden(x)))))


def one_by_one(self, x):
    for layer in self.net:
        x = x + layer(x)
    return self.last(self.second(self.hidden(x)))


def standardised(weight):
    return weight - weight.mean(1, keepdim=True)


# Uses of the layer `second` and of the nn.Sequential `net`, between others whose neurons could move.
FORWARDS = {
    "called": through_all,
    "scaled": lambda s, x: s.last(torch.relu(F.linear(s.net(s.hidden(x)), s.second.weight * 2, s.second.bias))),
    "added": lambda s, x: s.last(torch.relu(torch.addmm(s.second.bias, s.net(s.hidden(x)), s.second.weight.t()))),
    "standardised": lambda s, x: s.last(F.linear(s.net(s.hidden(x)), standardised(s.second.weight), s.second.bias)),
    "turned": lambda s, x: s.last(torch.relu(s.net(s.hidden(x)) @ s.second.weight + s.second.bias.sum())),
    "there and back": lambda s, x: s.last(F.linear(torch.tanh(s.second(s.net(s.hidden(x)))), s.second.weight.t())),
    "iterated": one_by_one,
    "sliced": lambda s, x: s.last(s.second(s.net(s.hidden(x)) + s.net[:2](x))),
    "its width read": lambda s, x: s.last(s.second(s.net(s.hidden(x)) / s.net[-1].in_features)),
    "its dtype read": lambda s, x: s.last(s.second(s.net(s.hidden(x).to(s.net[0].weight.dtype)))),
    "its weight used": lambda s, x: s.last(s.second(s.net(s.hidden(x)) + F.linear(x, s.net[2].weight))),
    "twice": lambda s, x: s.last(s.second(s.net(s.net(s.hidden(x))))),
    "in training": lambda s, x: s.last(s.second(s.hidden(x)) + (s.net(s.hidden(x)) if s.training else 0)),
    "in training, one by one": lambda s, x: one_by_one(s, x) if s.training else through_all(s, x),
}
TOGETHER = {"called", "scaled", "added", "standardised", "turned", "there and back", "twice", "in training"}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", FORWARDS)
def test_the_function_stays_in_both_modes(name):
    model, x = model_of(FORWARDS[name]), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert small.reorganization.folds
    assert isinstance(small.second, cx.BlockLinear)
    assert type(small.net[0]) is (cx.BlockChain if name in TOGETHER else cx.BlockLinear)
    for training in (True, False):
        assert_close(small.train(training)(x), model.train(training)(x))
    assert_same_state(cx.restore(small), model)


def test_an_iterated_sequential_of_a_model_that_cannot_be_traced():
    def forward(self, x):
        return one_by_one(self, x) if x.sum() > 0 else -one_by_one(self, -x)

    model, x = model_of(forward), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small.net[0], cx.BlockLinear)
    assert_close(small(x), model(x))


def test_layers_that_forward_does_not_use():
    """Another method uses them: nobody can see with which neurons."""
    model, x = model_of(through_all, lambda: {"decode": block_linear(16, 16, 4, 9)}), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert small.reorganization.not_folded == "decode.weight is not used by forward"
    assert_close(small.decode(small.hidden(x)), model.decode(model.hidden(x)))
    assert isinstance(small.net[0], cx.BlockChain)  # what it does use is known


def test_buffers_that_are_not_saved_stay(tmp_path):
    def build():
        model = model_of(lambda s, x: s.last(s.second(s.net(s.hidden(x) * s.scale))))
        model.register_buffer("scale", torch.linspace(-1, 1, 16), persistent=False)
        return model

    model, x = build(), torch.randn(5, 16)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert small.reorganization.folds  # elsewhere
    assert_close(cx.load(cx.save(small, tmp_path / "a"), into=build())(x), model(x))


def test_blocks_that_do_not_hold_all_weights_are_refused(monkeypatch):
    wrong = BipartiteStructure.from_labels(np.arange(16) // 8, np.arange(16) // 8)
    monkeypatch.setattr(rewrite, "structure_of", lambda unit: wrong)
    with pytest.raises(cx.InvalidMatrix, match="the model: expected blocks that hold all 80"):
        cx.reorganize(model_of(through_all).first, level=None, only_if_faster=False, fold=False)


def test_a_turned_linear_layer_is_no_layer_of_the_trace():
    names = [layer.name for layer in trace(model_of(FORWARDS["turned"])).layers]
    assert names == ["first", "net.0", "net.2", "last"]


def flags(model):
    return [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize(
    "frozen", [["0.weight", "0.bias"], ["2.weight"], ["0.bias", "2.bias"], ["0.weight", "2.weight"]]
)
def test_what_was_frozen_stays_frozen_and_the_rest_is_trained(frozen):
    model, x = model_of(through_all).net, torch.randn(5, 16)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    alike = len({name[2:] for name in frozen}) < len(frozen)
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert type(small[0]) is (cx.BlockChain if alike else cx.BlockLinear)
    assert flags(cx.restore(small)) == flags(model)
    for each in (small, model):
        each(x).square().sum().backward()
        with torch.no_grad():
            for p in each.parameters():
                p -= 0.1 * (p.grad if p.grad is not None else 0)
    with torch.no_grad():  # inside the blocks both took the same step
        for (name, found), wanted in zip(cx.restore(small).named_parameters(), model.parameters(), strict=True):
            assert_close(found, wanted * (found != 0) if found.ndim > 1 else wanted)
            assert name not in frozen or not wanted.requires_grad


def test_a_recurrent_layer_that_is_frozen_in_part_is_left_alone():
    model = block_recurrent(nn.GRU, 24, 192, 6)
    model.weight_ih_l0.requires_grad_(False)
    (change,) = cx.summary(cx.reorganize(model, level=None, only_if_faster=False)).changes
    assert change.became == "left alone: only some of its weights are frozen"
    small = cx.reorganize(model.requires_grad_(False), level=None, only_if_faster=False)
    assert isinstance(small, cx.BlockRecurrent)
    assert not any(flags(small))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders_take_padded_sequences():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    for layer in encoder.layers:
        layer.linear1, layer.linear2 = block_linear(16, 32, 4, 1), block_linear(32, 16, 4, 2)
    model, x, padded = encoder.eval(), torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert isinstance(small.layers[0].linear1, cx.BlockLinear)
    with torch.no_grad():
        found, wanted = (each(x, src_key_padding_mask=padded)[~padded] for each in (small, copy.deepcopy(model)))
    assert_close(found, wanted)
    assert not small.use_nested_tensor
    assert cx.restore(small).use_nested_tensor
