"""Training inside the structure: never worse, only what is fitted, and killed runs go on to the same result."""

import copy
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.compression import polish
from crystallite.compression.compress import compress
from crystallite.compression.decoders import polish as decoder_polish
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.polish import WholeOutputs, polish_
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.statistics.checkpoints import Checkpoints
from crystallite.statistics.output_error import output_error
from crystallite.statistics.trainer import Trainer
from tests.helpers import compressible as networks
from tests.helpers.compressible import relative_error, samples


@pytest.fixture(scope="module")
def pair():
    """A model, what was fitted to it, and the data."""
    model = networks.mlp(16, 64, 64, 4).eval()
    return model, compress(model, budget=0.4, calibration=samples(16)), Calibration.read(samples(16))


def same(first, second):
    return all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def trained():
    return networks.trained_digits()


@pytest.mark.parametrize("options", [{"budget": 0.25}, {"blocks": 4}, {"blocks": 2, "joint": True}])
def test_fresh_data_are_matched_better_and_the_structure_stays(trained, options):
    model, calibration, fresh, _ = trained
    plain, polished = (compress(model, calibration=calibration, polish_steps=n, **options) for n in (0, 200))
    assert repr(polished) == repr(plain)
    assert cx.summary(polished).macs == cx.summary(plain).macs
    assert relative_error(polished(fresh), model(fresh)) < 0.98 * relative_error(plain(fresh), model(fresh))
    options = cx.record(polished).options
    assert options.held_out_error == options.polish.after < options.polish.before
    assert options.polish.before == pytest.approx(cx.record(plain).options.held_out_error)
    assert "polished for" in cx.summary(polished).notes[-1]


def test_the_best_state_is_kept_and_training_ends_early(pair, monkeypatch):
    """A rate that ruins everything leaves the model as it was."""
    model, small, data = pair
    monkeypatch.setattr(polish.WholeOutputs, "rate", 10.0)
    ruined = copy.deepcopy(small)
    done = polish_(ruined, WholeOutputs(ruined, model), ["0", "2", "4"], data, 200, 0)
    assert done.steps < 200
    assert done.after == done.before
    assert same(ruined, small)


def test_only_fitted_layers_and_vectors_are_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    model[1].bias.requires_grad_(False)
    small = compress(model, budget=0.35, calibration=samples(16), polish_steps=40, ignore="4")
    assert torch.equal(small[4].weight, model[4].weight)
    assert not torch.equal(small[4].bias, model[4].bias)
    assert not torch.equal(small[1].weight, model[1].weight)
    assert torch.equal(small[1].bias, model[1].bias)
    assert [p.requires_grad for p in small[1].parameters()] == [True, False]
    assert all(p.grad is None for p in small.parameters())


def test_a_frozen_model_is_refused(pair):
    model = copy.deepcopy(pair[0]).requires_grad_(False)
    with pytest.raises(cx.InvalidOption, match="all parameters are frozen"):
        compress(model, budget=0.5, calibration=samples(16), polish_steps=5)


