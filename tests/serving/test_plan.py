"""Plans: what is a service of its own, and that a cut model computes what the model does."""

import pytest
import torch
from benchmarks.serving_forms import FORMS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.data.batch import Batch
from crystallite.operators.experts import Expert, Experts
from crystallite.serving import Machine, plan
from crystallite.serving.example import Example
from crystallite.serving.plan import WORTH, arrange, planned
from crystallite.serving.signature import TensorSpec
from crystallite.serving.work import count_work
from crystallite.validation.cost import count_macs
from tests.helpers.artifacts import APART, TOGETHER, network, small
from tests.helpers.block_models import block_convolution, block_linear, block_recurrent
from tests.helpers.tolerance import assert_close


def test_light_parts_stay_together(folder):
    found = plan(folder, machine=TOGETHER)
    assert [piece.name for piece in found.pieces] == ["model"]


def test_heavy_parts_are_services_of_their_own(folder):
    found = plan(folder, machine=APART)
    assert [len(stage.pieces) for stage in found.stages] == [0, 4, 0]  # Flatten and Softmax stay in the transform tier
    assert [piece.macs for piece in found.pieces] == [3 * 6 + 6 * 6 + 6 * 2] * 4
    assert all(piece.seconds >= WORTH * APART.hop for piece in found.pieces)
    assert "block 2 of 1" in repr(found)
    assert repr(found).count("(transform tier)") == 2


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # parts that read no input, in ChainLayer.part
@given(hop=st.floats(1e-10, 1e-6), groups=st.integers(1, 6), dead=st.sampled_from([0.0, 0.3]), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_however_it_is_cut_it_computes_the_same(hop, groups, dead, seed):
    model = network((13, 25, 22, 9), groups, torch.float64, seed, dead)
    machine = Machine(hop, 1e9, 1e9)
    found, cut = arrange(small(model), 1, machine)
    x = torch.randn(5, 13, dtype=torch.float64)
    assert_close(cut({"input": x})["output"], model(x).detach())
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
        assert_close(cut({"input": x})["output"], model(x))


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
    assert_close(cut({"input": x})["output"], model(x).detach())


def test_a_module_in_two_places_is_run_twice():
    torch.manual_seed(0)
    double = nn.LayerNorm(16)
    model = nn.Sequential(block_linear(16, 16, 4, 1), double, block_linear(16, 16, 2, 2), double).eval()
    x = torch.randn(3, 16)
    assert_close(arrange(small(model), 1, APART)[1]({"input": x})["output"], model(x).detach())


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


TOKENS = Example((TensorSpec("tokens", torch.int64, (7,), below=50),))
FUSED = """\
service                     multiply-adds  bytes  ms at batch 3  hops  replicas                                   holds
encoder.layers.0.linear1.0            448    320        0.00134  11.2         1  blocks 0–1 of encoder.layers.0.linear1
encoder.layers.0.linear1.1            448    320        0.00134  11.2         1  blocks 2–3 of encoder.layers.0.linear1
encoder.layers.0.linear2.0            448    288        0.00134  11.2         1  blocks 0–1 of encoder.layers.0.linear2
encoder.layers.0.linear2.1            448    288        0.00134  11.2         1  blocks 2–3 of encoder.layers.0.linear2
(transform tier)                                                                                    all else of Encoder

multiply-adds are of one sample, tokens [7]; times are what they take at least
a hop costs 0 µs; a piece is a service of its own from 10 hops on
replicas, which an engine of several processes starts, for 2 workers"""


@pytest.fixture(scope="module")
def encoder():
    """A transformer with feed-forward layers of four blocks each, and what a sample brings."""
    model = small(FORMS["encoder"].build())
    work = count_work(model, [TOKENS])
    assert work.vectors == {"encoder.layers.0.linear1": 7, "encoder.layers.0.linear2": 7}  # positions of a sample
    return model, work


def test_the_plan_of_a_transformer(encoder):
    model, work = encoder
    machine = Machine(1.2e-7, 1e9, 1e9)  # a block computes 32 · 7 · 3 multiply-adds, for 5.6 hops
    assert repr(planned(model, 3, machine, 2, work=work)) == FUSED


def test_what_is_not_cut_is_named_with_the_reason(encoder):
    model, work = encoder
    found = planned(model, 1, Machine(2.2e-8, 1e9, 1e9), work=work)  # a block computes for 10.2 hops
    assert [len(stage.pieces) for stage in found.stages] == [4, 4, 0]
    assert found.fused == ()
    found = planned(model, 1, Machine(1e-6, 1e9, 1e9), work=work)
    assert [piece.name for piece in found.pieces] == ["model"]
    why = "its blocks compute for 0.9 hops in all, two services for at least 20"
    assert found.fused == (("encoder.layers.0.linear1", why), ("encoder.layers.0.linear2", why))
    assert why in repr(found)
    assert found.to_json()["fused"][0] == ("encoder.layers.0.linear1", why)


def test_one_heavy_block_is_no_reason_to_cut():
    layer = nn.Linear(41, 41, bias=False)
    with torch.no_grad():
        layer.weight[:40, 40] = layer.weight[40, :40] = 0
    found = planned(small(layer), 1, Machine(1e-9, 1e9, 1e12))
    assert found.fused == (("model", "all its blocks but the heaviest compute for less than 10 hops"),)


def test_vectors_that_reach_operators():
    torch.manual_seed(0)
    conv = small(nn.Sequential(block_convolution(nn.Conv2d, 8, 8, 4, 1, stride=2)))
    image = Example((TensorSpec("input", torch.float32, (8, 9, 7)),), positional=("input",))
    assert count_work(conv, [image]).vectors == {"0": 4 * 3}
    gru = small(block_recurrent(nn.GRU, 6, 99, 3, batch_first=True))
    sequence = Example((TensorSpec("input", torch.float32, (5, 6)),), positional=("input",))
    assert count_work(gru, [sequence]).vectors == {"": 5}
    assert count_work(gru, [image]).vectors == {}  # which it does not take
    experts = Experts([Expert(None, nn.Linear(4, 8), nn.Linear(8, 4), nn.ReLU()) for _ in range(3)])
    routed = nn.Module()
    routed.experts = experts
    routed.forward = lambda x: experts(x[0], torch.zeros(len(x[0]), 2, dtype=torch.long), torch.ones(len(x[0]), 2))
    tokens = Example((TensorSpec("input", torch.float32, (12, 4)),), positional=("input",))
    assert count_work(routed, [tokens]).vectors == {"experts": 8}  # 24 choices of 3 experts


def test_what_is_not_cut_costs_what_a_verdict_says(tmp_path):
    torch.manual_seed(0)
    blocks = block_convolution(nn.Conv2d, 8, 8, 4, 1, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), blocks, nn.ConvTranspose2d(8, 2, 2, stride=2)).eval()
    images = torch.randn(4, 3, 6, 5)
    cx.save(small(model), tmp_path / "small", source=model)
    verdict = cx.validate(model, tmp_path / "small", images)  # which records the call
    found = plan(tmp_path / "small", into=model, machine=Machine(1e-4, 1e9, 1e12))
    (piece,) = found.pieces
    assert piece.macs == verdict.macs_per_sample[1] == 6 * 5 * (8 * 3 * 9 + 8 * 2 * 9 + 8 * 2 * 4)
    assert piece.seconds == piece.macs / 1e9
    assert found.sample == "input [3, 6, 5]"
    assert "multiply-adds are of one sample, input [3, 6, 5];" in repr(found)


