"""What is said about a reorganized model."""

import pytest
import torch
from torch import nn

import crystallite as cx
from tests.helpers.block_models import block_linear


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("a_name_that_is_long_enough_to_leave_no_room_for_anything_else", block_linear(48, 48, 4, 1))
    model.add_module("norm", nn.LayerNorm(48))
    model.add_module("head", nn.Linear(48, 5))
    model.add_module("other", Scaled(5, 5))
    return cx.reorganize(model, level=None, only_if_faster=False)


def test_totals(small):
    found = cx.summary(small)
    assert found.macs == (48 * 48 + 48 * 5 + 25, 48 * 12 + 48 * 5 + 25)
    before, after = found.parameters
    assert before - after == 48 * 36
    assert [c.kind for c in found.changes] == ["Linear", "Linear", "Scaled"]
    assert [c.blocks for c in found.changes] == [4, 1, 1]


def test_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Embedding(50, 16), block_linear(16, 16, 4, 1), nn.Linear(16, 50, bias=False))
    model[2].weight = model[0].weight
    found = cx.summary(cx.reorganize(model, level=None, only_if_faster=False))
    assert found.parameters[0] == sum(p.numel() for p in model.parameters())
    assert [c.parameters_after for c in found.changes] == [50 * 16, 16 * 4 + 16, 0]
    assert [c.macs_after for c in found.changes] == [0, 16 * 4, 50 * 16]  # what is computed is computed


def test_what_is_left_alone_is_kept_whatever_it_holds():
    table = nn.Embedding(50, 16, padding_idx=0)  # a row of zeros
    small = cx.reorganize(nn.Sequential(table, block_linear(16, 16, 4, 1)), level=None, only_if_faster=False)
    assert [c.kept_share for c in cx.summary(small).changes] == [1.0, 0.25]
    assert "left alone: Embedding is a look-up table" in cx.summary(small).changes[0].became


@pytest.mark.parametrize("options", [{"budget": 0.5}, {"blocks": 2}])
def test_multiply_adds_are_those_of_one_sample_and_both_say_of_which(options):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv1d(8, 8, 3), nn.Flatten(), nn.Linear(48, 4)).eval(), torch.randn(300, 8, 8)
    if "blocks" in options:  # which convolutions are left alone by
        model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(300, 5, 8)
    small = cx.compress(model, x, **options)
    found, verdict = cx.summary(small), cx.validate(model, small, x, max_relative_deviation=None, min_agreement=0.0)
    assert found.macs == verdict.macs_per_sample
    assert verdict.sample == f"shape {list(x.shape[1:])}"
    assert f"these layers, for one sample ({verdict.sample}): multiply-adds {found.macs[0]:,} →" in repr(found)
    assert f"multiply-adds for one sample ({verdict.sample}) {found.macs[0]:,} →" in repr(verdict)


def test_table(small):
    text = repr(cx.summary(small))
    assert all(change.name in text for change in cx.summary(small).changes)  # no terminal: in full
    assert "2,304 → 576" in text
    assert "4 blocks" in text
    assert "dense, annealed: one block" in text
    assert "left alone: Scaled" in text
    assert "these layers, each weight used once: multiply-adds 2,569 → 841 (33%)" in text
    narrow = cx.summary(small).table(70)
    assert max(map(len, narrow.splitlines())) <= 70


def test_other_forms(small):
    found = cx.summary(small)
    assert found.to_json()["macs"] == list(found.macs)
    assert found.to_pandas()["became"].tolist()[0] == "4 blocks"
    with pytest.raises(cx.InvalidOption, match="not made by reorganize"):
        cx.summary(nn.Linear(2, 2))
