"""Linear layers, chains, feed-forward pairs and convolutions, cut wherever they can be: the answers of the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite import BlockChain, BlockFeedForward
from crystallite.operators.conv import BlockConv
from crystallite.serving import Machine
from crystallite.serving.plan import WORTH
from tests.helpers.artifacts import in_blocks
from tests.helpers.cuts import CutOperator
from tests.helpers.planted import chain as chains
from tests.helpers.planted import conv as convolutions
from tests.helpers.planted import feed_forward as pairs
from tests.helpers.planted.linear import planted as planted_matrix
from tests.helpers.tolerance import assert_close

NOTHING_READ = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # in ChainLayer.part


@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer(kind, bias):
    torch.manual_seed(0)
    layer = nn.Linear(20, 12, bias, dtype=torch.float64)
    with torch.no_grad():
        layer.weight *= planted_matrix(kind, 12, 20, 0) != 0
    cut, x = CutOperator(in_blocks(layer)), torch.randn(3, 4, 20, dtype=torch.float64)
    assert cut.is_cut
    assert_close(cut(x), layer(x).detach())
    assert_close(cut(x[0, 0]), layer(x[0, 0]).detach())  # without a batch


@NOTHING_READ
@given(
    hop=st.sampled_from([0.0, 1e-10, 2e-9, 1e-8]),
    sizes=st.lists(st.integers(5, 25), min_size=3, max_size=5),
    groups=st.integers(1, 5),
    shared=st.booleans(),
    dead=st.sampled_from([0.0, 0.3]),
    bias=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(max_examples=40)
def test_a_chain_whatever_its_layers_share(hop, sizes, groups, shared, dead, bias, seed):
    layers = chains.planted(sizes, groups, seed, dead, bias, shared=shared)
    activations = [nn.GELU()] * (len(layers) - 1)
    chain, x = BlockChain.from_dense(layers, activations), torch.randn(4, sizes[0], dtype=torch.float64)
    machine = Machine(hop, 1e9, 1e9)
    cut = CutOperator(chain, machine)
    assert_close(cut(x), chains.dense(layers, activations)(x).detach())
    for stage in cut.plan.stages:
        if len(stage.pieces) > 1:
            assert all(piece.seconds >= WORTH * hop for piece in stage.pieces)


def test_between_the_layers_of_a_chain_stands_one_table():
    layers = chains.planted((24, 36, 18), 3, shared=False)
    cut = CutOperator(BlockChain.from_dense(layers, [nn.ReLU()]))
    x = torch.randn(5, 24, dtype=torch.float64)
    assert_close(cut(x), chains.dense(layers, [nn.ReLU()])(x).detach())
    assert [len(pieces) for pieces in cut.rounds] == [3, 3]
    assert sorted(cut.module.reads_1.tolist()) == list(range(36))  # R = Q₂P₁⁻¹, a permutation of the hidden neurons
    assert not list(cut.module.parameters())


def test_layers_that_are_not_cut_are_one_service_with_their_neighbours():
    blocks = chains.planted((24, 24), 3) + chains.planted((24, 20, 16, 24), 1) + chains.planted((24, 24), 2)
    activations = [nn.ReLU(), nn.Tanh(), nn.GELU(), nn.SiLU()]
    cut = CutOperator(BlockChain.from_dense(blocks, activations))
    assert [stage.does for stage in cut.plan.stages] == [
        "3 parts of model.layers.0", "1 part of model.layers.1-3", "2 parts of model.layers.4",
    ]  # fmt: skip
    x = torch.randn(5, 24, dtype=torch.float64)
    assert_close(cut(x), chains.dense(blocks, activations)(x).detach())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", ["pair", "layers", "channels"])
@pytest.mark.parametrize("case", pairs.CASES)
def test_a_feed_forward_pair_in_every_form(case, form, bias, gated):
    first, activation, second, gate = pairs.dense_pair(case, gated=gated, bias=bias)
    pair = BlockFeedForward.from_dense(first, activation, second, gate, form=form)
    cut, x = CutOperator(pair), torch.randn(2, 5, pairs.INPUTS, dtype=torch.float64)
    assert_close(cut(x), pair(x).detach())
    blocks = [pair.n_blocks] if form == "pair" else [pair_blocks(pair.first), pair_blocks(pair.second)]
    assert [len(called) for called in cut.rounds] == ([max(n, 1) for n in blocks] if max(blocks) > 1 else [])


def test_channels_are_summed_where_their_blocks_meet():
    pair = BlockFeedForward.from_dense(*pairs.dense_pair("channels"), form="channels")
    cut = CutOperator(pair)
    assert cut.module.channels == 4
    assert [len(stage.pieces) for stage in cut.plan.stages] == [pair_blocks(pair.first), pair_blocks(pair.second)]


def pair_blocks(stacks):
    return sum(len(stack) for stack in stacks.weights if stack.numel())


@pytest.mark.parametrize("options", convolutions.SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["equal", "ragged", "dormant"])
def test_a_convolution(kind, options):
    conv = convolutions.masked(kind, dtype=torch.float64, **options)
    cut, x = CutOperator(BlockConv.from_dense(conv)), convolutions.signal(conv)
    assert cut.is_cut
    assert_close(cut(x), conv(x).detach())
    assert_close(cut(x[0]), conv(x[0]).detach())


@pytest.mark.parametrize("conv_type", [nn.Conv1d, nn.Conv3d])
def test_convolutions_of_other_dimensions_and_groups(conv_type):
    conv = convolutions.masked("ragged", conv_type, dtype=torch.float64, groups=2)
    cut, x = CutOperator(BlockConv.from_dense(conv)), convolutions.signal(conv)
    assert cut.is_cut
    assert_close(cut(x), conv(x).detach())
