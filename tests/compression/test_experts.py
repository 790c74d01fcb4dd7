"""Experts are compressed one by one, on the tokens that reach them, and counted by how many do."""

import copy
import json
import subprocess
import sys
from functools import cache

import pytest
import torch

import crystallite as cx
from crystallite.compression.experts import Reach, routing, run_alike
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import tensors
from crystallite.models.experts import collapse_experts, expand_experts, units_and_experts
from crystallite.operators.experts import Expert
from crystallite.statistics.layer_io import row_counts
from tests.helpers.experts import NAMES, count_macs, list_model, mixture, stacks, tokens, transformers

MINUTES = 600  # a limit for a busy machine, no measurement
FRESH = """
import json, sys, torch, transformers
import crystallite
found = {}
for folder, name in json.loads(sys.argv[1]).items():
    model = getattr(transformers, name).from_pretrained(folder).eval()
    ids = torch.tensor(json.loads(sys.argv[2]))
    settings = {"max_new_tokens": 8, "do_sample": False}
    found[folder] = [model.generate(ids, use_cache=c, **settings).tolist() for c in (True, False)]
print(json.dumps(found))
"""
ARCHITECTURES = ["Mixtral", "GptOss", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:4] + NAMES[5:])]


def data(count=8, length=32, seed=1):
    return [{"input_ids": tokens(16, length, seed + i)} for i in range(count)]


@cache
def halved(name):
    model = mixture(name)
    return model, cx.compress(model, data(), budget=0.5)


def error(found, expected):
    return float((found - expected).square().sum() / (expected - expected.mean((0, 1))).square().sum())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_half_of_the_multiply_adds_of_the_whole_model(name):
    model, small = halved(name)
    ids = tokens(32, seed=99)
    before, after = count_macs(model, ids), count_macs(small, ids)
    assert 0.49 <= after / before <= 0.51
    said = cx.summary(small).macs
    assert cx.summary(small).counted == "for one sample (input_ids [32])"
    assert said[0] == pytest.approx(32 * before / ids.numel(), rel=0.01)  # a token meets two of four experts
    assert said[1] == pytest.approx(32 * after / ids.numel(), rel=0.03)  # its own router may choose a little otherwise
    with torch.no_grad():
        measured = error(*(some(ids).logits.softmax(-1).sqrt() for some in (small, model)))  # logits decide by softmax
    assert cx.record(small).options.held_out_error == pytest.approx(measured, rel=0.15)
    assert measured < 0.8  # of random weights, in which there is little to find


@pytest.mark.parametrize("names", [["Mixtral", "GptOss"], pytest.param(NAMES, marks=pytest.mark.slow)])
def test_generated_with_cache_without_and_in_a_fresh_process(names, tmp_path):
    ids, expected, folders = tokens(2, 7), {}, {}
    for name in names:
        model, small = halved(name)
        assert any(isinstance(m, Expert) for m in small.modules())
        folder = str(cx.save(small, tmp_path / name, source=model))
        made = [small.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c).tolist() for c in (True, False)]
        assert made[0] == made[1]
        expected[folder], folders[folder] = made, type(model).__name__
    words = [sys.executable, "-c", FRESH, json.dumps(folders), json.dumps(ids.tolist())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=MINUTES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == expected


@torch.no_grad()
def with_idle_neurons(model, left):
    """Experts of which only some hidden neurons are read, others in each."""
    rng = torch.Generator().manual_seed(0)
    expanded, alive = expand_experts(model), {}
    for name, module in expanded.named_modules():
        if isinstance(module, Expert):
            order = torch.randperm(module.down.in_features, generator=rng)
            module.down.weight[:, order[left:]] = 0
            alive[name] = set(order[:left].tolist())
    return collapse_experts(expanded), alive


def test_neurons_that_nobody_reads_go_expert_by_expert():
    model, alive = with_idle_neurons(mixture("Mixtral"), 40)
    small = cx.compress(model, data(), budget=0.48)  # without idle neurons .478 is left
    for name in alive:
        expert = small.get_submodule(name)
        assert expert.up.out_features == expert.gate.out_features == expert.down.in_features < 128
        assert expert.up.out_features >= 40
    assert cx.record(small).options.held_out_error < 1e-4
    ids = tokens(8, seed=5)
    with torch.no_grad():
        assert error(small(ids).logits, model(ids).logits) < 1e-4


def test_an_expert_that_too_few_tokens_reach_stays_as_it_is():
    model = mixture("GptOss")
    with torch.no_grad():
        model.model.layers[0].mlp.router.bias[3] = -1e3  # never
        model.model.layers[1].mlp.router.bias[2] -= 6  # seldom
    original = expand_experts(copy.deepcopy(model))
    small = cx.compress(model, data(), budget=0.7)
    rows = {c.name: c for c in cx.record(small).changes}
    kept = {n.rpartition(".")[0] for n, c in rows.items() if "too few positions" in c.became}
    assert kept == {"model.layers.0.mlp.experts.3", "model.layers.1.mlp.experts.2"}
    for name in kept:
        before, after = (m.get_submodule(name).state_dict() for m in (original, small))
        assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert rows["model.layers.0.mlp.experts.3.up"].macs_before == 0  # nobody pays for it
    text = repr(cx.summary(small))
    assert (
        "too few positions reach this expert: 0, where 96 inputs need 192"
        in rows["model.layers.0.mlp.experts.3.up"].became
    )
    assert "6 layers of experts left dense, as too few positions reach them" in text


def test_padding_reaches_no_expert():
    model, mask = mixture("Mixtral"), (torch.arange(32) < 20).long().repeat(16, 1)
    models = []
    for filled in (0, 7):
        batches = [{"input_ids": b["input_ids"] * mask + filled * (1 - mask), "attention_mask": mask} for b in data(6)]
        models.append(cx.compress(model, batches, budget=0.6))
    first, second = (m.state_dict() for m in models)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    errors = [cx.record(m).options.held_out_error for m in models]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    total = sum(c.macs_before for c in cx.record(models[0]).changes if ".experts." in c.name)
    assert total == pytest.approx(32 * 2 * 2 * 3 * 64 * 128, rel=1e-3)  # tokens · layers · experts of each · matrices


def test_another_model_is_shown_what_the_dense_one_was():
    dense = expand_experts(mixture("Mixtral"))
    other = copy.deepcopy(dense)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
    batch = Batch(0, 4, (), {"input_ids": tokens(4)})
    names = [name for name, m in dense.named_modules() if isinstance(m, torch.nn.Linear) and ".experts." in name]
    expected, alone = (row_counts(m, names, batch) for m in (dense, other))
    assert alone != expected
    routes = {}
    with routing(dense, batch, routes, replay=False):
        batch.run(dense)
    with routing(other, batch, routes, replay=True):
        assert row_counts(other, names, batch) == expected
    assert row_counts(other, names, batch) == alone
    before, after = map(tensors, run_alike(dense, other, batch))
    torch.testing.assert_close(after["output.logits"], before["output.logits"])


def test_half_precision():
    model = mixture("Olmoe").bfloat16()
    small = cx.compress(model, data(4), budget=0.8)
    ids = tokens(16, seed=9)
    assert count_macs(small, ids) < 0.82 * count_macs(model, ids)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}


