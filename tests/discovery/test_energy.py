"""Energies against the Jacobian of `torch.func`, sample by sample."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from crystallite.discovery.energy import jacobian_energy
from tests.helpers.tolerance import RELATIVE


def assert_equal(found, expected, dtype=torch.float32):
    np.testing.assert_allclose(found, expected, rtol=0, atol=10 * RELATIVE[dtype] * max(np.abs(expected).max(), 1e-30))


@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 40), st.integers(0, 2**31))
@settings(max_examples=20)
def test_equals_the_mean_square_of_the_jacobian_times_the_variance(inputs, outputs, samples, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, 7), nn.GELU(), nn.Linear(7, outputs)).double()
    x = torch.randn(samples, inputs).double() * 3 + 5
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x).detach()
    expected = (jacobian.square().mean(0) * x.var(0, correction=0)).numpy()
    found = jacobian_energy(model, x, hidden=True)
    assert_equal(found.inputs, expected, torch.float64)
    hidden = model[0](x)
    by_hidden = torch.func.vmap(torch.func.jacrev(model[1:]))(hidden).detach()
    expected = (by_hidden.square().mean(0) * hidden.var(0, correction=0)).detach().numpy()
    assert_equal(found.hidden["0"], expected, torch.float64)
    assert set(found.hidden) == {"0"}  # the last layer returns the outputs themselves


def test_batches_and_resamples_do_not_change_the_mean():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(600, 5)
    whole = jacobian_energy(model, x, resamples=200)
    pieces = jacobian_energy(model, list(x.split(100)))
    assert_equal(pieces.inputs, whole.inputs)
    assert pieces.samples == whole.samples == 600
    np.testing.assert_allclose(whole.resampled.mean(0), whole.inputs, rtol=0.05)
    assert whole.resampled.std(0).max() > 0


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_models(kind):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent, self.head = kind(3, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.recurrent(x)[0][:, -1])

    found = jacobian_energy(Last(), torch.randn(30, 4, 3))
    assert found.inputs.shape == (2, 12)
    assert (found.inputs > 0).all()


def test_arguments_beside_the_features_are_passed_on():
    class Masked(nn.Module):
        def forward(self, mask, features=None):
            return {"loss": torch.tensor(0.0), "logits": features * mask}

    x, mask = torch.randn(50, 3), torch.tensor([[1, 0, 1]]).expand(50, 3)
    energy = jacobian_energy(Masked(), {"mask": mask, "features": x}).inputs
    assert (np.diag(energy) > 0).tolist() == [True, False, True]
    assert np.count_nonzero(energy) == 2


def test_layers_used_twice_are_left_out():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.once, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.once(self.shared(self.shared(x)).tanh()))

    assert set(jacobian_energy(Twice(), torch.randn(20, 4), hidden=True).hidden) == {"once"}
