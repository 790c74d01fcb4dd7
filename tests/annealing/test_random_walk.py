"""The random-walk test: silent on noise when calibrated, loud when read literally, right on planted truth."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.random_walk import random_walk_test, relative_magnitude_cdf
from crystallite.core.errors import InvalidOption

SIZES = [16, 64, 256, 1024, 4096]


def noise_shares(null, rows, method="calibrated", draw=None):
    """Shares of noise labelled preference: many matrices where they are small."""
    cols = min(rows, (1 << 20) // rows)
    draw = draw or (lambda rng: null.sample((rows, cols), rng))
    return [
        random_walk_test(draw(np.random.default_rng(seed)), null, method).shares["preference"]
        for seed in range(40 if rows <= 64 else 2)
    ]


@pytest.mark.parametrize("rows", SIZES)
def test_at_most_two_percent_of_uniform_noise_is_preference(rows):
    assert np.mean(noise_shares(nulls.Uniform(0.05), rows)) <= 0.02


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(
    "null", [nulls.Normal(0.02), nulls.Normal(0.05, -0.01), nulls.TruncatedNormal(0.02)], ids=lambda n: n.name
)
def test_at_most_two_percent_of_other_noise_is_preference(null, rows):
    assert np.mean(noise_shares(null, rows)) <= 0.02


@pytest.mark.parametrize("rows", [16, 256])
def test_at_most_two_percent_of_orthogonal_noise_is_preference(rows):
    def draw(rng):
        torch.manual_seed(int(rng.integers(1 << 30)))
        return nn.init.orthogonal_(torch.empty(rows, rows))

    assert np.mean(noise_shares(nulls.Orthogonal(rows, rows), rows, draw=draw)) <= 0.02


def test_at_most_two_percent_of_the_initial_checkpoint_is_preference():
    w0 = np.random.default_rng(0).laplace(size=(256, 256))
    assert random_walk_test(w0, nulls.FromInit(w0)).shares["preference"] <= 0.02


def test_the_literal_reading_rejects_more_the_more_it_sees():
    """δ·n falls from about .5 to almost 0 on normal noise, and 4 of 10 noise entries become "preference"."""
    null = nulls.Normal(0.02)
    bands = [
        np.mean(
            [
                random_walk_test(null.sample((n, n), np.random.default_rng(s)), null, "literal").relative_bandwidth
                for s in range(8)
            ]
        )
        for n in (16, 128, 1024)
    ]
    assert bands[0] > 0.3 > bands[1] > 0.05 > bands[2]
    assert np.mean(noise_shares(null, 1024, "literal")) > 0.38


def test_the_literal_reading_fits_uniform_noise_better():
    uniform, normal = (noise_shares(null, 256, "literal") for null in (nulls.Uniform(1.0), nulls.Normal(1.0)))
    assert np.mean(uniform) < np.mean(normal)


@pytest.mark.parametrize(
    "null", [nulls.Uniform(1.0), nulls.Normal(1.0), nulls.TruncatedNormal(1.0)], ids=lambda n: n.name
)
@pytest.mark.parametrize("rows", [16, 256])
def test_expected_masses_are_those_of_normalised_noise(null, rows):
    w = np.abs(null.sample((rows, (1 << 21) // rows), np.random.default_rng(0)))
    u = np.sort((w / w.mean(0)).ravel())
    grid = np.arange(1, 256) / 64
    observed = np.searchsorted(u, grid) / u.size
    np.testing.assert_allclose(relative_magnitude_cdf(null, rows, grid), observed, atol=0.003)


@pytest.mark.parametrize("null", [nulls.Uniform(0.05), nulls.Normal(0.02)], ids=lambda n: n.name)
@pytest.mark.parametrize("method", ["calibrated", "literal"])
def test_planted_preference_is_found(null, method):
    rng = np.random.default_rng(0)
    w = null.sample((128, 200), rng)
    planted = np.zeros(w.shape, bool)
    planted[rng.integers(0, 128, 200), np.arange(200)] = True  # each neuron prefers one direction
    w[planted] = 12 * null.scale
    walk = random_walk_test(w, null, method)
    assert np.all(np.abs(w[planted]) > walk.preference_above[np.nonzero(planted)[1]])
    if method == "calibrated":
        assert walk.shares["preference"] == pytest.approx(1 / 128, abs=0.01)


def test_preference_in_some_columns_leaves_the_noise_of_others_alone():
    rng = np.random.default_rng(0)
    w = rng.uniform(-0.1, 0.1, (64, 100))
    w[:8, :10] += 0.5
    walk = random_walk_test(w, nulls.Uniform(0.1))
    assert np.mean(np.abs(w[:, 10:]) > walk.preference_above[10:]) <= 0.02


def test_suppressed_directions_are_seen():
    rng = np.random.default_rng(0)
    w = rng.uniform(0.8, 1.2, (100, 100))
    w[rng.random(w.shape) < 0.2] *= 0.01
    shares = random_walk_test(w, nulls.Uniform(1.0)).shares
    assert shares["suppression"] == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("method", ["calibrated", "literal"])
def test_zero_columns_and_single_rows_are_noise(method):
    w = np.random.default_rng(0).uniform(-1, 1, (50, 40))
    w[:, [3, 7]] = 0
    walk = random_walk_test(w, nulls.Uniform(1.0), method)
    assert walk.preference_above[3] == 0
    assert np.isfinite(walk.preference_above).all()
    assert sum(walk.shares.values()) == pytest.approx(1)
    for edge in (np.zeros((5, 4)), w[:1], np.zeros((0, 4)), np.zeros((4, 0)), np.full((3, 1), 5e-324)):
        assert random_walk_test(edge, nulls.Uniform(1.0), method).shares == {
            "preference": 0.0,
            "noise": 1.0,
            "suppression": 0.0,
        }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_layout_and_type_gives_the_sums_of_its_numbers(dtype):
    w = torch.randn(70, 90, generator=torch.Generator().manual_seed(0)).to(dtype)
    null = nulls.Normal(1.0)
    expected = w.double().abs().sum(0)
    for layout in (w, w.T.contiguous().T, torch.cat([w, w], 1)[:, :90]):
        walk = random_walk_test(layout, null)
        np.testing.assert_allclose(walk.column_sums, expected, rtol=1e-12)
        assert walk.relative_bandwidth == random_walk_test(w, null).relative_bandwidth


def test_large_matrices_are_sampled_by_the_calibrated_test_only():
    w = torch.randn(2100, 2100, generator=torch.Generator().manual_seed(0))
    null = nulls.Normal(1.0)
    assert (1 << 20) <= random_walk_test(w, null).counts.sum() < w.numel()
    assert random_walk_test(w, null, "literal").counts.sum() == w.numel()
    assert random_walk_test(w, null).shares["preference"] == pytest.approx(0.01, abs=0.001)


def test_the_number_of_threads_does_not_change_a_bit():
    w = torch.randn(1500, 700, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    sums = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            sums.append(random_walk_test(w, nulls.Normal(1.0)).column_sums)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*sums)


def test_bad_options_are_named():
    with pytest.raises(InvalidOption, match="calibrated, literal or None, got 'flat'"):
        random_walk_test(np.ones((2, 2)), method="flat")
    with pytest.raises(InvalidOption, match="needs a null"):
        random_walk_test(np.ones((2, 2)))


def transcribed(u, alpha, delta0, tau):
    """The paper's loop with a flat law, from numpy and scipy alone: the last accepted d, at least δ₀."""
    accepted, d = delta0, delta0
    while d <= 1 + 1e-12:
        inside = u[(u >= 1 - d) & (u < 1 + d)]
        cells = round(2 * d * 64)
        groups = min(16, len(inside) // 10, cells)
        if groups >= 2:
            # bins of whole cells of 1/64, as equal as they come
            bounds = 1 - d + np.ceil(np.arange(groups + 1) * cells / groups - 1e-9) / 64
            observed = np.histogram(inside, bounds)[0]
            expected = len(inside) * np.diff(bounds) / (2 * d)
            if stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(observed) - 1) < alpha:
                break
        accepted = d
        d += tau
    return accepted


