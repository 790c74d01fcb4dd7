"""Metrics against the same numbers computed the plain way."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.validation.metrics import Metric, RunningMetric, as_metric


def measured(metric, output, target, step=7):
    """The metric over batches, and its values."""
    running = RunningMetric(as_metric(metric))
    for i in range(0, len(target), step):
        part = target[i : i + step]
        running.add(Batch(i, len(part), target=part), output[i : i + step])
    return running.done()


def test_accuracy_of_samples_positions_and_pixels():
    scores, labels = torch.randn(30, 5), torch.randint(5, (30,))
    assert measured("accuracy", scores, labels)[0] == pytest.approx((scores.argmax(1) == labels).double().mean().item())
    scores, labels = torch.randn(30, 4, 5), torch.randint(5, (30, 4))
    expected = (scores.argmax(-1) == labels).double().mean(1).numpy()
    np.testing.assert_allclose(measured("accuracy", scores, labels)[1], expected)
    np.testing.assert_allclose(measured("accuracy", scores.movedim(-1, 1), labels)[1], expected)


def test_ignored_positions_do_not_count():
    scores = F.one_hot(torch.tensor([[0, 1, 2]]), 3).float()
    assert measured("accuracy", scores, torch.tensor([[0, 2, -100]]))[0] == 0.5
    assert measured("loss", scores, torch.tensor([[0, 2, -100]]))[0] == pytest.approx(
        F.cross_entropy(scores[0, :2], torch.tensor([0, 2])).item()
    )


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize(("scores", "label"), [((6, 3), 3), ((6, 3), -1), ((6, 3, 4, 4), 3), ((6, 1), 1)])
def test_labels_without_a_score_are_refused(metric, scores, label):
    target = torch.zeros(scores[0], *scores[2:], dtype=torch.int64)
    target[4] = label
    with pytest.raises(InvalidOption, match=rf"{metric}: expected labels from 0 to {scores[1] - 1}, .* got {label};"):
        measured(metric, torch.randn(scores), target)


def test_losses_of_classes_numbers_and_models():
    scores, labels = torch.randn(30, 5), torch.randint(5, (30,))
    assert measured("loss", scores, labels)[0] == pytest.approx(F.cross_entropy(scores, labels).item(), rel=1e-5)
    target = torch.randn(30, 5)
    assert measured("loss", scores, target)[0] == pytest.approx(F.mse_loss(scores, target).item(), rel=1e-5)
    own = {"loss": torch.tensor(0.25), "logits": scores[:7]}
    running = RunningMetric(as_metric("loss"))
    running.add(Batch(0, 7, target=labels[:7]), own)
    assert running.done()[0] == 0.25


def test_retrieval_finds_the_neighbour_of_the_same_label():
    centres = torch.eye(4)[torch.arange(40) % 4]
    labels = torch.arange(40) % 4
    assert measured("retrieval", centres + 0.01 * torch.randn(40, 4), labels)[0] == 1.0
    labels[0] = 9  # alone with its label
    assert measured("retrieval", centres + 0.01 * torch.randn(40, 4), labels)[0] < 1.0


def test_retrieval_averages_states_of_the_tokens_that_count():
    torch.manual_seed(0)
    vectors, labels = torch.randn(6, 1, 4).repeat(2, 1, 1), torch.arange(6).repeat(2)
    states = torch.cat([vectors - 1, vectors + 1, 100 * torch.randn(12, 1, 4)], 1)  # the last is filling
    mask = torch.tensor([[1, 1, 0]]).repeat(12, 1)
    found = {}
    for name, given in (("masked", {"attention_mask": mask}), ("all", {})):
        running = RunningMetric(as_metric("retrieval"))
        running.add(Batch(0, 12, named=given, target=labels), states)
        found[name] = running.done()[0]
    assert found["masked"] == 1.0 > found["all"]
    with pytest.raises(InvalidOption, match=r"expected an attention_mask of shape \(12, 3\)"):
        RunningMetric(as_metric("retrieval")).add(
            Batch(0, 12, named={"attention_mask": mask[:, :2]}, target=labels), states
        )


def test_a_number_per_batch_is_weighted_by_samples():
    values, per_batch = measured(lambda output, target: output.mean(), torch.arange(10.0), torch.zeros(10), step=7)
    assert values == pytest.approx(4.5)
    assert len(per_batch) == 2


def test_less_may_be_better():
    error = Metric("error", lambda output, target: (output - target).abs(), greater_is_better=False)
    pair = [RunningMetric(error), RunningMetric(error)]
    for running, shift in zip(pair, (1.0, 3.0), strict=True):
        running.add(Batch(0, 4, target=torch.zeros(4)), torch.zeros(4) + shift)
    found = RunningMetric.compare(*pair)
    assert (found.original, found.reorganized, found.drop, found.per_sample) == (1.0, 3.0, 2.0, True)


@pytest.mark.parametrize(
    ("metric", "output", "target", "message"),
    [
        ("accuracy", torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.long), "one class per row"),
        ("loss", torch.zeros(4, 3), torch.zeros(4, 2), "expected a target of shape"),
        ("retrieval", torch.zeros(4, 3), torch.zeros(4, 2), "one vector and one label"),
        ("retrieval", torch.zeros(4, 3, 2, 2), torch.zeros(4), "one vector and one label"),
        ("retrieval", torch.zeros(1, 3), torch.zeros(1), "at least two"),
        (lambda output, target: torch.zeros(3), torch.zeros(4, 3), torch.zeros(4), "one for each of the 4 samples"),
        ("bleu", torch.zeros(4, 3), torch.zeros(4), "must be one of accuracy"),
    ],
)
def test_what_does_not_fit_is_refused(metric, output, target, message):
    with pytest.raises(InvalidOption, match=message):
        measured(metric, output, target)


def test_a_metric_needs_targets():
    with pytest.raises(InvalidOption, match="needs a target"):
        RunningMetric(as_metric("accuracy")).add(Batch(0, 2), torch.zeros(2, 2))


def language_data(samples=6, length=9, vocabulary=7):
    torch.manual_seed(0)
    return torch.randn(samples, length, vocabulary), torch.randint(vocabulary, (samples, length))


@pytest.mark.parametrize("at_once", [1, 1 << 22])
def test_perplexity_is_that_of_all_tokens(monkeypatch, at_once):
    monkeypatch.setattr("crystallite.validation.metrics._AT_ONCE", at_once)
    logits, ids = language_data()
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0  # tokens count, not samples
    running = RunningMetric(as_metric("perplexity"))
    for i in range(0, 6, 4):
        named = {"input_ids": ids[i : i + 4], "attention_mask": mask[i : i + 4]}
        running.add(Batch(i, len(ids[i : i + 4]), named=named), {"logits": logits[i : i + 4]})
    real = mask[:, 1:].bool()
    loss = F.cross_entropy(logits[:, :-1][real].double(), ids[:, 1:][real])
    assert running.done()[0] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_a_perplexity_drops_by_a_share():
    logits, ids = language_data()
    both = [RunningMetric(as_metric("perplexity")) for _ in range(2)]
    for running, scale in zip(both, (1.0, 2.0), strict=True):
        running.add(Batch(0, 6, (ids,)), logits * scale)
    result = RunningMetric.compare(*both)
    assert result.drop == pytest.approx(result.reorganized / result.original - 1)
    assert np.exp(result.losses.mean()) - 1 == pytest.approx(result.drop)
    assert result.among(np.ones(6, bool)) == pytest.approx([result.original, result.reorganized])


@pytest.mark.parametrize(
    ("output", "ids", "message"),
    [
        (torch.zeros(2, 5), torch.zeros(2, 5, dtype=int), "expected logits"),
        (torch.zeros(2, 5, 3), torch.full((2, 5), 3), "token 3 is beyond the 3"),
        (torch.zeros(2, 1, 3), torch.zeros(2, 1, dtype=int), "at least two tokens"),
    ],
)
def test_what_has_no_perplexity_is_refused(output, ids, message):
    with pytest.raises(InvalidOption, match=message):
        RunningMetric(as_metric("perplexity")).add(Batch(0, 2, (ids,)), output)
    with pytest.raises(InvalidOption, match=r"expected a causal language model, .* labels, got a batch without either"):
        RunningMetric(as_metric("perplexity")).add(Batch(0, 2, (torch.zeros(2, 5),)), output)
