"""Recurrent stacks among the units that are fitted: planted ranks, the swap, the interface, and what is left alone."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.influence import influence
from crystallite.compression.recurrent import ExpandedLayer, expand_recurrent, step_by_step
from crystallite.compression.session import Session
from crystallite.core.errors import CheckpointError, CrystalliteWarning, InvalidOption
from crystallite.data.calibration import Calibration
from crystallite.models.description import build, describe
from crystallite.models.layers import find_units
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.statistics.observer import ForwardPlan
from tests.helpers.compressible import relative_error
from tests.helpers.recurrent import KINDS, Reader, sequences
from tests.helpers.tolerance import assert_close


def planted(kind="GRU", rank=4, **options):
    """A network whose products with inputs and states all have a small rank."""
    torch.manual_seed(0)
    model = Reader(kind, **options)
    with torch.no_grad():
        for parameter in model.recurrent.parameters():
            if parameter.ndim == 2:
                rows, columns = parameter.shape
                parameter.copy_(torch.randn(rows, rank) @ torch.randn(rank, columns) / (rank * columns) ** 0.5)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_rank_is_found_and_costs_nothing(kind):
    model, x = planted(kind), sequences()
    hidden, gates = 32, {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    needed = 4 * (gates * hidden + 12) + 4 * (gates * hidden + hidden) + 8 * hidden
    budget = needed / (gates * hidden * (12 + hidden) + 8 * hidden) + 1e-6
    small = compress(model, budget=budget, calibration=x, ignore=[])
    assert isinstance(small.recurrent, LowRankRecurrent)
    assert small.recurrent.layers[0].ranks == (4, 4)
    assert relative_error(small(x), model(x)) < 1e-4


@pytest.mark.parametrize(
    "options", [{"bidirectional": True}, {"num_layers": 2, "dropout": 0.5}, {"bias": False}], ids=str
)
def test_directions_layers_and_biases(options):
    model, x = planted(**options), sequences()
    small = compress(model, budget=0.5, calibration=x)
    assert isinstance(small.recurrent, LowRankRecurrent)
    assert len(small.recurrent.layers) == len(list(model.recurrent.parameters())) // (2 if "bias" in options else 4)
    model.eval(), small.eval()
    assert relative_error(small(x), model(x)) < 1e-3


@pytest.mark.parametrize("budget", [0.8, 0.5, 0.3])
def test_the_budget_is_kept_and_the_error_is_told(budget):
    torch.manual_seed(0)
    model, x = Reader(), sequences(400)
    small = compress(model, budget=budget, calibration=x)
    before, after = cx.summary(small).macs
    assert after <= budget * before
    assert before == 7 * sum(p.numel() for p in model.parameters() if p.ndim == 2)  # time steps
    fresh = torch.randn(100, 7, 12)
    expected = model(fresh).detach()
    lost = ((small(fresh).detach() - expected) ** 2).sum() / ((expected - expected.mean((0, 1))) ** 2).sum()
    assert float(lost) < 2 * cx.record(small).options.held_out_error + 1e-6
    assert {"inputs: ", "states: "} <= {part[:8] for part in cx.summary(small).changes[0].became.split("; ")}


def test_states_are_fitted_to_those_of_the_smaller_network():
    """A truncated matrix of the same rank, without any fitting, must lose more."""
    torch.manual_seed(0)
    model, x = Reader(), sequences(400)
    small = compress(model, budget=0.5, calibration=x, ignore="head")
    cut = Reader()
    cut.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, rank in zip(("weight_ih_l0", "weight_hh_l0"), small.recurrent.layers[0].ranks, strict=True):
            u, s, v = torch.linalg.svd(getattr(cut.recurrent, name), full_matrices=False)
            getattr(cut.recurrent, name).copy_((u[:, : rank or None] * s[: rank or None]) @ v[: rank or None])
    fresh = torch.randn(100, 7, 12)
    assert relative_error(small(fresh), model(fresh)) < 0.8 * relative_error(cut(fresh), model(fresh))


def test_time_steps_count_in_the_budget():
    class Last(Reader):
        def forward(self, x):
            return self.head(self.recurrent(x)[0][:, -1])

    torch.manual_seed(0)
    small = compress(Last(), budget=0.5, calibration=sequences(200, 5))
    changes = {change.name: change for change in cx.summary(small).changes}
    assert changes["recurrent"].macs_before == 5 * 96 * 44
    assert changes["head"].macs_before == 8 * 32


def test_a_stack_that_stays_dense_stays_pytorchs_own():
    torch.manual_seed(0)
    model, x = Reader(), sequences()
    small = compress(model, budget=1.0, calibration=x)
    assert type(small.recurrent) is nn.GRU
    assert relative_error(small(x), model(x)) < 1e-5


def test_initial_states_packed_sequences_and_final_states():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = nn.LSTM(12, 32)

        def forward(self, x, h, c):
            packed = pack_sequence([one[: 3 + i % 4] for i, one in enumerate(x)], enforce_sorted=False)
            states, final = self.recurrent(packed, (h[None], c[None]))
            return torch.cat(unpack_sequence(states)), *final

    torch.manual_seed(0)
    model = Packed()
    x, h, c = sequences(300), torch.randn(300, 32), torch.randn(300, 32)
    small = compress(
        model, budget=0.6, calibration=[((x[i : i + 50], h[i : i + 50], c[i : i + 50]),) for i in range(0, 300, 50)]
    )
    assert isinstance(small.recurrent, LowRankRecurrent)
    for found, expected in zip(small(x, h, c), model(x, h, c), strict=True):
        assert relative_error(found, expected) < 0.3


@pytest.mark.parametrize("mode", ["RNN_TANH", "RNN_RELU", "GRU", "LSTM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_operator_is_the_dense_module_with_the_product_of_its_factors(mode, dtype, batch_first):
    torch.manual_seed(0)
    ranks = [(3, 5), (0, 4), (2, 0), (0, 0)]
    small = LowRankRecurrent(mode, 6, 10, ranks, 2, batch_first=batch_first, bidirectional=True, dtype=dtype)
    dense = small.to_dense()
    x = torch.randn(7, 4, 6, dtype=dtype)
    batch = 7 if batch_first else 4
    state = torch.randn(4, batch, 10, dtype=dtype)
    given = (state, torch.randn_like(state)) if mode == "LSTM" else state
    ragged = pack_sequence([torch.randn(k, 6, dtype=dtype) for k in (3, 5, 1)], enforce_sorted=False)
    single = torch.randn(5, 6, dtype=dtype)
    for arguments in ((x, given), (x,), (ragged,), (single,)):
        for grad in (False, True):  # compiled steps, and PyTorch's kernels
            with torch.set_grad_enabled(grad):
                found, expected = small(*arguments), dense(*arguments)
            assert_close(*(getattr(made[0], "data", made[0]) for made in (found, expected)))
            for a, b in zip(*(made[1] if mode == "LSTM" else [made[1]] for made in (found, expected)), strict=True):
                assert_close(a, b)


def test_gradients_reach_the_factors():
    torch.manual_seed(0)
    small = LowRankRecurrent("GRU", 6, 10, [(3, 5)])
    small(torch.randn(4, 2, 6))[0].sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in small.parameters())


@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_is_the_same_function(kind, options):
    torch.manual_seed(0)
    dense = KINDS[kind](6, 10, **options)
    model = expand_recurrent(nn.ModuleDict({"a": dense}), ["a"], ExpandedLayer)["a"]
    x = pack_sequence([torch.randn(k, 6) for k in (5, 3, 1)])
    expected = dense(x)[0].data
    assert_close(model(x)[0].data, expected)
    with step_by_step(model):
        assert_close(model(x)[0].data, expected)


def test_saved_and_loaded(tmp_path):
    model, x = planted(), sequences()
    small = compress(model, budget=0.4, calibration=x)
    cx.save(small, tmp_path / "small")
    again = cx.load(tmp_path / "small", into=Reader())
    assert torch.equal(again(x), small(x))
    assert repr(again.recurrent) == repr(small.recurrent)
    alone = LowRankRecurrent("LSTM", 6, 10, [(3, 5), (0, 4)], 2, batch_first=True)
    cx.save(alone, tmp_path / "alone")
    assert torch.equal(cx.load(tmp_path / "alone")(torch.ones(2, 3, 6))[0], alone(torch.ones(2, 3, 6))[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_what_is_left_alone_says_why():
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.projected = nn.LSTM(12, 32, proj_size=4, batch_first=True)
            self.looped, self.head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 16)

        def forward(self, x):
            x, state = self.projected(x)[0], None
            for step in range(x.shape[1]):
                out, state = self.looped(x[:, step : step + 1], state)
            return self.head(out)

    torch.manual_seed(0)
    model, x = Several(), sequences()
    with pytest.raises(InvalidOption, match=r"budget 0\.9 cannot be reached: .* hold 1% of the model's multiply-adds"):
        compress(model, budget=0.9, calibration=x)
    with pytest.warns(CrystalliteWarning, match=r"hold 1% .*; left alone: projected \(69%\)"):
        small = compress(model, budget=0.995, calibration=x)
    became = {change.name: change.became for change in cx.summary(small).changes}
    assert became["projected"] == "left alone: a projected state (proj_size) mixes all blocks"
    assert became["looped"] == "left alone: a recurrent network that runs several times in a call"
    with pytest.raises(InvalidOption, match=r"expected an nn\.RNN, nn\.GRU or nn\.LSTM"):
        LowRankRecurrent.from_dense(model.projected)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_a_model_that_allows_no_gradients_is_fitted_all_the_same(without):
    class Closed(Reader):
        def forward(self, x):
            with without():
                return super().forward(x)

    torch.manual_seed(0)
    model, x = Closed(), sequences()
    small = compress(model, budget=0.6, calibration=x)
    assert isinstance(small.recurrent, LowRankRecurrent)
    assert relative_error(small(x), model(x)) < 0.3


def test_influence_is_what_an_error_does_to_the_outputs():
    """Of two outputs of a layer the head reads one only: the other does not matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 3))
    with torch.no_grad():
        model[1].weight[:, 1] = 0
    units = {unit.name: unit for unit in find_units(model, ["*"], [])}
    data = Calibration.read(torch.randn(50, 4))
    output_factor = influence(Session(model, units, data, ForwardPlan.of(model, ["0", "1"], data.fitted[0]), 0.01, 0))[
        "0"
    ]
    matters = (output_factor @ output_factor.T).diagonal()
    assert float(matters[0]) > 100 * float(matters[1])


def test_a_hostile_description_builds_nothing():
    said = describe(LowRankRecurrent("GRU", 6, 10, [(3, 5)]))
    for wrong in (
        {"ranks": [[3, -5]]},
        {"ranks": [[3]]},
        {"mode": "os.system"},
        {"num_layers": 2},
        {"hidden_size": "x"},
    ):
        with pytest.raises(CheckpointError, match="expected the description of a module"):
            build(said | wrong, "a.json")


def test_polishing_trains_the_factors():
    torch.manual_seed(0)
    model, x = Reader(), sequences()
    small = compress(model, budget=0.3, calibration=x, polish_steps=30)
    polish = cx.record(small).options.polish
    assert polish.after < polish.before


def test_the_model_itself_may_be_recurrent():
    torch.manual_seed(0)
    model, x = nn.GRU(12, 32, batch_first=True), sequences()
    small = compress(model, budget=0.6, calibration=x)
    assert isinstance(small, LowRankRecurrent)
    assert relative_error(small(x)[0], model(x)[0]) < 0.3
