"""Inputs that are unlike those that a model was fitted on are told, in whatever shape they come."""

import json

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.core.errors import CheckpointError
from crystallite.data.batch import Batch, batches
from crystallite.models.familiarity import Unfamiliar, describe, known_inputs, scoring, unfamiliar
from crystallite.models.record import Familiar
from crystallite.operators.low_rank import LowRankConv


@pytest.fixture(scope="module")
def fitted():
    """A network, its smaller form, and the matrix that mixes its inputs."""
    torch.manual_seed(0)
    mix = torch.randn(16, 16)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    return net, cx.compress(net, list((torch.randn(4000, 16) @ mix).split(100)), budget=0.5), mix


def of_kind(samples, mix, seed=1):
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed)) @ mix


def test_inputs_of_the_same_kind_are_familiar_and_others_are_not(fitted):
    _, small, mix = fitted
    assert unfamiliar(small, of_kind(1000, mix)).share < 0.05
    turned = mix @ torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)))[0]
    assert unfamiliar(small, of_kind(1000, turned)).share > 0.2  # as large, in other directions
    assert unfamiliar(small, of_kind(1000, 5 * mix)).share > 0.5


def test_validate_and_summary_say_it_once_for_each_sample(fitted):
    net, small, mix = fitted
    verdict = cx.validate(net, small, list(of_kind(300, 9 * mix).split(100)), max_relative_deviation=9.0)
    assert verdict.unfamiliar.samples == 300
    assert verdict.unfamiliar.share > 0.9
    assert str(verdict.unfamiliar) in repr(verdict)
    assert verdict.to_json()["unfamiliar"] == {"count": verdict.unfamiliar.count, "samples": 300}
    assert str(verdict.unfamiliar) == cx.summary(small, of_kind(300, 9 * mix)).notes[-1]
    assert not any("unlike" in note for note in cx.summary(small).notes)


def test_an_exact_model_knows_nothing_of_inputs():
    exact = cx.reorganize(nn.Linear(4, 2), level=None, only_if_faster=False)
    assert known_inputs(exact) == ()
    assert unfamiliar(exact, torch.zeros(3, 4)) is None
    assert (
        cx.validate(nn.Linear(4, 2), nn.Linear(4, 2), torch.zeros(3, 4), max_relative_deviation=9.0).unfamiliar is None
    )


def test_it_is_saved_and_loaded(fitted, tmp_path):
    _, small, _ = fitted
    cx.save(small, tmp_path / "small")
    assert known_inputs(cx.load(tmp_path / "small")) == known_inputs(small)
    assert all(len(one.mean) <= 32 for one in known_inputs(small))  # some hundred numbers for each layer


def test_padding_is_not_looked_at():
    class Texts(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.layer = nn.Embedding(50, 8), nn.Linear(8, 3)

        def forward(self, input_ids, attention_mask):
            return self.layer(self.table(input_ids))

    torch.manual_seed(0)
    net, tokens = Texts(), torch.randint(1, 50, (200, 12))
    mask = torch.ones_like(tokens)
    known = describe(net, ["layer"], list(batches({"input_ids": tokens, "attention_mask": mask}))[:1],
                     [Batch(0, 200, named={"input_ids": tokens, "attention_mask": mask})])  # fmt: skip
    scores = []
    with scoring(net, known, scores.append):
        net(input_ids=tokens[:5], attention_mask=mask[:5])
        padded = torch.cat([tokens[:5], torch.zeros(5, 90, dtype=torch.long)], 1)
        net(input_ids=padded, attention_mask=torch.cat([mask[:5], torch.zeros(5, 90, dtype=torch.long)], 1))
    assert torch.allclose(*scores, rtol=1e-4)


def test_convolutions_are_looked_at_channel_by_channel():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 16, 4))
    small = cx.compress(net, list(torch.randn(400, 3, 8, 8).split(50)), budget=0.6)
    assert unfamiliar(small, torch.randn(200, 3, 8, 8)).share < 0.1
    assert unfamiliar(small, torch.randn(200, 3, 8, 8) + 2).share > 0.9


def test_convolutions_of_low_rank_read_channels_too_at_any_size():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(24, 24, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    small = cx.compress(net, list(torch.randn(200, 24, 9, 9).split(50)), budget=0.4)
    assert isinstance(small[0], LowRankConv)
    assert [len(one.mean) for one in known_inputs(small)] == [24]
    assert unfamiliar(small, torch.randn(50, 24, 13, 30)).share < 0.2
    assert unfamiliar(small, torch.randn(50, 24, 13, 30) + 2).share > 0.9


@pytest.mark.parametrize("few", [4, 8])
def test_few_samples_held_out_do_not_make_others_unlike(few):
    """Long texts and images: many positions in each of few samples, which differ as a whole."""

    def images(samples, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(samples, 50, 8, generator=generator) + torch.randn(samples, 1, 8, generator=generator)

    net, seen, others = nn.Linear(8, 2), Unfamiliar(), Unfamiliar()
    for seed in range(60):
        known = describe(net, [""], [Batch(0, 40, (images(40, seed),))], [Batch(0, few, (images(few, 100 + seed),))])
        with scoring(net, known, seen.add):
            net(images(200, 200 + seed))
        with scoring(net, known, others.add):
            net(2 * images(200, 200 + seed))
    assert seen.share < 0.05
    assert others.share > 0.9


def test_what_is_no_covariance_is_refused_by_name():
    with (
        pytest.raises(CheckpointError, match="layer 0"),
        scoring(nn.Linear(1, 1), [Familiar("layer 0", (0.0, 0.0), (1.0, 5.0, 1.0), 1.0)], print),
    ):
        pass
    with pytest.raises(ValueError, match="expected 3 numbers, got 1"):
        Familiar("0", (0.0, 0.0), (1.0,), 1.0)
    with pytest.raises(ValueError, match="finite"):
        Familiar("0", (float("nan"),), (1.0,), 1.0)


def test_a_service_counts_them(fitted, tmp_path):
    pytest.importorskip("prometheus_client")
    _net, small, mix = fitted
    cx.save(small, tmp_path / "small")
    with cx.Service.load(tmp_path / "small", unvalidated=True) as service:
        service.infer(of_kind(40, mix))
        service.infer(of_kind(60, 9 * mix))
        text = service.metrics.text({})
    lines = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}
    layer = known_inputs(small)[0].layer
    labels = f'{{layer="{layer}",model="small"}}'
    assert lines[f"crystallite_inputs_total{labels}"] == 100
    assert 55 <= lines[f"crystallite_unfamiliar_inputs_total{labels}"] <= 65


def test_shares_and_counts():
    seen = Unfamiliar()
    assert seen.share == 0
    seen.add(torch.tensor([0.5, 1.5]))
    assert json.loads(json.dumps(vars(seen))) == {"count": 1, "samples": 2}
    assert "50%" in str(seen)
