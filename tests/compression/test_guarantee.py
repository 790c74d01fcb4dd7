"""Bounds that hold as often as they say: planted losses, simulated many times."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom
from torch import nn

import crystallite as cx
from crystallite.compression.guarantee import BUDGETS, cheapest, p_value, sample_losses, samples_needed, set_aside
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from tests.helpers import compressible as networks


def draw(kind, mean, count, rng):
    if kind == "coin":
        return (rng.random(count) < mean).astype(float)
    return rng.beta(2 * mean, 2 * (1 - mean), count)  # losses anywhere between 0 and 1


@pytest.mark.parametrize("kind", ["coin", "spread"])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_the_tolerance_holds_as_often_as_promised(kind, confidence):
    """The expected loss of what is chosen exceeds the tolerance in at most 1 − confidence of the runs."""
    tolerance, runs, rng = 0.1, 600, np.random.default_rng(0)
    risk = {budget: 0.04 + 0.12 * (1 - budget) for budget in BUDGETS}  # passes the tolerance at a budget of one half
    chosen = []
    for _ in range(runs):
        try:
            found, _ = cheapest(
                lambda budget: budget, lambda b: draw(kind, risk[b], 400, rng), tolerance, confidence, budgets=BUDGETS
            )
        except cx.InvalidOption:
            continue
        chosen.append(found)
    wrong = sum(risk[budget] > tolerance for budget in chosen)
    assert wrong <= binom.ppf(0.999, runs, 1 - confidence)
    assert np.mean([budget <= 0.8 for budget in chosen]) > 0.5  # and it does save something


def test_at_the_border_it_is_rarely_fooled():
    """The hardest case: the expected loss is the tolerance itself."""
    rng = np.random.default_rng(1)
    fooled = [p_value(float((rng.random(300) < 0.1).mean()), 300, 0.1) <= 0.05 for _ in range(2000)]
    assert sum(fooled) <= binom.ppf(0.999, 2000, 0.05)


@given(st.floats(0, 1), st.integers(1, 2000), st.floats(0.001, 0.999))
def test_p_values_are_valid_numbers_and_fall_with_the_loss(mean, samples, tolerance):
    found = p_value(mean, samples, tolerance)
    assert 0 <= found <= 1
    assert p_value(mean / 2, samples, tolerance) <= found
    if mean >= tolerance:
        assert found == 1


@pytest.mark.parametrize("mean", [0.0, 0.02, 0.04])
def test_as_many_samples_as_are_asked_for_suffice(mean):
    needed = samples_needed(mean, 0.05, 0.95)
    assert p_value(mean, needed, 0.05) <= 0.05 < p_value(mean, needed - 1, 0.05)


def test_the_search_ends_at_the_first_budget_that_is_not_shown():
    asked = []

    def losses(budget):
        asked.append(budget)
        return np.zeros(500) if budget != 0.7 else np.ones(500)

    found, guarantee = cheapest(lambda budget: budget, losses, 0.05, 0.95)
    assert found == guarantee.budget == 0.8  # although cheaper ones would pass
    assert asked == [0.9, 0.8, 0.7]
    assert guarantee.observed == 0
    found, _ = cheapest(lambda budget: budget if budget > 0.6 else None, lambda b: np.zeros(500), 0.05, 0.95)
    assert found == 0.7  # what cannot be reached is not chosen


def test_refusals_say_what_it_would_take():
    with pytest.raises(cx.InvalidOption, match="it would take about 97 samples of calibration data"):
        cheapest(lambda b: b, lambda b: np.zeros(20), 0.1, 0.95)
    with pytest.raises(cx.InvalidOption, match=r"0.5 on 20 samples set aside; no number of samples"):
        cheapest(lambda b: b, lambda b: np.full(20, 0.5), 0.1, 0.95)
    with pytest.raises(cx.InvalidOption, match=r"no budget of 0.9"):
        cheapest(lambda b: None, lambda b: np.zeros(20), 0.1, 0.95)


def test_samples_set_aside_are_in_no_other_part():
    numbers = torch.arange(1000.0)[:, None]
    rest, aside = set_aside(Calibration.read(numbers), 0)
    parts = [torch.cat([b.positional[0] for b in part]) for part in (rest.fitted, rest.held_out, aside)]
    assert torch.equal(torch.cat(parts).flatten().sort().values, numbers.flatten())
    assert 200 < len(parts[2]) < 400
    assert float(parts[2][:50].max()) < 400  # from every batch
    assert not torch.equal(parts[2], torch.cat([b.positional[0] for b in set_aside(Calibration.read(numbers), 1)[1]]))


class Shifted(nn.Module):
    """y + shift · y on some samples."""

    def __init__(self, shift):
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, x, attention_mask=None):
        return x * (1 + self.shift)


def test_losses_are_relative_bounded_and_without_padding():
    x = torch.randn(3, 5, 4)
    same, ten, far = (Shifted(s) for s in (0.0, 0.1, 99.0))
    batch = Batch(0, 3, (x,))
    assert sample_losses(same, same, [batch], "deviation").tolist() == [0, 0, 0]
    assert sample_losses(ten, same, [batch, batch], "deviation") == pytest.approx([0.1] * 6)
    assert sample_losses(far, same, [batch], "deviation").tolist() == [1, 1, 1]
    assert sample_losses(Shifted(float("nan")), same, [batch], "deviation").tolist() == [1, 1, 1]
    assert sample_losses(Shifted(-2.0), same, [batch], "disagreement").tolist() == [1, 1, 1]
    maps = torch.randn(3, 4, 6, 6)  # turned round by the other model, so that the least class is the largest
    assert sample_losses(Shifted(-2.0), same, [Batch(0, 3, (maps,))], "disagreement").tolist() == [1, 1, 1]
    with pytest.raises(cx.InvalidOption, match="no output of the model"):  # one number at each place is no choice
        sample_losses(same, same, [Batch(0, 3, (maps[:, :1],))], "disagreement")
    mask = torch.tensor([[1, 1, 0, 0, 0]] * 3)
    padded = Batch(0, 3, (), {"x": torch.where(mask[..., None] == 1, x, 1e9), "attention_mask": mask})
    assert sample_losses(ten, same, [padded], "deviation") == pytest.approx([0.1] * 3)
    with pytest.raises(cx.InvalidOption, match="no output of the model"):
        sample_losses(same, same, [Batch(0, 3, (torch.ones(3),))], "disagreement")


def test_a_guaranteed_model_says_so_and_keeps_its_promise():
    model = networks.mlp(16, 64, 64, 4).eval()
    rng = torch.Generator().manual_seed(3)
    small = cx.compress(model, tolerance=0.25, calibration=torch.randn(2000, 16, generator=rng))
    guarantee = cx.record(small).options.guarantee
    assert guarantee.budget == cx.record(small).options.budget < 1
    assert guarantee.tested[0][0] == BUDGETS[0]
    assert "guaranteed with confidence 0.95: mean relative deviation ≤ 0.25" in cx.summary(small).notes[-1]
    fresh = torch.randn(4000, 16, generator=rng)
    assert sample_losses(small, model, [Batch(0, 4000, (fresh,))], "deviation").mean() <= 0.25
    verdict = cx.validate(model, small, fresh[:500], max_relative_deviation=1)
    assert verdict.guarantee == verdict.to_json()["guarantee"] == str(guarantee)
    assert str(guarantee) in repr(verdict)
    again = cx.compress(model, budget=guarantee.budget, calibration=torch.randn(2000, 16, generator=rng))
    assert cx.summary(again).macs[1] == pytest.approx(cx.summary(small).macs[1], rel=0.1)
    assert cx.validate(model, again, fresh[:500], max_relative_deviation=1).guarantee is None


def test_it_is_refused_where_it_cannot_be_shown():
    model = networks.mlp(16, 64, 4)
    data = torch.randn(300, 16, generator=torch.Generator().manual_seed(3))
    with pytest.raises(cx.InvalidOption, match=r"tolerance 0.001 cannot be shown with confidence 0.99"):
        cx.compress(model, tolerance=0.001, confidence=0.99, calibration=data)
    for options, message in (
        ({"tolerance": 0.0}, "tolerance: expected a number between 0 and 1, got 0.0"),
        ({"tolerance": 0.1, "confidence": 1.0}, "confidence: expected"),
        ({"tolerance": 0.1, "risk": "x"}, "risk must be one of deviation, disagreement, got 'x'"),
    ):
        with pytest.raises(cx.InvalidOption, match=message):
            cx.compress(model, calibration=data, **options)
