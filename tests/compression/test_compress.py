"""Smaller models that compute the same: planted structure is found, real networks keep their answers."""

import copy
import itertools

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.compression import model_fit
from crystallite.compression.compress import compress
from crystallite.compression.probing import probe
from crystallite.core.errors import InvalidOption
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank import LowRankLinear
from tests.helpers import compressible as networks
from tests.helpers.compressible import relative_error
from tests.helpers.digits import accuracy


@pytest.fixture(scope="module")
def trained():
    return networks.trained_digits()


def samples(width, count=1200, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def share(model):
    before, after = cx.summary(model).macs
    return after / before


def test_a_planted_low_rank_is_found():
    model, fresh = networks.low_rank(), samples(40, seed=9)
    small = compress(model, budget=0.4, calibration=samples(40))
    assert isinstance(small[0], LowRankLinear)
    assert [type(layer) for layer in small[0].children()] == [nn.Linear, nn.Linear]
    assert share(small) <= 0.4
    assert relative_error(small(fresh), model(fresh)) < 1e-4


def test_repeated_hidden_neurons_go():
    model, fresh = networks.repeated(), samples(20, seed=9)
    small = compress(model, budget=0.25, calibration=samples(20), ridge=1e-6)
    assert small[0].out_features == small[2].in_features == 16
    assert relative_error(small(fresh), model(fresh)) < 1e-3


def test_neurons_of_a_gated_pair_go_from_all_three_layers():
    model, fresh = networks.Gated(), samples(16, seed=9)
    small = compress(model, budget=0.25, calibration=samples(16))
    assert [small.gate.out_features, small.up.out_features, small.down.in_features] == [16, 16, 16]
    assert small.down.bias is None
    assert relative_error(small(fresh), model(fresh)) < 1e-4


def test_planted_blocks_are_found_under_a_budget():
    model, fresh = networks.blocks(), samples(32, seed=9)
    small = compress(model, budget=0.25, calibration=samples(32))
    assert all(isinstance(small[i], BlockLinear) and small[i].n_blocks == 4 for i in (0, 2))
    assert relative_error(small(fresh), model(fresh)) < 1e-4


def test_planted_blocks_are_found_by_number():
    model, fresh = networks.blocks(), samples(32, seed=9)
    small = compress(model, blocks=4, calibration=samples(32))
    assert share(small) == 0.25
    assert relative_error(small(fresh), model(fresh)) < 1e-4


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_digits_keep_their_answers(trained, budget):
    model, calibration, x, y = trained
    small = compress(model, budget=budget, calibration=calibration)
    assert share(small) <= budget
    assert accuracy(small, x, y) >= accuracy(model, x, y) - 0.01


def test_blocks_of_digits_lose_little_and_are_fitted(trained):
    model, calibration, x, y = trained
    small = compress(model, blocks=2, calibration=calibration)
    assert share(small) == 0.5
    assert all(change.blocks == 2 for change in cx.summary(small).changes)
    assert accuracy(small, x, y) >= accuracy(model, x, y) - 0.04


def test_outputs_of_blocks_make_good_for_each_other(monkeypatch):
    """Where only sums of hidden neurons reach the output, those that read an input can stand for those that do not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 12), nn.Identity(), nn.Linear(12, 4)), torch.randn(600, 16)
    with torch.no_grad():
        model[2].weight.copy_(torch.randn(4, 1))
    errors = []
    for alone in (False, True):
        if alone:
            monkeypatch.setattr("crystallite.compression.model_fit.influence", lambda *_: {})
        small = compress(model, x, blocks=4, ignore="2")
        errors.append(cx.record(small).options.held_out_error)
    assert errors[0] < 0.5 * errors[1]


def test_joint_blocks_are_subnetworks(trained):
    model, calibration, x, y = trained
    small = compress(model, blocks=2, joint=True, calibration=calibration)
    parts = cx.subnetworks(small)
    assert len(parts.parts) == 2
    torch.testing.assert_close(parts(x), small(x), rtol=1e-4, atol=1e-4)
    assert accuracy(small, x, y) >= accuracy(model, x, y) - 0.10


def test_the_refit_is_what_keeps_the_function(trained):
    """The same neurons cut out of the original lose far more than the fitted ones."""
    model, calibration, x, _ = trained
    small = compress(model, budget=0.3, calibration=calibration)
    with torch.no_grad():  # of low rank or not
        first = small[0](torch.eye(64)) - small[0](torch.zeros(64))
        kept = torch.cdist(first.T, model[0].weight).argmin(1)
    assert 8 < len(kept.unique()) < 90
    cut = copy.deepcopy(model)
    with torch.no_grad():
        gone = torch.ones(96, dtype=torch.bool)
        gone[kept] = False
        cut[2].weight[:, gone] = 0
        assert relative_error(small(x), model(x)) < 0.5 * relative_error(cut(x), model(x))


def test_the_same_seed_gives_the_same_model(trained):
    model, calibration, _, _ = trained
    first, second = (compress(model, blocks=2, calibration=calibration, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_model_is_not_changed_and_modes_are_kept():
    model = networks.low_rank().train()
    before = copy.deepcopy(model.state_dict())
    for small in (
        compress(model, budget=0.5, calibration=samples(40)),
        compress(model, blocks=2, calibration=samples(40)),
    ):
        assert small.training
        assert not hasattr(model, "reorganization")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_held_out_batches_are_not_fitted_on(trained):
    model, calibration, _, _ = trained
    batches = list(calibration[:1000].split(100))
    other = [*batches[:-2], *(torch.rand_like(batch) for batch in batches[-2:])]
    first, second = (compress(model, budget=1.0, calibration=data).state_dict() for data in (batches, other))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_endless_loader_ends():
    model = networks.mlp(8, 8, 8)
    batch = samples(8, 8192)
    assert share(compress(model, budget=0.7, calibration=itertools.repeat(batch))) <= 0.7


@pytest.mark.parametrize(
    "data",
    [
        lambda x: x,
        lambda x: [(part, torch.zeros(len(part))) for part in x.split(300)],
        lambda x: ({"input": part} for part in x.split(300)),
        lambda x: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=300),
    ],
)
def test_calibration_data_may_come_in_any_form(data):
    model, x = networks.low_rank(), samples(40)
    small = compress(model, budget=0.4, calibration=data(x))
    assert relative_error(small(x), model(x)) < 1e-4


def test_what_cannot_be_fitted_is_reported():
    model = nn.Sequential(nn.Conv1d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    small = compress(model, budget=0.6, calibration=samples(16).unflatten(1, (2, 8)))
    became = {change.name: change.became for change in cx.summary(small).changes}
    assert became["0"] == "left alone: the 2 groups of its channels are apart already"


def test_constant_inputs_leave_a_layer_dense():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.varies, self.constant = networks.low_rank(), nn.Linear(16, 8)

        def forward(self, x):
            return self.varies(x) + self.constant(torch.ones(len(x), 16))

    model, x = Constant(), samples(40)
    small = compress(model, budget=0.5, calibration=x)
    assert type(small.constant) is nn.Linear
    assert relative_error(small(x), model(x)) < 1e-4


def test_a_layer_that_runs_twice_is_fitted_on_all_that_it_reads():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.again = nn.Linear(16, 16), nn.Linear(16, 16)
            with torch.no_grad():  # of what it reads first it needs two directions, of what it reads then two others
                kept = torch.linalg.qr(torch.randn(16, 16)).Q
                self.first.weight.copy_(kept[:, :2] @ torch.randn(2, 16))
                self.first.bias.zero_()
                self.again.weight.copy_(kept[:, 2:4] @ kept[:, :2].T + kept[:, 4:6] @ kept[:, 2:4].T)

        def forward(self, x):
            return self.again(self.again(self.first(x)).tanh())

    model, x = Twice(), samples(16)
    small = compress(model, budget=0.7, calibration=x)
    changes = {change.name: change for change in cx.summary(small).changes}
    assert changes["again"].macs_before == 2 * changes["first"].macs_before
    assert type(small.again) is not nn.Linear
    assert relative_error(small(x), model(x)) < 1e-3


def test_a_layer_that_runs_once_for_a_batch_counts_so():
    class WithTable(nn.Module):
        """As relative positions in DeBERTa: a table is projected in every call, whatever the batch."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("table", torch.randn(40, 16))
            self.read, self.positions = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.read(x) @ self.positions(self.table).T

    small = compress(WithTable(), list(samples(16).split(200)), budget=0.6)
    changes = {change.name: change for change in cx.summary(small).changes}
    assert changes["read"].macs_before == 5 * changes["positions"].macs_before


def test_a_weight_that_the_models_code_multiplies_itself_is_left_alone_and_counted():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.held, self.called = nn.Linear(16, 16), nn.Linear(16, 32)

        def forward(self, x):
            return self.called(nn.functional.linear(x, self.held.weight, self.held.bias).relu())

    small = compress(Own(), samples(16), budget=0.7)
    changes = {change.name: change for change in cx.summary(small).changes}
    assert "multiplies its weight itself" in changes["held"].became
    assert changes["held"].macs_after == 256
    assert share(small) <= 0.7


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) + torch.rand(8)


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        (networks.mlp(40, 40, 8), samples(40, 30), {"budget": 0.5}, "0: expected at least 40 positions .* got 24"),
        (networks.mlp(8, 8), samples(8) * torch.nan, {"budget": 0.5}, "hold NaN or infinity"),
        (Noisy(), samples(8), {"budget": 0.5}, "different outputs on the same inputs"),
        (nn.ReLU(), samples(8), {"budget": 0.5}, "no layer that can be fitted"),
        (networks.mlp(8, 8), samples(8), {}, "either budget= or blocks="),
        (networks.mlp(8, 8), samples(8), {"budget": 0.5, "blocks": 2}, "either budget= or blocks="),
        (networks.mlp(8, 8), samples(8), {"budget": 0.0}, "budget: expected a share"),
        (networks.mlp(8, 8), samples(8), {"budget": 0.001}, "below the smallest that can be reached"),
        (networks.mlp(8, 8), samples(8), {"blocks": 1}, "at least 2, got 1"),
        (networks.mlp(8, 8), samples(8), {"blocks": 9}, "no layer has the 9 outputs and inputs"),
        (networks.mlp(8, 8), samples(8), {"budget": 0.5, "joint": True}, "joint=True needs blocks="),
        (networks.mlp(8, 8), samples(8), {"budget": 0.5, "ridge": 0.0}, "ridge: expected a positive"),
        (networks.mlp(8, 8), samples(8, 1), {"budget": 0.5}, "at least two samples"),
        (networks.mlp(8, 8), samples(7), {"budget": 0.5}, "cannot be called with the batch"),
        (networks.mlp(8, 8), [], {"budget": 0.5}, "at least one sample"),
    ],
)
def test_bad_input_is_refused(model, data, options, message):
    with pytest.raises(InvalidOption, match=message):
        compress(model, calibration=data, **options)


def test_several_budgets_are_probed_once(monkeypatch):
    model, x, probed = networks.mlp(24, 48, 6), samples(24), []
    alone = [compress(model, x, budget=budget) for budget in (0.6, 0.3)]
    monkeypatch.setattr(model_fit, "probe", lambda *given: probed.append(0) or probe(*given))
    together = compress(model, x, budget=[0.6, 0.3])
    assert len(probed) == 1
    for one, other in zip(alone, together, strict=True):
        assert cx.summary(one).to_json() == cx.summary(other).to_json()
        assert torch.equal(one(x), other(x))
