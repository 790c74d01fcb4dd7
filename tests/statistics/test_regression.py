"""Least squares from sums agrees with least squares from samples, whatever the batches."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crystallite.compression.operator_specs import OperatorSpec, approximate, block_weights, low_rank_factors
from crystallite.compression.pruning import eliminate
from crystallite.compression.sequential import fitted_operator
from crystallite.core.errors import InvalidOption
from crystallite.statistics.regression import Moments, Regression
from tests.helpers.tolerance import RELATIVE

EXACT = RELATIVE[torch.float64] * 1e4  # sums of squares lose half of the digits where most of them cancel


def problem(seed=0, inputs=7, outputs=5, rows=90, held=40):
    rng = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=rng, dtype=torch.float64)
    x = torch.randn(rows + held, inputs, generator=rng, dtype=torch.float64) @ mixing + 3
    own = torch.randn(outputs, inputs, generator=rng, dtype=torch.float64)
    t = x @ own.T + torch.randn(rows + held, outputs, generator=rng, dtype=torch.float64) + 5
    return x[:rows], t[:rows], x[rows:], t[rows:], own


def moments(x, t, cuts=()):
    found = Moments("layer")
    for part, target in zip(x.tensor_split(list(cuts)), t.tensor_split(list(cuts)), strict=True):
        if len(part):
            found.add(part, target)
    return found


def solved(seed=0, with_bias=True, ridge=0.01, cuts=(), **sizes):
    x, t, held_x, held_t, own = problem(seed, **sizes)
    return Regression.solve(moments(x, t, cuts), moments(held_x, held_t), own, with_bias, ridge)


def oracle(x, t, own, with_bias, ridge):
    """Ridge regression towards the layer's own weight, as one stacked least-squares problem on the samples."""
    mean_x, mean_t = (x.mean(0) * with_bias, t.mean(0) * with_bias)
    x, t = x - mean_x, t - mean_t
    pull = (ridge * (x**2).sum(0).mean()).sqrt()
    stacked = torch.cat([x, pull * torch.eye(x.shape[1], dtype=x.dtype)]), torch.cat([t, pull * own.T])
    weight = torch.linalg.lstsq(*stacked).solution.T
    return weight, mean_t - weight @ mean_x


@settings(max_examples=25)
@given(st.integers(0, 99), st.booleans(), st.lists(st.integers(1, 89), max_size=3))
def test_sums_give_the_solution_of_the_samples(seed, with_bias, cuts):
    x, t, held_x, held_t, own = problem(seed)
    found = solved(seed, with_bias, cuts=sorted(cuts))
    weight, bias = oracle(x, t, own, with_bias, 0.01)
    assert torch.allclose(found.weight, weight, rtol=0, atol=EXACT * float(weight.abs().max()))
    assert torch.allclose(found.bias(found.weight), bias, rtol=0, atol=EXACT * 100)
    other = torch.randn_like(weight)
    direct = ((held_x @ other.T + found.bias(other) - held_t) ** 2).sum() / ((held_t - held_t.mean(0)) ** 2).sum()
    assert found.error(other) == pytest.approx(float(direct), rel=EXACT)


def test_a_layer_that_fits_already_stays_as_it_is():
    x, _, held, _, own = problem()
    found = Regression.solve(moments(x, x @ own.T), moments(held, held @ own.T), own, True, 0.5)
    assert torch.allclose(found.weight, own, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("outputs", "inputs"), [(5, 7), (9, 4)])
def test_rank_errors_are_those_of_the_truncated_weights(outputs, inputs):
    found = solved(outputs=outputs, inputs=inputs)
    up, down = low_rank_factors(found.weight, found.metric)
    expected = [found.error(up[:, :r] @ down[:r]) for r in range(1, min(outputs, inputs) + 1)]
    assert found.rank_errors(up, down)[: len(expected)] == pytest.approx(expected, rel=EXACT)


