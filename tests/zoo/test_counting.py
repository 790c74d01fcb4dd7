"""The oracle of the zoo's costs, against counts by hand."""

import pytest
import torch
from torch import nn

from crystallite.data.batch import Batch
from crystallite.operators.low_rank import LowRankLinear
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from tests.zoo.counting import Count, count
from tests.zoo.models import ZOO

ROWS, STEPS, WIDTH = 5, 7, 8


def batch(*shape):
    return Batch(0, shape[0], (torch.randn(*shape),))


def linear():
    return nn.Linear(WIDTH, 3), batch(ROWS, WIDTH), Count(ROWS * WIDTH * 3, 0, 0)


def convolution():
    return nn.Conv1d(2, 4, 3), batch(ROWS, 2, STEPS), Count(ROWS * (STEPS - 2) * 2 * 4 * 3, 0, 0)


def recurrent(model):
    return model, batch(STEPS, ROWS, WIDTH), Count(STEPS * ROWS * 4 * WIDTH * 2 * WIDTH, 0, 0)


def recurrent_of_low_rank():
    model = LowRankRecurrent("LSTM", WIDTH, WIDTH, [(2, 2)])
    return model, batch(STEPS, ROWS, WIDTH), Count(STEPS * ROWS * 2 * (2 * WIDTH + 2 * 4 * WIDTH), 0, 0)


class Both(nn.Module):
    """Reads the weight of a layer of low rank beside running it."""

    def __init__(self):
        super().__init__()
        self.layer = LowRankLinear(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH))

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype))


def rebuilt():
    return Both(), batch(ROWS, WIDTH), Count(ROWS * 4 * WIDTH, 0, 2 * WIDTH**2)


def transformer():
    """Without the fast path, which is one operation."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, batch_first=True).eval()
    weights = 4 * WIDTH**2 + 2 * 4 * WIDTH**2
    return layer, batch(ROWS, STEPS, WIDTH), Count(ROWS * STEPS * weights, 2 * ROWS * STEPS**2 * WIDTH, 0)


CASES = {
    "linear": linear,
    "convolution": convolution,
    "lstm": lambda: recurrent(nn.LSTM(WIDTH, WIDTH)),
    "low_rank_lstm": recurrent_of_low_rank,
    "rebuilt": rebuilt,
    "transformer": transformer,
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_by_hand(case):
    model, inputs, expected = case()
    assert count(model, inputs) == expected


def test_experts_count_with_the_tokens_that_reach_them():
    """Two of four experts of a gated pair for each token, whatever runs them."""
    model, inputs = ZOO["mixtral"].model(), {"input_ids": torch.arange(4, 14)[None]}
    layers, hidden, tokens = 2, 64, 10
    attention = hidden * (2 * hidden + 2 * hidden // 2)
    experts = 2 * 3 * hidden * 2 * hidden + 4 * hidden
    found = count(model, Batch(0, 1, (), inputs))
    assert found.weights == tokens * (layers * (attention + experts) + hidden * 128)
