"""Every null against scipy.stats, and every initialiser against what torch really draws."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.fitting import sample_entries
from crystallite.core.errors import CrystalliteError, InvalidMatrix, InvalidOption

RNG = np.random.default_rng(0)
LEVELS = (0.5, 0.05, 0.01, 1e-3, 1e-5)


def beta_entry(n: int, gain: float) -> stats.rv_continuous:
    """The entry law of an orthogonal matrix: (t + 1)/2 ~ Beta((n−1)/2, (n−1)/2) for t in [−1, 1]."""
    return stats.beta((n - 1) / 2, (n - 1) / 2, loc=-gain, scale=2 * gain)


KNOWN = [
    (nulls.Uniform(0.3), stats.uniform(-0.3, 0.6)),
    (nulls.Normal(0.02), stats.norm(0, 0.02)),
    (nulls.Normal(0.05, mean=-0.01), stats.norm(-0.01, 0.05)),
    (nulls.TruncatedNormal(0.02), stats.truncnorm(-2, 2, 0, 0.02)),
    (nulls.TruncatedNormal(1.0, mean=0.5, low=-0.2, high=3.0), stats.truncnorm(-0.7, 2.5, 0.5, 1.0)),
    (nulls.TruncatedNormal(0.02, low=-2.0, high=2.0), stats.norm(0, 0.02)),
    (nulls.Orthogonal(64, 16, gain=1.4), beta_entry(64, 1.4)),
    (nulls.Orthogonal(3, 2), stats.uniform(-1, 2)),
    (nulls.Empirical(0.05, mean=0.02), stats.norm(0.02, 0.05)),
]
IDS = [null.name for null, _ in KNOWN]


@pytest.mark.parametrize(("null", "oracle"), KNOWN, ids=IDS)
class TestAgainstScipy:
    def test_cdf_density_and_scale(self, null, oracle):
        x = np.linspace(*oracle.ppf([0.001, 0.999]), 101)
        np.testing.assert_allclose(null.cdf(x), oracle.cdf(x), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(null.density(x), oracle.pdf(x), rtol=1e-9)
        assert null.scale == pytest.approx(oracle.std(), rel=1e-6)

    def test_tail_is_two_sided_about_zero(self, null, oracle):
        c = np.linspace(0, 0.999 * np.abs(oracle.ppf([1e-6, 1 - 1e-6])).max(), 101)
        np.testing.assert_allclose(null.tail(c), oracle.cdf(-c) + oracle.sf(c), rtol=1e-6, atol=1e-12)

    @pytest.mark.parametrize("level", LEVELS)
    def test_threshold_inverts_the_tail_to_the_last_bit(self, null, oracle, level):
        c = null.threshold(level)
        assert null.tail(c) <= level < null.tail(np.nextafter(c, 0))
        assert oracle.cdf(-c) + oracle.sf(c) == pytest.approx(level, rel=1e-6)

    def test_moments_of_the_magnitude(self, null, oracle):
        mean, variance = null.magnitude_moments()
        draws = np.abs(oracle.rvs(200_000, random_state=0))
        assert mean == pytest.approx(draws.mean(), rel=0.01)
        assert variance == pytest.approx(draws.var(), rel=0.02)

    def test_samples_follow_the_cdf(self, null, oracle):
        draws = null.sample((100, 200), np.random.default_rng(1))
        assert draws.shape == (100, 200)
        assert stats.kstest(draws.ravel(), null.cdf).pvalue > 1e-3

    def test_shrinking_scales_everything(self, null, oracle):
        small = null.shrunk(0.94)
        assert small.threshold(0.01) == pytest.approx(0.94 * null.threshold(0.01))
        assert small.scale == pytest.approx(0.94 * null.scale)
        assert type(small) is type(null)


def test_float32_uniforms_never_pass_a_strict_correction():
    """±bound itself is one of the 2²⁴ values a float32 generator draws, so it is no evidence at any level."""
    extreme = torch.full((1, 1), -0.1).double().abs().item()
    assert nulls.Uniform(0.1).threshold(1e-9) > extreme
    assert nulls.Uniform(0.1).tail(0.11) == 0


def test_from_init_is_the_empirical_tail():
    w0 = RNG.laplace(size=(60, 50))
    null = nulls.FromInit(w0)
    for c in np.abs(w0).ravel()[::37]:
        assert null.tail(c) == pytest.approx(np.mean(np.abs(w0) >= c))
    assert null.tail(np.abs(w0).max() * 1.0001) == 0
    for level in (0.05, 0.01):
        assert np.mean(np.abs(w0) >= null.threshold(level)) == pytest.approx(level, abs=1 / w0.size)
    assert null.shrunk(0.5).threshold(0.05) == pytest.approx(null.threshold(0.05) / 2)
    assert stats.kstest(null.sample(5000, RNG), null.cdf).pvalue > 1e-3
    assert null.scale == pytest.approx(w0.std(), rel=0.05)
    np.testing.assert_allclose(np.trapezoid(null.density(np.linspace(-20, 20, 4001)), dx=0.01), 1, atol=0.01)


def test_from_init_of_a_large_matrix_is_a_histogram_with_the_exact_maximum():
    w0 = RNG.normal(size=(1100, 1000)).astype(np.float32)
    null = nulls.FromInit(w0)
    assert null.edges.size < 20_000
    for level in (0.05, 0.01, 0.001):
        assert np.mean(np.abs(w0) >= null.threshold(level)) == pytest.approx(level, rel=0.01)
    assert null.tail(np.abs(w0).max()) > 0 == null.tail(np.nextafter(np.abs(w0).max(), np.float32(9)))


def test_empirical_finds_the_bulk_under_large_weights():
    w = RNG.normal(-0.01, 0.05, (300, 300)).astype(np.float32)
    w[RNG.random(w.shape) < 0.05] = 1.0
    w[RNG.random(w.shape) < 0.20] = 0.0  # pruned
    null = nulls.Empirical.fit(w)
    assert null.std == pytest.approx(0.05, rel=0.1)
    assert null.mean == pytest.approx(-0.01, abs=0.004)
    assert nulls.Empirical.fit(RNG.normal(size=(300, 300))).mean == 0.0


def test_empirical_samples_large_matrices_deterministically():
    w = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    assert nulls.Empirical.fit(w) == nulls.Empirical.fit(w.clone())
    assert nulls.Empirical.fit(w).std == pytest.approx(1, rel=0.02)
    assert nulls.Empirical.fit(w.T[::2]).std == pytest.approx(1, rel=0.02)
    assert nulls.Empirical.fit(w.bfloat16()).std == pytest.approx(1, rel=0.02)


def flat(weight: torch.Tensor) -> np.ndarray:
    return weight.detach().double().numpy().ravel()


MODULES = [
    nn.Linear(300, 200),
    nn.Bilinear(40, 30, 20),
    nn.Conv1d(16, 32, 5),
    nn.Conv2d(16, 32, 3, groups=2),
    nn.Conv3d(8, 16, 3),
    nn.ConvTranspose1d(16, 32, 5),
    nn.ConvTranspose2d(16, 32, 3),
    nn.Embedding(500, 40),
    nn.EmbeddingBag(500, 40),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_for_module_is_what_torch_draws(module):
    torch.manual_seed(1)
    module.reset_parameters()
    assert stats.kstest(flat(module.weight), nulls.for_module(module).cdf).pvalue > 1e-3


STACKS = [
    nn.RNN(40, 30),
    nn.GRU(40, 30, num_layers=2, bidirectional=True),
    nn.LSTM(40, 30, proj_size=20),
    nn.LSTMCell(40, 30),
    nn.GRUCell(40, 30),
    nn.MultiheadAttention(32, 4),
    nn.MultiheadAttention(32, 4, kdim=24, vdim=16),
    nn.TransformerEncoderLayer(32, 4, 64),
    nn.Sequential(nn.Linear(30, 40), nn.LayerNorm(40), nn.Conv1d(40, 8, 1)),
]


@pytest.mark.parametrize("module", STACKS, ids=lambda m: type(m).__name__)
def test_for_module_names_every_weight_of_a_stack(module):
    torch.manual_seed(2)
    for part in module.modules():
        for reset in ("reset_parameters", "_reset_parameters"):
            if hasattr(part, reset) and not isinstance(part, nn.TransformerEncoderLayer):
                getattr(part, reset)()
    found = nulls.for_module(module)
    matrices = {name for name, p in module.named_parameters() if p.ndim >= 2 and "bias" not in name}
    assert found.keys() == matrices
    for name, parameter in module.named_parameters():
        if name in found:
            assert stats.kstest(flat(parameter), found[name].cdf).pvalue > 1e-4, name


class HuggingFaceLike(nn.Module):
    """The parts of a PreTrainedModel that matter: a config on the top, plain torch layers below."""

    class Config:
        def __init__(self, **values):
            self.__dict__.update(values)

    def __init__(self, **config):
        super().__init__()
        self.config = self.Config(**config)
        self.embed = nn.Embedding(50, 8)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(8, 24), "c_proj": nn.Linear(8, 8)})
        self.norm = nn.LayerNorm(8)


def test_hugging_face_configs_prescribe_normals():
    found = nulls.for_module(HuggingFaceLike(initializer_range=0.05))
    assert set(found.values()) == {nulls.Normal(0.05)}
    assert found.keys() == {"embed.weight", "attn.c_attn.weight", "attn.c_proj.weight"}
    gpt2 = nulls.for_module(HuggingFaceLike(initializer_range=0.02, model_type="gpt2", n_layer=8))
    assert gpt2["attn.c_proj.weight"] == nulls.Normal(0.005)
    assert gpt2["attn.c_attn.weight"] == nulls.Normal(0.02)
    assert nulls.for_module(HuggingFaceLike())["embed.weight"] == nulls.Normal(1.0)


INITIALISERS = [
    (lambda w: nn.init.kaiming_uniform_(w, a=0.1), nulls.kaiming_uniform(200, a=0.1)),
    (lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"), nulls.kaiming_normal(200, nonlinearity="relu")),
    (lambda w: nn.init.xavier_uniform_(w, 1.5), nulls.xavier_uniform(200, 150, 1.5)),
    (nn.init.xavier_normal_, nulls.xavier_normal(200, 150)),
    (lambda w: nn.init.orthogonal_(w, 2.0), nulls.orthogonal(150, 200, 2.0)),
    (lambda w: nn.init.trunc_normal_(w, 0.1, 0.5, -0.4, 0.8), nulls.TruncatedNormal(0.5, 0.1, -0.4, 0.8)),
    (lambda w: nn.init.trunc_normal_(w, std=0.02), nulls.Normal(0.02)),
]


@pytest.mark.parametrize(("draw", "null"), INITIALISERS, ids=[n.name for _, n in INITIALISERS])
def test_initialisers_match_torch(draw, null):
    torch.manual_seed(3)
    assert stats.kstest(flat(draw(torch.empty(150, 200))), null.cdf).pvalue > 1e-3


class TestChoice:
    def test_prefers_the_initialisation_that_explains_the_bulk(self):
        w = nulls.Uniform(0.05).sample((200, 400), RNG)
        moved = RNG.random(w.shape) < 0.15
        w[moved] += RNG.normal(0, 0.3, moved.sum())
        choice = nulls.choose(w, nulls.candidates("linear", 400, 200))
        assert isinstance(choice.null, nulls.Uniform)
        assert choice.null.bound == pytest.approx(0.05)
        assert choice.null_share == pytest.approx(0.87, abs=0.03)

    @pytest.mark.parametrize("sigma", [0.027, 0.04, 0.06])
    def test_finished_transformers_have_left_their_initialisation(self, sigma):
        w = RNG.normal(-0.01, sigma, (384, 384))
        choice = nulls.choose(w, nulls.candidates("linear", 384, 384, config={"initializer_range": 0.02}))
        assert isinstance(choice.null, nulls.Empirical)
        assert choice.ks < 0.015
        assert nulls.fit(nulls.Normal(0.02), w).ks > 0.05

    def test_an_untrained_matrix_keeps_its_null(self):
        for null in (*nulls.candidates("linear", 300, 100), nulls.Normal(0.02)):
            assert nulls.choose(null.sample((100, 300), RNG), [null]).null == null

    @pytest.mark.parametrize("shape", [(8, 8), (32, 32), (10, 128)])
    def test_a_small_untrained_matrix_keeps_its_null(self, shape):
        """Chance alone takes a few entries further than .02 from any distribution."""
        f0 = nulls.Uniform(0.1)
        believed = [nulls.choose(f0.sample(shape, RNG), [f0]).null == f0 for _ in range(100)]
        assert np.mean(believed) > 0.9
        assert isinstance(nulls.choose(f0.sample((32, 32), RNG) * 2, [f0]).null, nulls.Empirical)

    def test_a_null_wider_than_the_data_is_not_believed(self):
        w = nulls.Uniform(0.05).sample((200, 400), RNG)
        assert not nulls.fit(nulls.Uniform(0.06), w).explains_bulk

    def test_matrices_without_a_bulk_fall_back_to_the_candidates(self):
        assert nulls.choose(np.zeros((4, 5)), [nulls.Uniform(1.0)]).null == nulls.Uniform(1.0)
        with pytest.raises(InvalidMatrix, match="no width"):
            nulls.choose(np.ones((4, 5)), [])

    @pytest.mark.parametrize("kind", ["linear", "conv", "embedding", "recurrent", "attention"])
    def test_candidates_of_every_kind(self, kind):
        found = nulls.candidates(kind, 64, 32, hidden=16)
        assert found
        assert all(isinstance(null, nulls.Null) for null in found)
        assert nulls.candidates(kind, 64, 32, config={"initializer_range": 0.02}) == (nulls.Normal(0.02),)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: nulls.Uniform(0.0),
        lambda: nulls.Normal(math.nan),
        lambda: nulls.Normal(1.0, mean=math.nan),
        lambda: nulls.TruncatedNormal(1.0, mean="0"),
        lambda: nulls.TruncatedNormal(1.0, low=2.0, high=1.0),
        lambda: nulls.Orthogonal(1, 1),
        lambda: nulls.Normal(1.0).threshold(0.0),
        lambda: nulls.Normal(1.0).threshold(1.0),
        lambda: nulls.Uniform(1.0).shrunk(-1.0),
        lambda: nulls.candidates("norm", 3, 3),
        lambda: nulls.kaiming_uniform(0),
        lambda: nulls.kaiming_normal(3, nonlinearity="magic"),
        lambda: nulls.for_module(nn.LayerNorm(3)),
        lambda: nulls.FromInit(np.zeros((2, 2))),
        lambda: nulls.FromInit(np.array([[1.0, math.inf]])),
        lambda: nulls.Empirical.fit(np.array([[1.0, math.nan]])),
        lambda: nulls.Empirical.fit(np.ones((5, 5))),
    ],
)
def test_bad_input_is_named(wrong):
    with pytest.raises(CrystalliteError):
        wrong()


def test_integers_are_magnitudes_too():
    assert nulls.FromInit(np.array([[1, -2], [3, -4]])).threshold(0.5) == 3.0


def test_levels_outside_the_unit_interval_say_so():
    with pytest.raises(InvalidOption, match="level must be a number between 0 and 1, got 5"):
        nulls.Normal(1.0).threshold(5)


@pytest.mark.parametrize("null", [null for null, _ in KNOWN], ids=lambda n: n.name)
def test_nulls_are_values(null):
    assert hash(null) == hash(dataclasses.replace(null))
    with pytest.raises(dataclasses.FrozenInstanceError):
        null.mean = 1.0


class TestSample:
    """What a null is measured by in a large matrix."""

    def test_runs_of_neighbours_from_everywhere(self):
        w = np.arange(1.0, 700 * 1000 + 1).reshape(700, 1000)  # an entry says where it stood
        found = sample_entries(w)
        assert found.shape == (65_536,)
        runs = found.reshape(-1, 16)
        assert (np.diff(runs, axis=1) == 1).all()
        starts = np.sort(runs[:, 0]) / w.size
        assert np.unique(starts).size == starts.size
        assert np.abs(starts - np.linspace(0, 1, starts.size)).max() < 1e-3
        assert np.array_equal(found, sample_entries(w))

    @pytest.mark.parametrize("size", [65_535, 65_536])
    def test_a_small_matrix_is_taken_whole(self, size):
        w = np.arange(1.0, size + 1)[None]
        assert np.array_equal(sample_entries(w), w[0])

    def test_one_entry_more_is_sampled(self):
        assert np.unique(sample_entries(np.arange(1.0, 65_538)[None])).size < 65_536

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
    def test_of_every_storage_the_same_entries_with_their_signs(self, dtype):
        w = torch.randn(400, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
        wide = torch.zeros(400, 1000, dtype=dtype)
        wide[:, ::2] = w
        expected = sample_entries(w.double())
        assert np.array_equal(sample_entries(w), expected)
        assert np.array_equal(sample_entries(wide[:, ::2]), expected)  # entries that do not lie side by side
        assert (expected < 0).any()

    def test_what_is_not_finite_is_named(self):
        w = np.ones((300, 400))
        w[7, 5] = np.nan
        with pytest.raises(InvalidMatrix, match=r"head: .*\(7, 5\)"):
            sample_entries(w[:160], "head")
