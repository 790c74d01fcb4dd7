"""Experts as modules of their own compute what a plain sum over tokens and experts says."""

import copy

import pytest
import torch
from torch import nn

from crystallite.core.errors import CheckpointError, CrystalliteError
from crystallite.models.description import build, describe
from crystallite.operators.experts import Expert, Experts, Gating, StackLayout
from crystallite.operators.low_rank import LowRankLinear
from tests.helpers.tolerance import assert_close

CLIPPED = Gating(alpha=1.702, limit=0.5, shift=1.0)


def experts(count=4, gating=None, hidden=(8, 8, 8, 8)):
    torch.manual_seed(0)
    activation = nn.SiLU() if gating is None else None
    return Experts([
        Expert(nn.Linear(6, h), nn.Linear(6, h), nn.Linear(h, 6), activation, gating)
        for h in hidden[:count]
    ])  # fmt: skip


def routes(tokens, count, seed=1):
    rng = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, count, generator=rng).argsort(1)[:, :2]
    return torch.randn(tokens, 6, generator=rng), index, torch.rand(tokens, 2, generator=rng)


def by_hand(module, x, index, weights):
    result = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(index.shape[1]):
            if index[token, slot] < len(module.experts):
                expert = module.experts[index[token, slot]]
                gate, up = expert.gate(x[token]), expert.up(x[token])
                if expert.gating.alpha is None:
                    hidden = nn.functional.silu(gate) * up
                else:
                    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
                    hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
                result[token] += weights[token, slot] * expert.down(hidden)
    return result


@pytest.mark.parametrize("gating", [None, CLIPPED])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_each_token_gets_the_weighted_sum_of_its_experts(gating, tokens):
    module = experts(gating=gating, hidden=(8, 3, 5, 1))  # of different sizes
    given = routes(tokens, 4)
    assert_close(module(*given), by_hand(module, *given))


def test_tokens_that_are_sent_nowhere_get_nothing():
    module, (x, index, weights) = experts(), routes(5, 4)
    index[2] = 4
    found = module(x, index, weights)
    assert_close(found, by_hand(module, x, index, weights))
    assert not found[2].any()


def test_shape_dtype_and_gradients_are_those_of_the_input():
    module, (x, index, weights) = experts().bfloat16(), routes(6, 4)
    x = x.bfloat16().view(2, 3, 6).requires_grad_()
    found = module(x, index, weights)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    found.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("gating", [None, CLIPPED])
def test_an_exported_graph_computes_the_same_for_other_routes(gating):
    module = experts(gating=gating)
    program = torch.export.export(module, routes(5, 4, seed=1)).module()
    other = routes(5, 4, seed=2)
    assert_close(program(*other), module(*other))


def test_experts_that_nobody_is_sent_to_run_only_for_those_who_watch():
    module, (x, _, weights) = experts(), routes(3, 4)
    index, seen = torch.tensor([[0, 1]] * 3), []
    module.experts[3].register_forward_hook(lambda m, i, o: seen.append(len(i[0])))
    module.experts[2].forward = None  # would raise
    assert_close(module(x, index, weights), by_hand(module, x, index, weights))
    assert seen == [0]


def test_described_and_built_again():
    module = experts(gating=CLIPPED)
    setattr(module, "0", Expert(None, nn.Linear(6, 2), nn.Linear(2, 6), nn.GELU("tanh"), Gating(limit=2.0)))
    module.experts[1].up = LowRankLinear.from_factors(torch.randn(8, 2), torch.randn(2, 6), torch.randn(8))
    layout = StackLayout({"gate": "w", "up": "w", "down": "v"}, {}, True, True, False)
    module.layout = layout
    again = build(describe(module), "test").to_empty(device="cpu")
    again.load_state_dict(module.state_dict())
    given = routes(9, 4)
    assert_close(again(*given), module(*given))
    assert again.layout == layout


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("experts", 0, "up", "arguments", "in_features"), 5),
        (("experts", 0, "down", "arguments", "in_features"), 9),
        (("experts", 1, "down", "arguments", "out_features"), 7),
        (("experts", 0, "gating", "limit"), float("nan")),
        (("experts", 0, "gating", "limit"), -1.0),
        (("experts", 0, "gating", "alpha"), 1.0),  # beside an activation
        (("experts", 0, "gating", "more"), 1.0),
        (("experts",), []),
        (("layout",), {"weights": {"other": "w"}, "biases": {}}),
        (("layout",), {"weights": {"up": 3}, "biases": {}}),
    ],
)
def test_hostile_descriptions_are_refused(where, value):
    description = copy.deepcopy(describe(experts()))
    inner = description
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    with pytest.raises(CheckpointError, match="expected the description of a module"):
        build(description, "test")


def test_an_expert_needs_one_activation():
    with pytest.raises(CrystalliteError, match="activation"):
        Expert(None, nn.Linear(2, 2), nn.Linear(2, 2), None)
