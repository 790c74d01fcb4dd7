"""Blocks joined by hubs: planted hubs are found, the fit is the least squares, and what handles layers takes them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.hubs import own_shape, with_hubs
from crystallite.compression.latency import Latency
from crystallite.compression.operator_specs import OperatorSpec, approximate
from crystallite.compression.session import Session
from crystallite.data.calibration import Calibration
from crystallite.models.layers import find_units
from crystallite.operators.linear import BlockLinear
from crystallite.statistics.observer import ForwardPlan
from crystallite.statistics.regression import Moments, Regression
from tests.helpers.compressible import relative_error
from tests.helpers.tolerance import assert_close


def regression_of(x, weight, output_factor=None):
    both = Moments("layer")
    both.add(x, x @ (weight if output_factor is None else output_factor.T @ weight).T)
    own = weight if output_factor is None else output_factor.T @ weight
    found = Regression.solve(both, both, own, True, 1e-6)
    return found if output_factor is None else Regression(**{**vars(found), "output_factor": output_factor})


def even_cells(outputs, inputs, blocks):
    return tuple((np.arange(b, outputs, blocks), np.arange(b, inputs, blocks)) for b in range(blocks))


def hubs_of(spec, inputs):
    """The outputs that read everything, and the inputs that everything reads."""
    rows = [r for r, c in spec.blocks if len(c) == inputs]
    columns = set.intersection(*(set(c.tolist()) for _, c in spec.blocks))
    return set(np.concatenate(rows).tolist()) if rows else set(), columns


@settings(max_examples=30)
@given(
    st.integers(4, 20), st.integers(4, 20), st.integers(2, 4), st.floats(0, 1), st.integers(0, 2**32 - 1), st.booleans()
)
def test_hubs_stay_within_their_cost_and_every_output_is_in_one_cell(outputs, inputs, blocks, share, seed, weighed):
    torch.manual_seed(seed)
    output_factor = torch.linalg.cholesky(torch.cov(torch.randn(outputs, 3 * outputs).double())) if weighed else None
    regression = regression_of(torch.randn(60, inputs).double(), torch.randn(outputs, inputs).double(), output_factor)
    cells = even_cells(outputs, inputs, blocks)
    alone = sum(len(r) * len(c) for r, c in cells)
    macs = alone + share * (outputs * inputs - alone)
    spec = with_hubs(regression, cells, macs)
    assert spec.macs(outputs, inputs, (outputs, inputs)) == sum(len(r) * len(c) for r, c in spec.blocks) <= macs
    assert sorted(np.concatenate([r for r, _ in spec.blocks]).tolist()) == [*range(outputs)]
    for hub_rows, fewer in ((spec.hubs[0], spec), (1, with_hubs(regression, cells, outputs * inputs, most=(1, 2)))):
        rows, columns = hubs_of(fewer, inputs)
        assert fewer.hubs[0] <= min(hub_rows, len(rows))
        assert fewer.hubs[1] <= len(columns)
    assert fewer.hubs[1] <= 2


def test_the_fit_is_the_least_squares_of_what_each_output_may_read():
    torch.manual_seed(0)
    x, weight = torch.randn(200, 10).double() @ torch.randn(10, 10).double(), torch.randn(8, 10).double()
    spec = with_hubs(regression_of(x, weight), even_cells(8, 10, 2), 40 + 5 + 8, most=(1, 1))
    assert spec.hubs == (1, 1)
    centred = x - x.mean(0)
    found = approximate(weight, centred.T @ centred, spec)[0]
    for rows, columns in spec.blocks:
        for row in rows:
            best = np.linalg.lstsq(centred[:, columns].numpy(), (centred @ weight[row]).numpy(), rcond=None)[0]
            expected = torch.zeros(10, dtype=torch.float64)
            expected[columns] = torch.from_numpy(best)
            assert_close(found[row], expected)


@pytest.mark.parametrize("rounds", [1, 4])
def test_planted_hubs_are_found(rounds):
    torch.manual_seed(0)
    weight, cells = torch.zeros(24, 20).double(), even_cells(24, 20, 2)
    for rows, columns in cells:
        weight[np.ix_(rows, columns)] = torch.randn(12, 10).double()
    weight += 0.01 * torch.randn(24, 20)
    weight[[3, 10]], weight[:, [0, 7, 15]] = torch.randn(2, 20).double(), torch.randn(24, 3).double()
    regression = regression_of(torch.randn(400, 20).double(), weight)
    needed = 2 * 20 + 22 * 3 + sum(len(np.setdiff1d(r, [3, 10])) * len(np.setdiff1d(c, [0, 7, 15])) for r, c in cells)
    spec = with_hubs(regression, cells, needed, rounds)
    assert hubs_of(spec, 20) == ({3, 10}, {0, 7, 15})
    assert str(spec) == "2 blocks + 2 hub outputs + 3 hub inputs"
    found = approximate(regression.own, regression.metric, spec)[0]
    assert (
        regression.error(found)
        < 1e-3
        < regression.error(approximate(weight, regression.metric, OperatorSpec(0, cells))[0])
    )


def test_outputs_that_matter_more_become_hubs_first():
    torch.manual_seed(0)
    x, weight = torch.randn(400, 12).double(), torch.randn(12, 12).double()
    output_factor = torch.diag(torch.where(torch.arange(12) == 5, 10.0, 1.0)).double()
    spec = with_hubs(regression_of(x, weight, output_factor), even_cells(12, 12, 2), 72 + 6, most=(12, 0))
    assert hubs_of(spec, 12)[0] == {5}


def test_hubs_of_removed_neurons_are_paid_for_as_if_they_were_left():
    spec = OperatorSpec(
        0, ((np.arange(4), np.arange(6)), (np.arange(4, 8), np.r_[4:10]), (np.r_[8:10], np.arange(10))), hubs=(2, 2)
    )
    assert spec.macs(10, 10, (10, 10)) == 4 * 6 + 4 * 6 + 2 * 10
    assert spec.macs(6, 10, (10, 10)) == 2 * 6 + 2 * 6 + 2 * 10
    assert spec.macs(10, 6, (10, 10)) == 4 * 4 + 4 * 4 + 2 * 6
    assert spec.macs(1, 1, (10, 10)) == 1


def shuffled_hubs(outputs=48, inputs=40):
    """A weight whose nonzeros are three blocks, two hub outputs and one hub input, in mixed order."""
    torch.manual_seed(0)
    weight = torch.block_diag(*(torch.randn(outputs // 3, inputs // 3 + (b < inputs % 3)) for b in range(3)))
    weight[[0, 20]], weight[:, 5] = torch.randn(2, inputs), torch.randn(outputs)
    return weight[torch.randperm(outputs)][:, torch.randperm(inputs)]


def test_a_layer_that_has_hubs_keeps_them():
    weight = shuffled_hubs()
    spec = own_shape(weight)
    assert str(spec) == "3 blocks + 2 hub outputs + 1 hub input"
    assert torch.equal(approximate(weight, torch.eye(40), spec)[0] != 0, weight != 0)
    assert own_shape(torch.randn(30, 30)) is None


class Shared(nn.Module):
    """One layer to which 8 of 64 inputs say something of their own, and the others the same 20 things in any half."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x)