@pytest.mark.parametrize("null", [nulls.Uniform(1.0), nulls.Normal(1.0)], ids=lambda n: n.name)
@pytest.mark.parametrize(
    ("alpha", "delta0", "tau"),
    [(0.05, 1 / 64, 1 / 64), (1e-6, 1 / 64, 1 / 32), (0.01, 1 / 4, 1 / 16), (0.3, 0.5, 1 / 8)],
)
def test_alpha_delta0_and_tau_are_the_papers(null, alpha, delta0, tau):
    for seed in range(3):
        w = np.abs(null.sample((32, 50), np.random.default_rng(seed)))
        walk = random_walk_test(w, method="literal", alpha=alpha, delta0=delta0, tau=tau)
        assert walk.relative_bandwidth == pytest.approx(transcribed((w / w.mean(0)).ravel(), alpha, delta0, tau))
        steps = (walk.relative_bandwidth - delta0) / tau
        assert steps == pytest.approx(round(steps))
        assert walk.bandwidth == walk.relative_bandwidth / 32


@pytest.mark.parametrize(("delta0", "tau"), [(0.1, 0.03), (1 / 3, 1 / 7), (1.0, 1.0), (1 / 4096, 1 / 300)])
@pytest.mark.parametrize("method", ["calibrated", "literal"])
def test_odd_steps_count_the_same_classes_as_numpy(delta0, tau, method):
    null = nulls.Normal(1.0)
    w = null.sample((200, 150), np.random.default_rng(0))
    w[:, ::7] *= np.linspace(0.0, 3.0, 200)[:, None]
    walk = random_walk_test(w, null, method, delta0=delta0, tau=tau)
    u = np.abs(w) / np.abs(w).mean(0)
    expected = {"preference": np.mean(u > 1 + walk.relative_bandwidth), "suppression": np.mean(u < walk.lower_end)}
    assert {name: walk.shares[name] for name in expected} == pytest.approx(expected, abs=2e-4)
    assert walk.counts.sum() == w.size


