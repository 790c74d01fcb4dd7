"""A transformer by its own interface: padded texts in, smaller layers out, stored and loaded like any other."""

import pytest
import torch

import crystallite as cx
from crystallite.compression.compress import compress

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, initializer_range=0.3,
    )  # fmt: skip
    return transformers.BertModel(config).eval()


def texts(count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        ids = torch.randint(1, 60, (20, 10), generator=rng)
        mask = (torch.arange(10) < torch.randint(4, 11, (20, 1), generator=rng)).long()
        batches.append({"input_ids": ids * mask, "attention_mask": mask})
    return batches


@pytest.fixture(scope="module")
def small(bert):
    return compress(bert, budget=0.6, calibration=texts(10))


def test_the_budget_is_met_with_ordinary_layers(small):
    before, after = cx.summary(small).macs
    assert after <= 0.6 * before
    hidden = [layer.intermediate.dense.out_features for layer in small.encoder.layer]
    assert hidden == [layer.output.dense.in_features for layer in small.encoder.layer]
    assert min(hidden) < 64


def test_fitting_beats_cutting_by_magnitude(bert, small):
    (fresh,) = texts(1, seed=7)
    mask = fresh["attention_mask"].bool()
    with torch.no_grad():
        expected, found = (m(**fresh).last_hidden_state[mask] for m in (bert, small))
        magnitude = transformers.BertModel(bert.config).eval()
        magnitude.load_state_dict(bert.state_dict())
        for unit in magnitude.modules():
            if isinstance(unit, torch.nn.Linear):
                weight = unit.weight
                weight[weight.abs() < weight.abs().flatten().kthvalue(int(0.4 * weight.numel())).values] = 0
        cut = magnitude(**fresh).last_hidden_state[mask]
    assert (found - expected).norm() < 0.7 * (cut - expected).norm()


def test_padding_is_not_fitted_on(bert):
    data = texts(8)
    noisy = [{**batch, "input_ids": torch.where(batch["attention_mask"] == 0, 5, batch["input_ids"])} for batch in data]
    first, second = (compress(bert, budget=1.0, calibration=batches).state_dict() for batches in (data, noisy))
    assert all(torch.allclose(first[name], second[name], atol=1e-4) for name in first)


def test_it_is_stored_and_loaded(small, tmp_path):
    small.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    (fresh,) = texts(1, seed=7)
    with torch.no_grad():
        assert torch.equal(again(**fresh).last_hidden_state, small(**fresh).last_hidden_state)
    assert cx.summary(again).macs == cx.summary(small).macs
