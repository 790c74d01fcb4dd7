"""Experts with planted blocks: as blocks they compute what the dense model computes, and come back bit for bit."""

import copy
import json
import subprocess
import sys

import pytest
import torch

import crystallite as cx
from crystallite.models.experts import collapse_experts, expand_experts
from crystallite.operators.experts import Expert
from crystallite.operators.linear import BlockLinear
from tests.helpers.experts import NAMES, list_model, mixture, stacks, tokens

MINUTES = 600  # a limit for a busy machine, no measurement
FRESH = """
import json, sys, torch, transformers
import crystallite as cx
found = {}
for folder, name in json.loads(sys.argv[1]).items():
    model = getattr(transformers, name).from_pretrained(folder).eval()
    ids = torch.tensor(json.loads(sys.argv[2]))
    made = [model.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c).tolist() for c in (True, False)]
    loaded = cx.load(folder).eval()
    state = {key: value.double().sum().item() for key, value in cx.restore(loaded).state_dict().items()}
    found[folder] = made, loaded.generate(ids, max_new_tokens=8, do_sample=False).tolist(), state
print(json.dumps(found))
"""


@torch.no_grad()
def plant_(model, seed=0):
    """Give every other expert two blocks, whose neurons lie anywhere; the model is changed in place and returned."""
    rng = torch.Generator().manual_seed(seed)
    expanded = expand_experts(model)
    planted = [m for m in expanded.modules() if isinstance(m, Expert)][::2]
    for expert in planted:
        outer, inner = (torch.randint(2, (n,), generator=rng) for n in expert.down.weight.shape)
        sides = {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}
        for role, layer in expert.layers().items():
            rows, columns = sides[role]
            layer.weight.mul_(rows[:, None] == columns)
    assert planted
    return collapse_experts(expanded)


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("name", NAMES)
def test_planted_blocks_in_stacks_are_exact_and_come_back(name):
    dense = mixture(name)
    model = plant_(copy.deepcopy(dense))
    ids = tokens(3)
    assert (logits(model, ids) - logits(dense, ids)).norm() > 0.1 * logits(dense, ids).norm()  # they do matter
    small = cx.reorganize(model, level=None, only_if_faster=False)
    blocks = [n for n, m in small.named_modules() if isinstance(m, BlockLinear) and ".experts." in n]
    assert len(blocks) >= 2 * 3 * len(stacks(model))
    torch.testing.assert_close(logits(small, ids), logits(model, ids), atol=1e-4, rtol=1e-4)
    broken = copy.deepcopy(small)
    with torch.no_grad():
        next(broken.get_submodule(blocks[0]).parameters()).mul_(2)
    assert (logits(broken, ids) - logits(model, ids)).norm() > 1e-2 * logits(model, ids).norm()
    back = cx.restore(small)
    assert list(back.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())
    macs = cx.summary(small).macs
    assert macs[1] < macs[0]


def test_stacks_in_which_nothing_was_found_stay_what_they_were():
    model = mixture("Mixtral")
    same = cx.reorganize(model, level=None)
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]
    changes = [c.name for c in cx.record(same).changes if ".experts." in c.name]
    assert len(changes) == 2 * 4 * 3  # every layer of every expert was looked at
    assert len([line for line in repr(cx.summary(same)).splitlines() if ".experts.0…3." in line]) == 2 * 3


def test_annealing_cuts_the_same_weights_in_stacks_as_in_layers():
    model = mixture("GptOss")
    annealed = cx.reorganize(model, level=0.2, rule="neyman", null="empirical")
    assert set(stacks(annealed)) == set(stacks(model))
    for name, module in stacks(model).items():
        expected = [cx.anneal(w[:, 0::2].T, null="empirical", level=0.2, rule="neyman") for w in module.gate_up_proj]
        found = stacks(annealed)[name].gate_up_proj
        for expert, single in enumerate(expected):
            assert torch.equal(found[expert, :, 0::2].T != 0, torch.as_tensor(single.mask))
            assert 0 < single.kept < module.gate_up_proj[expert].numel() / 2


@pytest.mark.parametrize("form", ["pair", "layers"])
def test_an_expert_as_one_operator(form):
    model = plant_(mixture("Qwen3Moe"))
    small = cx.reorganize(model, level=None, only_if_faster=False, feed_forward=form)
    kinds = {type(m).__name__ for m in small.model.layers[0].mlp.experts.children()}
    assert kinds == {"BlockFeedForward"}
    ids = tokens(3)
    torch.testing.assert_close(logits(small, ids), logits(model, ids), atol=1e-4, rtol=1e-4)
    back = cx.restore(small)
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in model.state_dict().items())


def test_experts_in_a_list():
    model = list_model()
    with torch.no_grad():
        for member in model[1].members:
            member.first.weight[::2, ::2] = member.first.weight[1::2, 1::2] = 0
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert all(isinstance(member.first, BlockLinear) for member in small[1].members)
    x = torch.randn(40, 16)
    torch.testing.assert_close(small(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("names", [["Mixtral", "GptOss"], pytest.param(NAMES, marks=pytest.mark.slow)])
def test_folders_open_in_a_fresh_process(names, tmp_path):
    ids, expected = tokens(2, 7), {}
    folders = {}
    for name in names:
        model = plant_(mixture(name))
        small = cx.reorganize(model, level=None, only_if_faster=False)
        folder = str(cx.save(small, tmp_path / name, source=model))
        folders[folder] = type(model).__name__
        made = [small.generate(ids, max_new_tokens=8, do_sample=False, use_cache=c).tolist() for c in (True, False)]
        assert made[0] == made[1]
        state = {key: value.double().sum().item() for key, value in model.state_dict().items()}
        expected[folder] = [made, made[0], state]
    words = [sys.executable, "-c", FRESH, json.dumps(folders), json.dumps(ids.tolist())]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=MINUTES)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == expected
