"""`validate` with perplexity: against transformers' own loss, by rules that suit it, one window at a time."""

import copy
import math

import pytest
import torch

import crystallite as cx
from tests.helpers.text_models import language_model, prose, word_tokenizer


@pytest.fixture
def model(tmp_path):
    return language_model(tmp_path / "model")


def worse(model, by):
    """With logits that are off by numbers by chance."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        other.lm_head.weight += by * torch.randn_like(other.lm_head.weight)
    return other


def test_the_verdict_has_both_perplexities_and_their_ratio(model):
    data = cx.texts([prose(640)], word_tokenizer(), length=16)
    verdict = cx.validate(model, worse(model, 0.02), data, "perplexity", max_drop=0.5)
    ids = torch.cat([batch["input_ids"] for batch in data])
    with torch.no_grad():
        expected = math.exp(model(input_ids=ids, labels=ids).loss.item())
    assert verdict.metric.original == pytest.approx(expected, rel=1e-4)
    assert verdict.metric.drop == pytest.approx(verdict.metric.reorganized / verdict.metric.original - 1)
    assert verdict.samples == 40
    assert verdict.passed
    assert {o.rule for o in verdict.outcomes} == {"max_drop"}
    assert [latency.batch for latency in verdict.latency] == [1]


def test_a_ratio_beyond_the_limit_fails_also_in_a_slice(model):
    data = cx.texts([prose(640)], word_tokenizer(), length=16)
    other = worse(model, 0.3)
    verdict = cx.validate(model, other, data, "perplexity", slices=["a", "b"] * 20)
    assert not verdict.passed
    assert {o.status for o in verdict.outcomes if o.rule == "max_drop"} == {"violated"}
    assert len(verdict.slices) == 2
    assert all(part.reorganized > part.original > 1 for part in verdict.slices)


def test_few_windows_prove_little(model):
    data = cx.texts([prose(32)], word_tokenizer(), length=16)
    other = worse(model, 0.05)
    observed = cx.validate(model, other, data, "perplexity", max_drop=9.0).metric.drop
    (found,) = cx.validate(model, other, data, "perplexity", max_drop=max(observed, 0) + 1e-4).outcomes
    assert found.status == "unproven"
    assert found.observed == pytest.approx(observed)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    model = language_model(tmp_path / "model", "BertForMaskedLM")
    data = cx.texts([prose(64)], word_tokenizer(), length=16)
    with pytest.raises(cx.InvalidOption, match="BertForMaskedLM looks ahead"):
        cx.validate(model, model, data, "perplexity")


def test_a_model_that_is_no_language_model_is_refused_as_such(tmp_path):
    said = "perplexity: expected a causal language model, or logits .* with labels; the "
    pictures = torch.nn.Linear(4, 3)
    with pytest.raises(cx.InvalidOption, match=f"{said}Linear reads no tokens"):
        cx.validate(pictures, pictures, torch.randn(8, 4), "perplexity")
    classifier = language_model(tmp_path / "model", "BertForSequenceClassification")
    data = cx.texts([prose(64)], word_tokenizer(), length=16)
    with pytest.raises(cx.InvalidOption, match=rf"{said}BertForSequenceClassification returns \[1, 2\]"):
        cx.validate(classifier, classifier, data, "perplexity")
    with pytest.raises(cx.InvalidOption, match=f"{said[:-6]}, got a batch without either"):
        cx.sweep(pictures, torch.randn(8, 4), [0.1], metric="perplexity")


def test_the_deviation_is_a_number_auto_or_none(model):
    data = cx.texts([prose(64)], word_tokenizer(), length=16)
    with pytest.raises(cx.InvalidOption, match="max_relative_deviation must be one of auto or a number"):
        cx.validate(model, model, data, max_relative_deviation="none")
