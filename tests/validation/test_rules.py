"""Rules: what is kept, what is violated, and what so few samples cannot show."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from crystallite.core.errors import InvalidOption
from crystallite.validation.comparison import Comparison, OutputComparison
from crystallite.validation.metrics import MetricResult
from crystallite.validation.rules import Rules, SliceResult, at_quantile, drop_bound, wilson_interval


def compared(deviation, agreement=None, path="output"):
    """A comparison whose samples have these deviations from outputs of size 1."""
    n = len(deviation)
    ones, agreed = np.ones(n), np.ones(n) if agreement is None else np.asarray(agreement, float)
    row = OutputComparison(
        path, np.arange(n), np.asarray(deviation, float), ones, ones, ones, agreed, *[np.zeros(n)] * 4
    )
    return Comparison(n, (row,))


def hits(before, after, name="accuracy", per_sample=True):
    values = np.array([before, after], float)
    return MetricResult(name, True, *values.mean(1), values, per_sample)


def statuses(outcomes):
    return [(outcome.rule, outcome.status) for outcome in outcomes]


@given(st.integers(1, 400), st.floats(0, 1), st.sampled_from([0.8, 0.95, 0.99]))
def test_wilson_agrees_with_scipy(samples, share, confidence):
    right = round(share * samples)
    # a two-sided interval of 2c − 1 has one-sided bounds of c
    expected = stats.binomtest(right, samples).proportion_ci(2 * confidence - 1, method="wilson")
    assert wilson_interval(right / samples, samples, confidence) == pytest.approx(tuple(expected), abs=1e-9)


def test_the_bound_of_a_drop_covers_the_truth():
    """On many draws of samples, the true drop lies below the bound about as often as promised."""
    generator = np.random.default_rng(0)
    draws = generator.choice([-1.0, 0.0, 1.0], (2000, 200), p=[0.02, 0.93, 0.05])  # true drop .03
    covered = np.mean([drop_bound(losses, 0.95) >= 0.03 for losses in draws])
    assert 0.93 <= covered <= 1.0
    smooth = generator.normal(0.1, 1.0, (2000, 200))
    assert 0.93 <= np.mean([drop_bound(losses, 0.95) >= 0.1 for losses in smooth]) <= 0.97


def test_agreement_of_outputs_that_decide_nothing_is_refused():
    rules = Rules(None, 0.9, 0.1)
    with pytest.raises(InvalidOption, match=r"min_agreement needs .*; output\.last_hidden_state: none is one"):
        rules.judge(compared(np.zeros(50), path="output.last_hidden_state"), None)
    with pytest.raises(InvalidOption, match="min_agreement needs"):
        rules.judge(compared(np.zeros(50), np.full(50, np.nan)), None)


def test_agreement_must_be_shown_not_only_observed():
    rules = Rules(None, 0.99, None)
    assert statuses(rules.judge(compared(np.zeros(50)), None)) == [("min_agreement", "unproven")]
    assert statuses(rules.judge(compared(np.zeros(500)), None)) == [("min_agreement", "passed")]
    some = np.arange(500) >= 50
    assert statuses(rules.judge(compared(np.zeros(500), some), None)) == [("min_agreement", "violated")]


def test_the_number_of_samples_it_takes_is_enough_and_not_too_many():
    rules = Rules(None, 0.97, None)
    (outcome,) = rules.judge(compared(np.zeros(10)), None)
    needed = int(outcome.reason.split("it takes ")[1].split()[0])
    assert rules.judge(compared(np.zeros(needed)), None)[0].status == "passed"
    assert rules.judge(compared(np.zeros(needed - 1)), None)[0].status == "unproven"


def test_a_drop_on_few_samples_is_unproven():
    rules = Rules(0.01, None, None)
    few, many = np.ones(40), np.ones(1000)
    assert statuses(rules.judge(compared(few), hits(few, few))) == [("max_drop", "unproven")]
    assert statuses(rules.judge(compared(many), hits(many, many))) == [("max_drop", "passed")]
    assert statuses(rules.judge(compared(many), hits(many, np.arange(1000) >= 100))) == [("max_drop", "violated")]


def test_a_loss_that_falls_is_no_drop():
    better = MetricResult("loss", False, 1.0, 0.5, np.array([np.ones(100), np.full(100, 0.5)]), True)
    assert better.drop == -0.5
    assert statuses(Rules(0.01, None, None).judge(compared(np.zeros(100)), better)) == [("max_drop", "passed")]


def test_one_bad_sample_is_caught_and_named_unless_a_quantile_is_asked_for():
    deviation = np.zeros(1000)
    deviation[417] = 0.7
    (outcome,) = Rules(None, None, 0.1).judge(compared(deviation), None)
    assert outcome.status == "violated"
    assert "sample 417" in outcome.reason
    assert Rules(None, None, 0.1, quantile=0.99).judge(compared(deviation), None)[0].passed


def test_slices_are_judged_by_every_rule():
    part = SliceResult("odd", 20, 0.5, 0.6, 1.0, 0.4)
    metric = hits(np.ones(10_000), np.ones(10_000))
    found = Rules(0.01, 0.9, 0.5).judge(compared(np.zeros(10_000)), metric, [part])
    assert [o.rule for o in found if not o.passed] == ["max_drop", "min_agreement", "max_relative_deviation"]
    assert all("slice odd" in o.reason for o in found if not o.passed)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_enough_do_not_exceed(values, quantile):
    found = at_quantile(np.array(values), quantile)
    assert found in values
    assert np.mean(np.array(values) <= found) >= quantile - 1e-9
    assert np.mean(np.array(values) < found) < quantile


@pytest.mark.parametrize(
    "options",
    [
        {"max_drop": None, "max_relative_deviation": None},
        {"min_agreement": 1.5},
        {"max_drop": -0.1},
        {"quantile": 2},
        {"max_relative_deviation": float("nan")},
    ],
)
def test_bad_rules_are_refused(options):
    with pytest.raises(InvalidOption):
        Rules(**options)


def test_a_rule_that_applies_to_nothing_is_no_pass():
    with pytest.raises(InvalidOption, match="no rule applies"):
        Rules(0.01, None, None).judge(compared(np.zeros(3)), None)