def test_a_table_of_tokens_multiplies_nothing_and_tokens_count(encoder):
    model, work = encoder
    (piece,) = planned(model, 3, Machine(1.0, 1e9, 1e12), work=work).pieces
    assert piece.macs == count_macs(model, Batch(0, 1, (torch.zeros(1, 7, dtype=torch.int64),)))
    assert piece.seconds == 3 * piece.macs / 1e9


def test_between_cut_operators_only_what_lies_there_counts():
    torch.manual_seed(0)
    model = nn.Sequential(block_linear(16, 16, 4, 1), nn.Linear(16, 16), nn.ReLU(), block_linear(16, 16, 2, 2))
    model = small(model.eval())
    tokens = Example((TensorSpec("input", torch.float32, (5, 16)),), positional=("input",))
    pieces = planned(model, 1, APART, work=count_work(model, [tokens])).pieces
    assert [piece.macs for piece in pieces] == [5 * 16] * 4 + [5 * 256] + [5 * 64] * 2


def test_without_a_sample_the_plan_says_so():
    found = planned(small(nn.Conv2d(3, 8, 3)), 1, Machine(1.0, 1e9, 1e12))
    assert "multiply-adds are each weight counted once, as no sample is known" in repr(found)


def test_operators_inside_operators_belong_to_them():
    inner = small(block_linear(16, 16, 4, 1))
    experts = Experts([Expert(None, inner, nn.Linear(16, 16), nn.ReLU()) for _ in range(2)])
    assert [piece.name for piece in planned(experts.eval(), 1, APART).pieces] == ["model.0", "model.1"]
