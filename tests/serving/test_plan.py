"""Plans: what is a service of its own, and that a cut model computes what the model does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.serving import Machine, plan
from crystallite.serving.plan import WORTH, arrange
from tests.helpers.artifacts import APART, TOGETHER, network, small
from tests.helpers.block_models import block_linear
from tests.helpers.tolerance import assert_close


def test_light_parts_stay_together(folder):
    found = plan(folder, machine=TOGETHER)
    assert [piece.name for piece in found.pieces] == ["model"]


def test_heavy_parts_are_services_of_their_own(folder):
    found = plan(folder, machine=APART)
    assert [len(stage.pieces) for stage in found.stages] == [0, 4, 0]  # Flatten and Softmax stay in the transform tier
    assert [piece.macs for piece in found.pieces] == [3 * 6 + 6 * 6 + 6 * 2] * 4
    assert all(piece.seconds >= WORTH * APART.hop for piece in found.pieces)
    assert "4 blocks" not in repr(found)
    assert repr(found).count("(transform tier)") == 2


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # parts that read no input, in ChainLayer.part
@given(hop=st.floats(1e-10, 1e-6), groups=st.integers(1, 6), dead=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_however_it_is_cut_it_computes_the_same(hop, groups, dead, seed):
    model = network((13, 25, 22, 9), groups, torch.float64, seed, dead)
    machine = Machine(hop, 1e9, 1e9)
    found, cut = arrange(small(model), 1, machine)
    x = torch.randn(5, 13, dtype=torch.float64)
    assert_close(cut(x), model(x).detach())
    assert found.pieces
    if len(found.pieces) > 1:
        assert all(piece.seconds >= WORTH * hop for piece in found.pieces)
    assert {piece.name for piece in found.pieces} == set(cut.modules)


def test_light_parts_are_fused_until_they_are_worth_a_service():
    model = small(network((64, 64, 64), 16, head=False))
    one = min(piece.seconds for piece in arrange(model, 1, APART)[0].pieces)
    machine = Machine(one * 3.9 / WORTH, APART.macs_per_second, APART.bytes_per_second)
    found, cut = arrange(model, 1, machine)
    assert len(found.pieces) == 4
    x = torch.randn(20, 64)
    with torch.no_grad():
        assert_close(cut(x), model(x))


def test_where_a_model_does_not_separate_its_layers_may():
    torch.manual_seed(0)
    model = nn.Sequential(block_linear(16, 16, 4, 1), nn.LayerNorm(16), nn.ReLU(), block_linear(16, 16, 2, 2)).eval()
    found, cut = arrange(small(model), 1, APART)
    assert [[piece.name for piece in stage.pieces] for stage in found.stages] == [
        ["0.0", "0.1", "0.2", "0.3"],
        ["1-2"],
        ["3.0", "3.1"],
    ]
    x = torch.randn(3, 16)
    assert_close(cut(x), model(x).detach())


def test_a_module_in_two_places_is_run_twice():
    torch.manual_seed(0)
    double = nn.LayerNorm(16)
    model = nn.Sequential(block_linear(16, 16, 4, 1), double, block_linear(16, 16, 2, 2), double).eval()
    x = torch.randn(3, 16)
    assert_close(arrange(small(model), 1, APART)[1](x), model(x).detach())


def test_larger_batches_are_worth_more_services():
    model = small(network((64, 64, 64), 4))
    machine = Machine(hop=2e-7, macs_per_second=1e9, bytes_per_second=1e12)
    assert [len(arrange(model, batch, machine)[0].pieces) for batch in (1, 64)] == [1, 4]


def test_a_batch_holds_samples(folder):
    with pytest.raises(cx.InvalidOption, match="batch"):
        plan(folder, batch=0)


def test_replicas_are_in_proportion_to_load():
    torch.manual_seed(0)
    model = nn.Sequential(block_linear(64, 64, 2, 1), nn.LayerNorm(64), block_linear(64, 256, 2, 2)).eval()
    for workers in (1, 2, 8, 40):
        pieces = arrange(small(model), 1, APART, workers)[0].pieces
        total = sum(piece.seconds for piece in pieces)
        for piece in pieces:
            share = workers * piece.seconds / total
            assert max(1, share - 1e-6) <= piece.most < share + 1
            assert piece.least == min(2, piece.most)  # one may die where there is enough to do for two
        assert workers <= sum(piece.most for piece in pieces) < workers + len(pieces)
    assert {piece.most for piece in arrange(small(model), 1, APART, 1)[0].pieces} == {1}


def test_replicas_are_shown(folder):
    assert "for 40 workers" in repr(plan(folder, machine=APART, workers=40))
    assert "  2–10  " in repr(plan(folder, machine=APART, workers=40))
    assert plan(folder, machine=APART, workers=40).to_json()["stages"][1]["pieces"][0]["most"] == 10


def test_a_tier_has_workers(folder):
    with pytest.raises(cx.InvalidOption, match="workers"):
        plan(folder, workers=0)
