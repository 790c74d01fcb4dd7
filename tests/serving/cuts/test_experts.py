"""Experts that run apart: tokens sent to them, and their answers added up."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite.operators.experts import Expert, Experts
from crystallite.serving import Machine
from tests.helpers.cuts import FREE, CutOperator
from tests.helpers.tolerance import assert_close


def experts(count):
    torch.manual_seed(0)
    layers = [[nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)] for _ in range(count)]
    return Experts([Expert(gate, up, down, nn.SiLU()) for gate, up, down in layers]).double()


@given(count=st.integers(2, 6), chosen=st.integers(1, 3), tokens=st.integers(1, 9), seed=st.integers(0, 99),
       hop=st.sampled_from([0.0, 4e-8]))  # fmt: skip
@settings(max_examples=40)
def test_tokens_meet_their_experts(count, chosen, tokens, seed, hop):
    dense, rng = experts(count), torch.Generator().manual_seed(seed)
    cut = CutOperator(dense, Machine(hop, 1e9, 1e9))
    x = torch.randn(1, tokens, 6, dtype=torch.float64, generator=rng)
    index = torch.randint(count + 1, (tokens, chosen), generator=rng)  # one more: sent nowhere
    weights = torch.rand(tokens, chosen, dtype=torch.float64, generator=rng)
    if cut.is_cut:
        assert_close(cut(x, index, weights), dense(x, index, weights).detach())
    else:
        assert hop


def test_experts_that_nobody_asks_are_not_called():
    cut = CutOperator(experts(4), FREE)
    x = torch.randn(5, 6, dtype=torch.float64)
    cut(x, torch.tensor([[1, 3]] * 5), torch.ones(5, 2, dtype=torch.float64))
    assert cut.rounds == [["model.1", "model.3"]]
    cut(x, torch.full((5, 1), 4), torch.ones(5, 1, dtype=torch.float64))
    assert cut.rounds[1:] == [[]]
