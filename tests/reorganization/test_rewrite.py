"""Whole models: annealed, decomposed, swapped; equal to the model with the annealed weights, and reported."""

import pytest
import torch
from torch import nn

import crystallite as cx
from tests.operators.test_chain import planted
from tests.operators.tolerance import assert_close


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


def annealed_copy(model, **options):
    """The oracle: the same model with every chosen weight masked by `anneal`."""
    import copy

    result = copy.deepcopy(model)
    for module in result.modules():
        if isinstance(module, nn.Linear):
            null = cx.nulls.choose(module.weight, [cx.nulls.for_module(module)]).null
            mask = cx.anneal(module.weight, null, **options).mask
            with torch.no_grad():
                module.weight *= mask
    return result


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_layers_become_blocks():
    model = Network()
    small = cx.reorganize(model, level=None)
    x = torch.randn(7, 48)
    assert_close(small(x), model(x))
    assert isinstance(small.first, cx.BlockLinear)
    assert isinstance(small.head, nn.Linear)
    changes = {c.name: c for c in cx.summary(small).changes}
    assert changes["first"].became == "4 blocks"
    assert (changes["first"].macs_before, changes["first"].macs_after) == (48 * 48, 48 * 12)
    assert changes["head"].became == "dense, annealed: one block"
    assert isinstance(model.first, nn.Linear)  # the model itself is untouched


def test_sequential_layers_that_separate_become_a_chain():
    first, second, third = planted((16, 32, 32, 8), 4, dtype=torch.float32)
    model = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.1), second, nn.GELU(), third, nn.Softmax(-1)).eval()
    small = cx.reorganize(model, level=None).eval()
    x = torch.randn(5, 16)
    assert_close(small(x), model(x))
    assert isinstance(small[0], cx.BlockChain)
    assert small[0].n_blocks == 4
    assert len(small) == len(model)
    assert cx.summary(small).macs == (16 * 32 + 32 * 32 + 32 * 8, (16 * 32 + 32 * 32 + 32 * 8) // 4)


def test_layers_with_different_partitions_are_swapped_one_by_one():
    (first,), (second,) = (
        planted((32, 32), 4, seed=1, dtype=torch.float32),
        planted((32, 32), 4, seed=2, dtype=torch.float32),
    )
    model = nn.Sequential(first, nn.ReLU(), second)
    small = cx.reorganize(model, level=None)
    x = torch.randn(5, 32)
    assert_close(small(x), model(x))
    assert [type(m) for m in small] == [cx.BlockLinear, nn.ReLU, cx.BlockLinear]


@pytest.mark.parametrize(
    "options",
    [
        {"level": 0.001, "rule": "neyman"},
        {"level": 0.05},
        {"level": "percolation", "correction": "holm", "rule": "neyman"},
    ],
)
def test_equals_the_annealed_model_on_trained_weights(options):
    model = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    x = torch.randn(256, 20)
    for _ in range(60):
        optimizer.zero_grad()
        (model(x) - x[:, :10].sin()).square().mean().backward()
        optimizer.step()
    small = cx.reorganize(model, **options)
    assert_close(small(x), annealed_copy(model, **options)(x))


def test_targets_ignore_and_tied_weights():
    model = Network()
    small = cx.reorganize(model, level=None, targets=["first", "second"], ignore="second")
    assert isinstance(small.first, cx.BlockLinear)
    assert isinstance(small.second, nn.Linear)
    assert [c.name for c in cx.summary(small).changes] == ["first"]
    model.second.weight = model.first.weight
    tied = cx.reorganize(model, level=None)
    assert isinstance(tied.first, nn.Linear)
    assert "tied" in cx.summary(tied).changes[0].became
    x = torch.randn(3, 48)
    assert torch.equal(tied(x), model(x))


def test_attention_projections_are_left_to_their_module():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    small = cx.reorganize(model, level=0.5, rule="neyman").eval()
    changes = {c.name: c.became for c in cx.summary(small).changes}
    assert changes["self_attn.out_proj"].startswith("left alone")
    assert small(torch.randn(2, 3, 16)).shape == (2, 3, 16)


def test_summary_prints():
    text = repr(cx.summary(cx.reorganize(Network(), level=None)))
    assert "4 blocks" in text
    assert "multiply-adds 4,848 → 1,392 (29%)" in text


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cx.reorganize(torch.ones(2, 2)), "nn.Module"),
        (lambda: cx.reorganize(nn.ReLU()), "no linear layer"),
        (lambda: cx.reorganize(Network(), targets=["x*"]), "no linear layer"),
        (lambda: cx.reorganize(Network(), level=7), "level"),
        (lambda: cx.summary(Network()), "not made by reorganize"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(cx.CrystalliteError, match=message):
        call()