def test_nothing_is_cut_where_nothing_must_be():
    model = mixture("Qwen3Moe")
    same = cx.compress(model, data(4), budget=1.0)
    assert set(stacks(same)) == set(stacks(model))
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]


def test_one_expert_can_be_named():
    model = mixture("Mixtral")
    small = cx.compress(model, data(4), budget=0.97, targets="*.0.mlp.experts.1.*")
    sizes = [e.up.weight.shape[0] for e in small.model.layers[0].mlp.experts.experts]
    assert [size == 128 for size in sizes] == [True, False, True, True]
    assert set(stacks(small)) == {"model.layers.1.mlp.experts"}
    with pytest.raises(cx.InvalidOption, match="hold 9% of the model's multiply-adds"):
        cx.compress(model, data(4), budget=0.5, targets="*.0.mlp.experts.1.*")


# experts in a list


def list_macs(model, x):
    return sum(rows * model.get_submodule(n).weight.numel() for n, rows in row_counts(model, linear(model), x).items())


def linear(model):
    return [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]


def test_experts_in_a_list_are_found_counted_and_cut():
    model, x = list_model(), torch.randn(3000, 16, generator=torch.Generator().manual_seed(0))
    small = cx.compress(model, x, budget=0.5)
    fresh = Batch(0, 800, (torch.randn(800, 16, generator=torch.Generator().manual_seed(1)),))
    before, after = list_macs(model, fresh), list_macs(small, fresh)
    assert 0.49 <= after / before <= 0.51
    assert cx.summary(small).macs[0] == pytest.approx(before / 800, rel=0.02)
    assert all(member.first.out_features < 64 for m in small[1:3] for member in m.members)  # neurons, not ranks alone
    with torch.no_grad():
        expected, found = model(fresh.positional[0]), small(fresh.positional[0])
    measured = float((found - expected).square().sum() / (expected - expected.mean(0)).square().sum())
    assert cx.record(small).options.held_out_error == pytest.approx(measured, rel=0.25)
    assert measured < 0.3
    assert "taken out outside experts: torch.export cannot follow" in repr(cx.summary(small))


def test_an_expert_in_a_list_that_hardly_runs_is_left_alone():
    model = list_model()
    with torch.no_grad():
        model[1].router.bias[3] = -12
    small = cx.compress(model, torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)), budget=0.6)
    left = {c.name for c in cx.record(small).changes if "too few positions" in c.became}
    assert left == {"1.members.3.first", "1.members.3.second"}
    assert small[1].members[3].first.out_features == 64


def test_layers_in_lists_that_all_reach_are_no_experts():
    model = bert()
    batch = Batch(0, 8, (), {"input_ids": tokens(8, 10)})
    units = {u.name: u for u in units_and_experts(model, ["*"], []) if not u.reason}
    found = Reach.of(model, units, Calibration((batch,), (batch,)), batch)
    assert not found.loose
    assert not found.reasons
    assert not found.reasons


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return transformers.BertModel(config).eval()