def test_an_interrupted_run_ends_where_it_would_have(pair, tmp_path, monkeypatch):
    model, small, data = pair
    whole, broken, again = (copy.deepcopy(small) for _ in range(3))
    expected = polish_(whole, WholeOutputs(whole, model), ["0", "2", "4"], data, 40, 0)
    checkpoints = Checkpoints(tmp_path / "state", {"a": 1})
    real = Trainer.descend

    def interrupted(self, error):
        if self.step == 17:
            raise KeyboardInterrupt
        real(self, error)

    monkeypatch.setattr(Trainer, "descend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        polish_(broken, WholeOutputs(broken, model), ["0", "2", "4"], data, 40, 0, checkpoints)
    monkeypatch.undo()
    assert polish_(again, WholeOutputs(again, model), ["0", "2", "4"], data, 40, 0, checkpoints) == expected
    assert same(again, whole)
    once_more = copy.deepcopy(small)  # nothing is left to do
    assert polish_(once_more, WholeOutputs(once_more, model), ["0", "2", "4"], data, 40, 0, checkpoints) == expected
    assert same(once_more, whole)


SCRIPT = """
import sys, torch
from crystallite.compression import compress
from crystallite.statistics.trainer import Trainer
from tests.helpers import compressible as networks
from tests.helpers.compressible import samples
real = Trainer.descend
def step(self, error):
    real(self, error)
    if self.step == 13:
        print("there", flush=True)
        sys.stdin.read()
Trainer.descend = step
compress(networks.mlp(16, 64, 4).eval(), budget=0.5, calibration=samples(16), polish_steps=40, checkpoint=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_process_goes_on_from_its_checkpoint(tmp_path):
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "state")]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "there\n"
        os.kill(process.pid, signal.SIGKILL)
    (state,) = (tmp_path / "state").glob("*/step-*")
    assert state.name == "step-000000012"
    model, options = networks.mlp(16, 64, 4).eval(), {"budget": 0.5, "calibration": samples(16), "polish_steps": 40}
    resumed, whole = compress(model, **options, checkpoint=tmp_path / "state"), compress(model, **options)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))
    with pytest.raises(cx.InvalidOption, match="another run"):
        compress(networks.mlp(16, 64, 4, seed=1), **options, checkpoint=tmp_path / "state")


def test_options_that_say_nothing_are_refused(pair):
    model = pair[0]
    for options, message in (
        ({"polish_steps": -1}, "polish_steps: expected an integer of at least 0, got -1"),
        ({"polish_steps": 2.0}, "polish_steps: expected an integer"),
        ({"checkpoint": "state"}, "checkpoint= keeps the state of polishing"),
    ):
        with pytest.raises(cx.InvalidOption, match=message):
            compress(model, budget=0.5, calibration=samples(16), **options)


def test_training_reads_on_where_fitting_has_enough():
    sizes = [b.size for b in Calibration.read([torch.zeros(256, 4)] * 200).all]
    data = Calibration.read([torch.zeros(256, 4)] * 200, training=True)
    assert [b.size for b in data.all] == sizes
    assert sum(sizes) == 2**15
    assert sum(b.size for b in data.all + data.more) == 256 * 200
    assert sum(b.size for b in Calibration.read([torch.zeros(256, 4)] * 200, widest=3000).all) >= 16 * 3000


def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=160, initializer_range=0.2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens(count, seed):
    return torch.randint(1, 120, (count, 32), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", ["dense", "uniform"])
def test_decoders_are_polished_in_their_layers(form):
    model, fresh = llama(), tokens(8, 1)
    options = {"calibration": [{"input_ids": part} for part in tokens(48, 0).split(12)], "budget": 0.6, "form": form}
    plain = compress(model, **options)
    small = compress(model, **options, polish_steps=30, ignore="*.0.self_attn.*")
    assert [p.shape for p in small.parameters()] == [p.shape for p in plain.parameters()]
    assert torch.equal(small.lm_head.weight, model.lm_head.weight)
    assert torch.equal(small.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(small.model.layers[0].self_attn.q_proj.weight, model.model.layers[0].self_attn.q_proj.weight)
    assert not torch.equal(small.model.layers[1].self_attn.q_proj.weight, model.model.layers[1].self_attn.q_proj.weight)
    with torch.no_grad():
        errors = [
            float((one(fresh).logits.softmax(-1).sqrt() - model(fresh).logits.softmax(-1).sqrt()).square().sum())
            for one in (plain, small)
        ]
    assert errors[1] < 0.98 * errors[0]
    done = cx.record(small).options
    assert done.held_out_error == done.polish.after < done.polish.before


def test_a_decoder_compared_in_parts_is_as_far_as_in_one():
    model, batch = llama(), Batch(0, 3, named={"input_ids": tokens(3, 2)})
    small = copy.deepcopy(model)
    with torch.no_grad():
        small.model.layers[0].mlp.down_proj.weight *= 0.5
    stacks = [Stack(one, "model.layers") for one in (small, model)]
    compared = decoder_polish._NextTokens(*stacks)
    windows = list(batch.split(1))
    expected = [output_error(w.run(small), w.run(model), w) for w in windows]
    ours, theirs = (w.softmax(-1) for w in (small(tokens(3, 2)).logits, model(tokens(3, 2)).logits.detach()))
    (theirs * (theirs / ours).log()).sum(-1).mean().backward()
    wanted = small.model.layers[0].mlp.gate_proj.weight.grad.clone()
    small.zero_grad()
    for error in compared.errors(batch):
        error.backward()
    assert torch.allclose(small.model.layers[0].mlp.gate_proj.weight.grad, wanted, rtol=1e-3, atol=1e-7)
    assert compared.mean_error([batch]) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)
    assert compared.mean_error([batch]) == compared.mean_error(windows)