def shared_inputs(samples=1500):
    rng = torch.Generator().manual_seed(1)
    said = torch.randn(samples, 20, generator=rng)
    own = 2 * torch.randn(samples, 8, generator=rng)
    return torch.cat([own, said @ torch.randn(20, 56, generator=rng) / 20**0.5], 1)


@pytest.fixture(scope="module")
def fitted():
    model, x = Shared(), shared_inputs()
    return model, x, compress(model, budget=0.57, calibration=x, polish_steps=5)


def test_hub_inputs_are_chosen_where_blocks_lack_them(fitted):
    model, x, small = fitted
    assert type(small.layer) is BlockLinear
    assert cx.summary(small).changes[0].became.startswith("2 blocks + 8 hub inputs, error 0.")
    before, after = cx.summary(small).macs
    assert after == small.layer.macs <= 0.57 * before
    assert relative_error(small(x), model(x)) < 0.1


def planted_model():
    model = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 4))
    with torch.no_grad():
        model[0].weight.copy_(shuffled_hubs())
    return model


def test_layers_with_hubs_are_timed():
    model, x = Shared().eval(), shared_inputs()
    data = Calibration.read(x)
    units = {unit.name: unit for unit in find_units(model, ["*"], [])}
    price = Latency(Session(model, units, data, ForwardPlan.of(model, ["layer"], data.fitted[0]), 0.01, 0))
    regression = regression_of(x.double(), model.layer.weight.detach().double())
    spec = with_hubs(regression, even_cells(64, 64, 2), 2600)
    assert sum(spec.hubs)
    for outputs, inputs in ((64, 64), (20, 64), (64, 30)):
        assert price("layer", spec, outputs, inputs) > 0


def test_saved_and_loaded(fitted, tmp_path):
    _, x, small = fitted
    cx.save(small, tmp_path / "small")
    assert torch.equal(cx.load(tmp_path / "small", into=Shared())(x), small(x))
    assert_close(small.layer.to_dense()(x), small.layer(x))


@pytest.mark.parametrize("int8", [False, True])
def test_exported(fitted, tmp_path, int8):
    pytest.importorskip("onnxruntime")
    _, x, small = fitted
    done = cx.export(small, tmp_path / "small.onnx", x.split(50)[:2], int8=int8)
    assert done.deviation < (0.05 if int8 else 1e-5)


def test_hubs_and_fewer_neurons_in_one_model():
    """A planted layer whose neurons are also read by a layer that needs half of them only."""
    model, x = planted_model(), torch.randn(1200, 40)
    with torch.no_grad():
        model[2].weight[:, ::2] = 0
    small = compress(model, budget=0.25, calibration=x)
    assert isinstance(small[0], BlockLinear)
    assert small[0].out_features == 24
    before, after = cx.summary(small).macs
    assert after <= 0.25 * before
    assert relative_error(small(x), model(x)) < 0.05
