"""Attention heads hand on fewer numbers: what they say is found in whatever directions, and kept."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.heads import order_head_numbers_
from crystallite.compression.pruning import find_prunable
from crystallite.compression.session import Session
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.models.layers import find_units
from crystallite.operators.linear import BlockLinear
from crystallite.statistics.observer import ForwardPlan
from tests.helpers.compressible import relative_error

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """x + output(attention(x)), where each head's output is read in `directions` of its 8 directions only."""

    def __init__(self, directions=2, between=nn.Identity):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between = between()
        with torch.no_grad():
            for head in self.output.weight.view(WIDTH, HEADS, -1).unbind(1):
                head.copy_(torch.randn(WIDTH, directions) @ torch.randn(directions, head.shape[1]) / 4)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.output(self.between(seen))


def sequences(count=300, seed=5):
    return torch.randn(count, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


NAMES = ("query", "key", "value", "output")
FOUND = NeuronGroup(WIDTH, ("value",), ("output",), HEADS, embedded=True)
COMPARED = NeuronGroup(WIDTH, ("query", "key"), (), HEADS, 0, embedded=True)


def found_in(model, names=NAMES):
    return find_prunable(model, names, Batch(0, 2, (sequences(2),)))


def test_heads_are_found_and_others_are_not():
    assert found_in(Attention()).groups == (FOUND, COMPARED)
    assert found_in(Attention(between=nn.GELU)).groups == (COMPARED,)  # rotating would change what it does
    assert found_in(Attention(between=nn.GELU)).reasons == {
        "query, key: values": "what it hands on passes through gelu"
    }
    assert found_in(Attention(), ("query", "key", "value")).groups == (COMPARED,)


def test_rotating_changes_nothing_but_the_order_of_worth():
    model, x = Attention(directions=8).eval(), sequences()
    rotated, data = copy.deepcopy(model), Calibration.read(x)
    units = {unit.name: unit for unit in find_units(rotated, ["*"], [])}
    session = Session(rotated, units, data, ForwardPlan.of(rotated, NAMES, data.fitted[0]), 0.01, 0)
    order_head_numbers_(session, found_in(model).groups[:1])
    assert relative_error(rotated(x), model(x)) < 1e-5
    weight = rotated.output.weight.detach().view(WIDTH, HEADS, -1).transpose(0, 1)
    torch.testing.assert_close(weight.mT @ weight, torch.eye(8).expand(HEADS, 8, 8), rtol=0, atol=1e-3)
    seen = {}
    rotated.output.register_forward_pre_hook(lambda module, inputs: seen.update(x=inputs[0].detach()))
    rotated(x)
    spread = seen["x"].flatten(0, 1).var(0).view(HEADS, -1)
    assert (spread[:, :-1] >= 0.9 * spread[:, 1:]).all()


def test_directions_that_nobody_reads_go():
    model, fresh = Attention(), sequences(seed=9)
    small = compress(model, budget=0.625, calibration=sequences())  # 8 of 32 numbers between value and output
    assert isinstance(small.value, BlockLinear)
    assert isinstance(small.output, BlockLinear)
    assert small.value.macs == small.output.macs == 8 * WIDTH
    assert small.value.out_features == small.output.in_features == WIDTH
    assert relative_error(small(fresh), model(fresh)) < 1e-3


def test_it_is_stored_and_loaded(tmp_path):
    small, fresh = compress(Attention(), budget=0.625, calibration=sequences()), sequences(seed=9)
    cx.save(small, tmp_path / "small")
    again = cx.load(tmp_path / "small", into=Attention())
    assert torch.equal(again(fresh), small(fresh))


@pytest.mark.parametrize("budget", [0.25, 0.5])
def test_heads_and_low_rank_together_beat_svd(budget):
    model, fresh = Attention(directions=8), sequences(seed=9)
    small, plain = compress(model, budget=budget, calibration=sequences()), copy.deepcopy(model)
    before, after = cx.summary(small).macs
    assert after <= budget * before
    with torch.no_grad():
        for name in NAMES:
            left, values, right = torch.linalg.svd(plain.get_submodule(name).weight)
            rank = int(budget * WIDTH / 2)
            plain.get_submodule(name).weight.copy_(left[:, :rank] * values[:rank] @ right[:rank])
    assert relative_error(small(fresh), model(fresh)) < 0.8 * relative_error(plain(fresh), model(fresh))


def test_samples_that_judge_do_not_rotate_heads():
    x, other = sequences(), sequences()
    other[-60:] = 3 * sequences(60, seed=8)  # the last fifth
    found = []
    for data in (x, other):
        model = Attention(directions=8).eval()
        read = Calibration.read(list(data.split(60)))
        units = {unit.name: unit for unit in find_units(model, ["*"], [])}
        session = Session(model, units, read, ForwardPlan.of(model, NAMES, read.fitted[0]), 0.01, 0)
        order_head_numbers_(session, found_in(model).groups)
        found.append(model.output.weight.detach())
    assert torch.equal(*found)
