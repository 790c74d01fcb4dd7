"""`anneal` on matrices and models: the rules, what is lazy, and that thresholds, masks and counts agree."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.annealing.distributions import Normal
from crystallite.annealing.neyman import percolation_level
from crystallite.annealing.random_walk import random_walk_test
from crystallite.core.compiling import COMPILES
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.components import marked_components
from crystallite.structure.decompose import decompose

NULL = nulls.Uniform(0.1)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn]


def planted(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    w = NULL.sample((64, 100), rng)
    w[rng.integers(0, 64, 100), np.arange(100)] = 0.5
    return w


@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["rows", "columns", "strided"]),
    rule=st.sampled_from(["both", "neyman"]),
    method=st.sampled_from(["calibrated", "literal"]),
)
@settings(max_examples=60)
def test_mask_classes_thresholds_and_counts_agree(seed, dtype, layout, rule, method):
    w = torch.from_numpy(planted(seed)).to(dtype)
    view = {"rows": w, "columns": w.T.contiguous().T, "strided": torch.cat([w, w], 1)[:, :100]}[layout]
    a = anneal(view, NULL, 0.05, random_walk=method, rule=rule)
    numbers = w.double().abs().numpy()
    mask, classes = np.asarray(a.mask), np.asarray(a.classes)
    assert type(a.mask) is type(a.classes) is torch.Tensor  # as the matrix was
    significant = numbers >= a.threshold
    preference = numbers > (1 + a.random_walk.relative_bandwidth) * numbers.sum(0) / 64
    np.testing.assert_array_equal(classes == 1, preference)
    np.testing.assert_array_equal(mask, significant & preference if rule == "both" else significant)
    assert a.kept == mask.sum()
    assert a.shape == (64, 100)
    assert mask.shape == classes.shape == a.shape
    if rule == "both":
        np.testing.assert_array_equal(numbers >= a.column_thresholds, mask)
    else:
        assert a.column_thresholds is None
        assert a.pattern_threshold == a.magnitudes.pattern(a.threshold)
    for name, label in (("preference", 1), ("noise", 0), ("suppression", -1)):
        assert a.class_shares[name] == pytest.approx(np.mean(classes == label), abs=0.02)


def test_both_tests_recover_what_was_planted():
    w = planted()
    a = anneal(w, NULL, 0.01, "holm")
    np.testing.assert_array_equal(a.mask, np.abs(w) == 0.5)
    assert a.expected_false_edges <= 0.011
    assert a.bandwidth == a.random_walk.relative_bandwidth / 64


def test_the_price_of_the_second_test():
    """A neuron that acts strongly and evenly on everything is directionless: kept by "neyman", annealed by "both"."""
    w = planted()
    w[:, 5] = 0.9
    assert anneal(w, NULL, rule="neyman").mask[:, 5].all()
    assert not anneal(w, NULL, rule="both").mask[:, 5].any()


def test_p_values_are_the_tails():
    w = planted().astype(np.float32)
    a = anneal(w, NULL, 0.03, rule="neyman")
    np.testing.assert_array_equal(a.mask, a.p_values() <= 0.03)


@pytest.mark.parametrize("ask", [lambda a: a.kept, lambda a: a.mask, lambda a: a.p_values()])
def test_what_is_computed_later_refuses_nan_too(ask):
    w = planted()
    w[3, 4] = np.nan
    with pytest.raises(InvalidMatrix, match=r"\(3, 4\)"):
        ask(anneal(w, NULL, rule="neyman"))


def test_numbers_near_the_ends_of_float32():
    """Denormal and huge weights are weights like others: no warning, and the same edges."""
    w = np.random.default_rng(0).normal(size=(80, 90)).astype(np.float32)
    wanted = anneal(w, "empirical", 0.01, "bh").mask
    for factor in (2.0**-100, 2.0**120):
        np.testing.assert_array_equal(anneal(w * np.float32(factor), "empirical", 0.01, "bh").mask, wanted)
    assert anneal(w * np.float32(2.0**-140), "empirical").kept > 0


def test_percolation_level():
    a = anneal(planted(), NULL, "percolation", rule="neyman")
    assert a.level == percolation_level(64, 100) == 1 / 80
    assert anneal(np.ones((1, 1)), NULL, "percolation", rule="neyman").level < 1


def test_nothing_is_read_before_it_is_needed(monkeypatch):
    def refuse(*_):
        raise AssertionError("the matrix was read")

    monkeypatch.setattr("crystallite.annealing.histogram.over_rows", refuse)
    monkeypatch.setattr("crystallite.annealing.columns.over_tasks", refuse)
    w = np.random.default_rng(0).normal(size=(400, 400))
    for null in (NULL, "auto", "empirical"):
        for correction in (None, "bonferroni"):
            assert anneal(w, null, 0.01, correction, rule="neyman").pattern_threshold > 0
    with pytest.raises(AssertionError):
        anneal(w, NULL, correction="holm", rule="neyman")


def test_auto_picks_and_names_the_null():
    torch.manual_seed(0)
    fresh = anneal(nn.Linear(400, 200).weight)
    assert fresh.null.bound == pytest.approx(0.05)
    assert fresh.null_fit < 0.015
    trained = anneal(torch.randn(200, 400) * 0.3)
    assert isinstance(trained.null, nulls.Empirical)
    assert "Empirical(0." in repr(trained)
    assert repr(anneal(planted(), rule="neyman", random_walk=None)).count("\n") == 3


def test_a_matrix_of_zeros_has_no_edges():
    for shape in ((5, 4), (1, 7), (0, 3), (3, 0)):
        a = anneal(np.zeros(shape))
        assert a.kept == 0
        assert a.mask.shape == a.classes.shape == shape


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.conv = nn.Conv1d(8, 12, 3)
        self.up = nn.ConvTranspose1d(12, 6, 5)
        self.lstm = nn.LSTM(6, 10)
        self.attn = nn.MultiheadAttention(12, 2)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight  # tied


def test_models_give_one_annealing_per_matrix():
    torch.manual_seed(0)
    net = Net()
    found = anneal(net)
    assert {name: a.shape for name, a in found.items()} == {
        "embed.weight": (8, 30),
        "conv.weight": (12, 24),
        "up.weight": (6, 60),
        **{f"lstm.weight_ih_l0[{gate}]": (10, 6) for gate in "ifgo"},
        **{f"lstm.weight_hh_l0[{gate}]": (10, 10) for gate in "ifgo"},
        **{f"attn.in_proj_weight[{part}]": (12, 12) for part in "qkv"},
        "attn.out_proj.weight": (12, 12),
    }
    known = nulls.for_module(net)
    exact = anneal(net, known, 0.05, rule="neyman")
    assert exact["lstm.weight_hh_l0[f]"].null == known["lstm.weight_hh_l0"]
    assert exact["lstm.weight_hh_l0[f]"].name == "lstm.weight_hh_l0[f]"
    np.testing.assert_array_equal(
        exact["lstm.weight_hh_l0[f]"].mask, (net.lstm.weight_hh_l0[10:20].abs() >= 0.95 / 10**0.5).numpy()
    )
    by_name = anneal(net, lambda name, w: nulls.Normal(len(name)))
    assert all(a.null == nulls.Normal(len(name)) for name, a in by_name.items())
    assert all(a.null == NULL for a in anneal(net, NULL).values())
    with pytest.raises(InvalidOption, match=r"no null for embed\.weight"):
        anneal(net, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "either"}, "rule must be one of both, neyman"),
        ({"level": 5}, "between 0 and 1"),
        ({"level": "low"}, "percolation"),
        ({"level": True}, "level: expected a number or a string, got True"),
        ({"level": None}, "level: expected a number or a string, got None"),
        ({"null": np.ones(3)}, '"auto", "empirical" or a null'),
        ({"random_walk": None}, 'needs the random-walk test; with random_walk=None pass rule="neyman"'),
        ({"random_walk": "drunk"}, "calibrated, literal or None"),
        ({"null": "normal"}, '"auto", "empirical" or a null'),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(InvalidOption, match=message):
        anneal(np.ones((3, 3)), **arguments)


@pytest.mark.parametrize("w", [np.ones((3, 3), bool), np.ones((3, 3), np.int8), torch.ones(3, 3, dtype=torch.int32)])
def test_codes_are_not_weights(w):
    with pytest.raises(InvalidMatrix, match="expected floating-point weights, got"):
        anneal(w)


def test_without_the_second_test_there_are_no_classes():
    a = anneal(planted(), NULL, rule="neyman", random_walk=None)
    assert a.bandwidth is a.class_shares is a.random_walk is None
    with pytest.raises(InvalidOption, match="no classes"):
        a.classes  # noqa: B018


def test_a_models_own_initialisation_is_its_null():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.GRU(30, 8))
    drawn = nulls.for_module(model)
    for name, found in cx.anneal(model, null="init").items():
        assert found.null == drawn[name.partition("[")[0]], name
    with pytest.raises(cx.InvalidOption, match=r'null="init" needs the model'):
        cx.anneal(model[0].weight.detach(), null="init")


def test_alpha_delta0_and_tau_reach_the_test():
    w = np.random.default_rng(0).normal(size=(64, 64))
    a = cx.anneal(w, random_walk="literal", alpha=1e-9, delta0=0.25, tau=0.125)
    expected = random_walk_test(w, method="literal", alpha=1e-9, delta0=0.25, tau=0.125)
    assert a.bandwidth == expected.bandwidth
    assert a.bandwidth != cx.anneal(w, random_walk="literal").bandwidth
    rows = cx.analyze({"w": w}, random_walk="literal", alpha=1e-9, delta0=0.25, tau=0.125).rows
    assert rows[0].preference == pytest.approx(expected.shares["preference"])
    with pytest.raises(cx.InvalidOption, match="tau"):
        cx.analyze({"w": w}, tau=2.0)


def test_suppressed_edges_are_never_kept_by_both_tests():
    null = nulls.Normal(0.01)
    rng = np.random.default_rng(0)
    w = rng.normal(size=(200, 100))  # all far beyond the null
    planted = rng.random(w.shape) < 0.02
    w[planted] *= 0.01  # suppressed, and half of them still significant
    a, first = (cx.anneal(w, null, 0.5, rule=rule) for rule in ("both", "neyman"))
    assert (a.classes[planted] == -1).mean() > 0.9
    assert not (a.mask & (a.classes == -1)).any()
    assert (first.mask & (a.classes == -1)).any()


class TestMarks:
    """Under both tests the first pass marks what may be kept, and the blocks are found among the marks."""

    @pytest.mark.parametrize("shape", [(64, 100), (37, 64), (300, 515), (9, 1), (16, 640), (1000, 777)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["noise", "blocks", "few", "heavy"])
    def test_same_blocks_as_of_the_whole_matrix(self, shape, dtype, kind):
        rng = np.random.default_rng(len(kind))
        w = rng.normal(size=shape)
        if kind == "blocks":
            inside = rng.integers(0, 4, (shape[0], 1)) == rng.integers(0, 4, shape[1])
            w = 0.01 * w + np.where(inside, 3 * rng.normal(size=shape), 0)
        elif kind == "few":
            w[shape[0] // 2, shape[1] // 2] = 40
        elif kind == "heavy":
            w *= np.exp(rng.normal(size=shape))
        for matrix in (torch.tensor(w).to(dtype), torch.tensor(w).to(dtype).T.contiguous().T):
            for level in (0.001, 0.02, 0.1):
                a = anneal(matrix, Normal(1.0), level=level)
                marks = a._sums_and_marks[1]
                assert (marks is not None) == (COMPILES and level < 0.1 and matrix.is_contiguous())
                expected = decompose(a.mask)
                assert a.structure() == expected
                if marks is not None:  # also where reading everything would be faster
                    found = marked_components(a.magnitudes, a.column_patterns, marks)
                    assert BipartiteStructure.from_labels(*found) == expected

    def test_several_threads(self):
        w = torch.randn(2048, 4096, generator=torch.Generator().manual_seed(0))
        threads = torch.get_num_threads()
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            a = anneal(w, Normal(1.0), level=0.001)
            found.append((a.structure(), a.random_walk.column_sums))
        torch.set_num_threads(threads)
        assert found[0][0] == found[1][0] == decompose(a.mask)
        assert np.array_equal(found[0][1], found[1][1])

    def test_a_model_keeps_no_marks(self):
        (a,) = anneal(torch.nn.Linear(64, 64)).values()
        assert a._sums_and_marks[1] is None
        assert a.structure() == decompose(a.mask)