@settings(max_examples=20)
@given(st.integers(0, 99), st.sampled_from([(5, 7), (9, 4), (6, 6)]), st.integers(1, 3))
def test_low_rank_is_the_best_of_its_rank(seed, size, rank):
    """Independent oracle: the truncated SVD of W M^½, with M^½ from an eigendecomposition."""
    found = solved(seed, outputs=size[0], inputs=size[1])
    values, vectors = torch.linalg.eigh(found.metric)
    output_factor = vectors * values.sqrt() @ vectors.T
    expected = torch.linalg.svdvals(found.weight @ output_factor)[rank:].norm()
    weight = approximate(found.weight, found.metric, OperatorSpec(rank))[0]
    assert torch.linalg.matrix_rank(weight) == rank
    assert float(((found.weight - weight) @ output_factor).norm()) == pytest.approx(float(expected), rel=1e-6)


def test_blocks_are_each_the_best_for_their_inputs():
    x, t, held_x, held_t, own = problem(inputs=6, outputs=4)
    found = Regression.solve(moments(x, t), moments(held_x, held_t), own, True, 1e-9)
    cells = [(np.array([0, 2]), np.array([1, 4, 5])), (np.array([1, 3]), np.array([0, 2, 3]))]
    weight = block_weights(found.weight, found.metric, cells)
    for rows, columns in cells:
        own_fit = torch.linalg.lstsq((x - x.mean(0))[:, columns], (t - t.mean(0))[:, rows]).solution.T
        assert torch.allclose(weight[rows][:, columns], own_fit, atol=1e-5)
        others = np.setdiff1d(np.arange(6), columns)
        assert not weight[rows][:, others].any()


@settings(max_examples=20)
@given(st.integers(0, 99), st.integers(1, 6))
def test_what_is_kept_is_fitted_again(seed, size):
    found = solved(seed)
    kept, weight = eliminate(found, [6, size])[size]
    inner = found.restricted(kept)
    assert len(kept) == size
    assert torch.allclose(weight[:, kept], inner.weight, rtol=0, atol=1e-6 * float(weight.abs().max()))
    assert found.error(weight) == pytest.approx(inner.error(inner.weight), rel=1e-6)


def test_elimination_keeps_what_matters():
    """Three inputs carry the targets, five are noise."""
    x = torch.randn(500, 8, dtype=torch.float64)
    t = x[:, [1, 4, 6]] @ torch.randn(3, 4, dtype=torch.float64)
    both, own = moments(x, t), torch.zeros(4, 8)
    kept, weight = eliminate(Regression.solve(both, both, own, True, 1e-9), [3])[3]
    assert kept.tolist() == [1, 4, 6]
    assert not weight[:, [0, 2, 3, 5, 7]].any()


def test_sums_take_the_same_room_however_many_samples():
    found, most = Moments("layer"), 0
    for _ in range(400):
        found.add(torch.randn(20, 6), torch.randn(20, 3))
        most = max(most, len(pickle.dumps(found)))
    assert found.means[0].shape == (6,)
    assert len(pickle.dumps(found)) < 4000
    assert most < 4 * 9 * 2500 + 50_000  # 2,048 rows wait at most


def test_large_constant_activations_cost_no_digits():
    x = torch.randn(2000, 3) + 10_000
    t = (x - 10_000) @ torch.eye(3)
    both = moments(x[:1500], t[:1500], [500, 1000])
    held = moments(x[1500:], t[1500:])
    found = Regression.solve(both, held, torch.zeros(3, 3), True, 1e-9)
    assert torch.allclose(found.weight, torch.eye(3).double(), atol=1e-2)


def test_nan_is_named():
    with pytest.raises(InvalidOption, match=r"encoder\.0: its activations .* NaN"):
        Moments("encoder.0").add(torch.tensor([[torch.nan]]), torch.zeros(1, 1))


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_layer_that_goes_on_as_it_is_needs_no_targets(with_bias):
    """The same as with what it writes as its targets."""
    x, _, held, _, own = problem()
    bias = torch.arange(5.0, dtype=torch.float64) if with_bias else None
    t, held_t = (rows @ own.T + (0 if bias is None else bias) for rows in (x, held))
    expected = Regression.solve(moments(x, t), moments(held, held_t), own, with_bias, 0.01)
    found = Regression.of_layer(moments(x, x[:, :0]), moments(held, held[:, :0]), own, bias, 0.01)
    for name, value in vars(expected).items():
        torch.testing.assert_close(vars(found)[name], value, rtol=EXACT, atol=EXACT)
    other = torch.randn_like(own)
    assert found.error(other) == pytest.approx(expected.error(other), rel=EXACT)


