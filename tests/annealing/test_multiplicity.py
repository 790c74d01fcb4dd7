"""Streaming corrections against the textbook on full p-value arrays, and what they promise on simulated matrices."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.annealing.histogram import magnitude_histogram
from crystallite.core.arrays import magnitudes
from crystallite.core.errors import InvalidMatrix, InvalidOption

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def textbook(p: np.ndarray, level: float, correction: str) -> np.ndarray:
    """The rejections by definition: sort every p-value and compare it with its own limit."""
    order = np.argsort(p, axis=None, kind="stable")
    ranked = p.ravel()[order]
    m = p.size
    rank = np.arange(1, m + 1)
    if correction == "bonferroni":
        count = np.count_nonzero(ranked <= level / m)
    elif correction == "holm":
        failing = ranked > level / (m - rank + 1)
        count = int(np.argmax(failing)) if failing.any() else m
    else:
        passing = np.flatnonzero(ranked <= level * rank / m)
        count = passing[-1] + 1 if passing.size else 0
    rejected = np.zeros(m, bool)
    rejected[order[:count]] = True
    return rejected.reshape(p.shape)


def values(w: torch.Tensor) -> np.ndarray:
    return w.double().abs().numpy()


@pytest.mark.parametrize("correction", ["bonferroni", "holm", "bh"])
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from([0.001, 0.01, 0.05, 0.2, 0.5, 0.9]),
    signal=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    ties=st.booleans(),
    null=st.sampled_from([nulls.Normal(1.0), nulls.Normal(0.7, 0.3), nulls.Uniform(2.0), nulls.TruncatedNormal(1.0)]),
)
@settings(max_examples=150)
def test_streaming_equals_the_textbook(correction, seed, rows, cols, dtype, level, signal, ties, null):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(rows, cols)) * np.where(rng.random((rows, cols)) < signal, 4, 1)
    w = torch.from_numpy(np.round(w * 2) / 2 if ties else w).to(dtype)  # rounding also makes zeros
    expected = textbook(null.tail(values(w)), level, correction)
    annealed = anneal(w, null, level, correction, rule="neyman")
    np.testing.assert_array_equal(annealed.mask, expected)
    assert annealed.kept == expected.sum()


def test_benjamini_hochberg_equals_scipy_on_a_large_matrix():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(700, 500)).astype(np.float32)
    w[rng.random(w.shape) < 0.02] *= 4
    adjusted = stats.false_discovery_control(nulls.Normal(1.0).tail(np.abs(w.astype(np.float64))), axis=None)
    np.testing.assert_array_equal(
        anneal(w, nulls.Normal(1.0), 0.05, "bh", rule="neyman").mask.ravel(), adjusted <= 0.05
    )


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from(DTYPES), c=st.floats(0, 4), transposed=st.booleans())
@settings(max_examples=60)
def test_histogram_counts_are_exact_at_every_magnitude(seed, dtype, c, transposed):
    w = torch.randn(9, 14, generator=torch.Generator().manual_seed(seed)).to(dtype)
    histogram = magnitude_histogram(magnitudes(w.T if transposed else w))
    assert histogram.count_at_least(c) == (values(w) >= c).sum()
    assert histogram.count_at_least(float(values(w)[2, 3])) == (values(w) >= values(w)[2, 3]).sum()
    assert histogram.count_at_most_above(c) >= histogram.count_at_least(c)
    assert histogram.largest == values(w).max()


def test_histogram_measures_the_fit_of_a_null():
    w = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    histogram = magnitude_histogram(magnitudes(w))
    assert histogram.ks(nulls.Normal(1.0)) == pytest.approx(
        stats.kstest(np.abs(w.ravel()), "halfnorm").statistic, abs=5e-4
    )
    assert histogram.ks(nulls.Normal(2.0)) > 0.2


@pytest.mark.parametrize("layout", [lambda w: w, lambda w: w.T.contiguous().T])
def test_non_finite_entries_are_counted_and_located(layout):
    w = torch.randn(40, 30)
    w[7, 20] = torch.nan
    w[30, 2] = torch.inf
    null = nulls.Normal(1.0)
    with pytest.raises(InvalidMatrix, match=r"decoder\.weight: .*2 NaN or infinite entries, the first at"):
        anneal(layout(w), null, correction="bh", rule="neyman", name="decoder.weight")
    with pytest.raises(InvalidMatrix, match="2 NaN"):
        anneal(layout(w), null)
    with pytest.raises(InvalidMatrix, match="2 NaN"):
        anneal(layout(w), null, rule="neyman").mask  # noqa: B018
    with pytest.raises(InvalidMatrix, match="2 NaN"):
        anneal(layout(w))


def test_an_unknown_correction_lists_the_known():
    with pytest.raises(InvalidOption, match="None, bonferroni, holm, bh, got 'bonferoni'"):
        anneal(np.ones((2, 2)), nulls.Normal(1.0), correction="bonferoni", rule="neyman")


SIMULATIONS = 250
PLANTED = 60


def simulate(null: nulls.Null, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A 40×50 matrix of noise with 60 planted weights: (matrix, where they are)."""
    rng = np.random.default_rng(seed)
    w = null.sample((40, 50), rng)
    planted = np.zeros(w.shape, bool)
    planted.flat[rng.choice(w.size, PLANTED, replace=False)] = True
    w[planted] += rng.choice([-1, 1], PLANTED) * rng.uniform(3, 7, PLANTED) * null.scale
    return w.astype(np.float32), planted


@pytest.mark.parametrize("null", [nulls.Uniform(0.05), nulls.Normal(0.02)], ids=lambda n: n.name)
@pytest.mark.parametrize("level", [0.05, 0.2])
def test_family_wise_error_and_false_discovery_rate_hold(null, level):
    any_false = {"bonferroni": [], "holm": []}
    proportions = []
    for seed in range(SIMULATIONS):
        w, planted = simulate(null, seed)
        for correction, happened in any_false.items():
            happened.append(bool((anneal(w, null, level, correction, rule="neyman").mask & ~planted).any()))
        kept = anneal(w, null, level, "bh", rule="neyman").mask
        proportions.append((kept & ~planted).sum() / max(kept.sum(), 1))
        assert kept[planted].mean() > 0.25
    error = 3 * np.sqrt(level * (1 - level) / SIMULATIONS)
    for correction, happened in any_false.items():
        assert np.mean(happened) <= level + error, correction
    assert np.mean(any_false["holm"]) >= np.mean(any_false["bonferroni"])
    assert np.mean(proportions) <= level + 3 * np.std(proportions) / np.sqrt(SIMULATIONS)
    if isinstance(null, nulls.Normal):  # and they are not idle: close to what they allow
        assert np.mean(any_false["bonferroni"]) >= 1 - np.exp(-level * (1 - PLANTED / 2000)) - error
        assert np.mean(proportions) >= level * 0.8
