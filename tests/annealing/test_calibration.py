"""On pure noise of every family each test keeps what it says it keeps."""

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal

SHAPE = (300, 400)
MATRICES = 5


def torch_draw(initialise):
    def draw(seed, shape):
        torch.manual_seed(seed)
        return initialise(torch.empty(shape))

    return draw


def from_init(seed, shape):
    return np.random.default_rng(seed).laplace(size=shape)


FAMILIES = {
    "uniform": (torch_draw(lambda w: nn.init.uniform_(w, -0.05, 0.05)), lambda w: nulls.Uniform(0.05)),
    "normal": (torch_draw(lambda w: nn.init.normal_(w, std=0.02)), lambda w: nulls.Normal(0.02)),
    "truncated": (
        torch_draw(lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.04, b=0.04)),
        lambda w: nulls.TruncatedNormal(0.02),
    ),
    "kaiming": (torch_draw(nn.init.kaiming_normal_), lambda w: nulls.kaiming_normal(w.shape[1])),
    "xavier": (torch_draw(nn.init.xavier_uniform_), lambda w: nulls.xavier_uniform(*w.shape)),
    "orthogonal": (torch_draw(nn.init.orthogonal_), lambda w: nulls.Orthogonal(*w.shape)),
    "off-centre": (torch_draw(lambda w: nn.init.normal_(w, -0.01, 0.05)), lambda w: nulls.Normal(0.05, -0.01)),
    "shrunk": (
        torch_draw(lambda w: nn.init.uniform_(w, -0.05, 0.05).mul_(0.9)),
        lambda w: nulls.Uniform(0.05).shrunk(0.9),
    ),
    "from init": (from_init, nulls.FromInit),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
def test_rejection_rate_is_within_binomial_error(family, level):
    draw, null_of = FAMILIES[family]
    entries = MATRICES * SHAPE[0] * SHAPE[1]
    kept = 0
    for seed in range(MATRICES):
        w = draw(seed, SHAPE)
        annealed = anneal(w, null_of(w), level, rule="neyman")
        assert annealed.expected_false_edges == pytest.approx(level * entries / MATRICES, rel=1e-3)
        kept += annealed.kept
    assert abs(kept - level * entries) <= 3.5 * np.sqrt(entries * level * (1 - level)) + MATRICES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("correction", ["bonferroni", "holm", "bh"])
@pytest.mark.parametrize("level", [0.05, 0.01, 0.001])
def test_corrected_tests_keep_hardly_any_noise(family, correction, level):
    """Without signal all three control the chance of any false edge at `level`."""
    draw, null_of = FAMILIES[family]
    matrices = 20
    hits = 0
    for seed in range(matrices):
        w = draw(seed, (60, 80))
        hits += anneal(w, null_of(w), level, correction, rule="neyman").kept > 0
    assert hits <= matrices * level + 3.5 * np.sqrt(matrices * level * (1 - level))


def test_the_empirical_null_is_calibrated_to_its_own_fit():
    rates = []
    for seed in range(MATRICES):
        w = np.random.default_rng(seed).normal(-0.01, 0.05, (400, 400))
        rates.append(anneal(w, "empirical", 0.01, rule="neyman").kept_share)
    assert np.mean(rates) == pytest.approx(0.01, rel=0.05)