def test_the_error_of_a_layer_that_reads_little_needs_only_what_it_reads():
    found = solved()
    kept, weight = eliminate(found, [3])[3]
    assert found.error(weight, kept) == pytest.approx(found.error(weight), rel=EXACT)
    torch.testing.assert_close(weight[:, kept], found.restricted(kept).weight, rtol=EXACT, atol=EXACT)


def test_outputs_that_matter_more_are_kept_better():
    """Where outputs are weighed, low ranks and blocks do less damage; what loses nothing is the same as without."""
    x, t, held, held_t, own = problem()
    rng = torch.Generator().manual_seed(5)
    output_factor = torch.linalg.cholesky(torch.diag(torch.tensor([100.0, 1, 1, 1, 0.01], dtype=torch.float64)))
    output_factor = output_factor + 0.1 * torch.tril(torch.randn(5, 5, generator=rng, dtype=torch.float64), -1)
    plain = Regression.solve(moments(x, t), moments(held, held_t), own, True, 0.01)
    weighed = Regression.solve(
        moments(x, t @ output_factor), moments(held, held_t @ output_factor), output_factor.T @ own, True, 0.01
    )
    weighed = replace(weighed, output_factor=output_factor)
    torch.testing.assert_close(weighed.own, plain.weight, rtol=EXACT, atol=EXACT)
    found, expected = fitted_operator(weighed, OperatorSpec()), fitted_operator(plain, OperatorSpec())
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=EXACT, atol=EXACT)

    def output_error(form):
        wrong = output_factor.T @ (form.weight - plain.weight)
        return float(((wrong @ plain.metric) * wrong).sum())

    cells = ((np.array([0, 1]), np.array([0, 1])), (np.array([2, 3, 4]), np.array([2, 3])))
    for spec, most in ((OperatorSpec(2), 0.9), (OperatorSpec(blocks=cells), 0.95)):
        assert output_error(fitted_operator(weighed, spec)) < most * output_error(fitted_operator(plain, spec))


def test_moments_of_shares_add_up_whatever_their_origins_are():
    x, t, more_x, more_t, own = problem()
    whole, shares = Moments("a"), [Moments("a") for _ in range(4)]
    for rows, targets in ((x[:50], t[:50]), (x[50:] + 9, t[50:] - 4), (more_x, more_t)):
        whole.add(rows, targets)
    for share, rows, targets in zip(shares, (x[:50], x[50:] + 9, more_x), (t[:50], t[50:] - 4, more_t), strict=False):
        share.add(rows, targets)  # the last one has seen nothing
    total = Moments.total([shares[3], *(pickle.loads(pickle.dumps(share)) for share in shares[:3])])
    assert total.samples == whole.samples
    for expected, found in zip((*whole.means, *whole.covariances), (*total.means, *total.covariances), strict=True):
        assert torch.allclose(found, expected, rtol=EXACT, atol=EXACT)
    one, other = (Regression.solve(m, m, own, True, 0.01).weight for m in (whole, total))
    assert torch.allclose(one, other, rtol=EXACT, atol=EXACT)
    assert Moments.total(shares[3:]).samples == 0


def test_what_is_solved_in_the_memory_of_the_moments_is_the_best_of_all_ridges():
    x, t, held_x, held_t, own = problem(rows=12)
    ridges = [1e-4, 0.1, 1.0, 10.0]
    every = [Regression.solve(moments(x, t), moments(held_x, held_t), own, False, ridge) for ridge in ridges]
    expected = min(every, key=lambda one: one.error(one.weight))
    fitted, held = moments(x, t), moments(held_x, held_t)
    found = Regression.spend(fitted, held, own, ridges)
    for name in ("weight", "metric", "held_xx", "held_xt"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=EXACT, atol=EXACT)
    assert found.error(found.weight) == pytest.approx(expected.error(expected.weight), rel=EXACT)
    assert fitted.xx.numel() == held.xx.numel() == 1  # no copy is left


def test_moments_go_on_after_they_have_been_read():
    x, t, more_x, more_t, _ = problem(inputs=150)
    read, unread = moments(x, t), moments(x, t)
    assert all(bool(value.isfinite().all()) for value in read.covariances)
    for both in (read, unread):
        both.add(more_x, more_t)
    for one, other in zip(read.covariances, unread.covariances, strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)