def test_a_stricter_alpha_never_narrows_the_literal_band():
    w = np.random.default_rng(0).normal(size=(64, 64))
    bands = [random_walk_test(w, method="literal", alpha=a).relative_bandwidth for a in (0.3, 0.05, 1e-3, 1e-9)]
    assert bands == sorted(bands)
    assert bands[0] < bands[-1]


@pytest.mark.parametrize("null", [nulls.Uniform(0.05), nulls.Normal(0.02)], ids=lambda n: n.name)
@pytest.mark.parametrize("share", [0.01, 0.02])
@pytest.mark.parametrize("rows", [64, 256, 1024])
def test_planted_suppression_is_found_at_small_shares(null, share, rows):
    rng = np.random.default_rng(1)
    clean = null.sample((rows, rows), rng)
    planted = rng.random(clean.shape) < share
    w = np.where(planted, 0.01 * clean, clean)
    walk, before = random_walk_test(w, null), random_walk_test(clean, null)
    suppressed = np.abs(w) < walk.suppression_below
    assert suppressed[planted].mean() > 0.7
    assert suppressed[~planted].mean() < 0.05
    assert walk.shares["suppression"] == pytest.approx(suppressed.mean(), abs=0.002)
    assert before.shares["suppression"] == 0
    # no more preference than the band's own end allows, up to the entries that the smaller column means push over it
    assert walk.shares["preference"] <= before.shares["preference"] + 0.02


@pytest.mark.parametrize("rows", [16, 64, 256])
@pytest.mark.parametrize(
    "null", [nulls.Uniform(0.05), nulls.Normal(0.02), nulls.TruncatedNormal(0.02)], ids=lambda n: n.name
)
def test_noise_is_not_suppressed(null, rows):
    shares = [
        random_walk_test(null.sample((rows, rows), np.random.default_rng(seed)), null).shares["suppression"]
        for seed in range(40 if rows < 256 else 5)
    ]
    assert np.mean(np.array(shares) > 0) <= 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, "alpha must be a number between 0 and 1"),
        ({"alpha": "small"}, "alpha"),
        ({"delta0": 0.0}, "delta0 must be a number from 1/4096 to 1"),
        ({"delta0": 1.5}, "delta0"),
        ({"tau": -1}, "tau"),
        ({"tau": True}, "tau"),
    ],
)
def test_bad_bands_are_refused(options, message):
    with pytest.raises(InvalidOption, match=message):
        random_walk_test(np.ones((2, 2)), nulls.Uniform(1.0), **options)
