"""Recurrent networks whose weak components run apart, through the interface of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from crystallite import BlockRecurrent
from tests.helpers.block_models import block_recurrent
from tests.helpers.cuts import CutOperator
from tests.helpers.planted.recurrent import HIDDEN, INPUT, MODES, STRUCTURES, flat, planted
from tests.helpers.tolerance import assert_close


def assert_same(dense, cut, *inputs):
    with torch.no_grad():
        for found, expected in zip(flat(cut(*inputs)), flat(dense(*inputs)), strict=True):
            assert_close(found, expected)


@given(
    mode=st.sampled_from(MODES),
    structure=st.sampled_from(STRUCTURES),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
)
@settings(max_examples=25)
def test_sequences_states_and_packed_sequences(mode, structure, layers, bidirectional, bias, batch_first):
    dense = planted(mode, structure, layers, bidirectional, bias=bias, batch_first=batch_first).eval()
    cut = CutOperator(BlockRecurrent.from_dense(dense, smallest=1))
    x = torch.randn(4, 4, INPUT, dtype=torch.float64)
    states = [torch.randn(layers * (1 + bidirectional), 4, HIDDEN, dtype=torch.float64) for _ in range(2)]
    begin = tuple(states) if mode == "LSTM" else states[0]
    assert_same(dense, cut, x)
    assert_same(dense, cut, x, begin)
    packed = pack_sequence([x[i, : 1 + i] for i in range(4)], enforce_sorted=False)
    assert_same(dense, cut, packed, begin)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_components_are_services(kind):
    torch.manual_seed(0)
    dense = block_recurrent(kind, 12, 99, 3).eval()
    cut = CutOperator(BlockRecurrent.from_dense(dense))
    assert_same(dense, cut, torch.randn(6, 2, 12))
    assert cut.rounds == [["model.layers.0.0", "model.layers.0.1", "model.layers.0.2"]]
    assert not list(cut.module.parameters())


def test_a_stream_goes_on_where_its_state_says():
    torch.manual_seed(0)
    dense = block_recurrent(nn.GRU, 12, 99, 3).eval()
    cut, x = CutOperator(BlockRecurrent.from_dense(dense)), torch.randn(6, 2, 12)
    first, state = cut(x[:4])
    second, last = cut(x[4:], state)
    with torch.no_grad():
        expected, end = dense(x)
    assert_close(torch.cat([first, second]), expected)
    assert_close(last, end)


def test_components_that_are_fused_and_ones_that_read_nothing():
    torch.manual_seed(0)
    dense = block_recurrent(nn.GRU, 12, 80, 4).eval()
    with torch.no_grad():
        unit = BlockRecurrent.from_dense(dense, smallest=1).layers[0]
        dense.weight_ih_l0.view(3, 80, 12)[:, unit.order[:20]] = 0  # one component
    cut = CutOperator(BlockRecurrent.from_dense(dense, smallest=1))
    assert len(cut.plan.pieces) == 4
    assert_same(dense, cut, torch.randn(5, 3, 12))
