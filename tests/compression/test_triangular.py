"""Recurrent states in triangular blocks: planted groups are found, fitted, and run in Frobenius form."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.partitions import triangular_cells
from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.description import build, describe
from crystallite.operators.frobenius import frobenius_form
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.operators.recurrent_layer import GATES, BlockRecurrentLayer
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression
from tests.compression.networks import relative_error
from tests.compression.test_recurrent import KINDS, Reader, sequences
from tests.operators.tolerance import assert_close


def group_of(hidden, groups, seed=3):
    return np.random.default_rng(seed).permutation(np.arange(hidden) % groups)


def later(group, gates):
    """(gates·hidden, hidden): where a unit would hear one of a later group."""
    return torch.from_numpy(np.tile(group[:, None] < group, (gates, 1)))


def planted(kind, groups=2, noise=0.0):
    """A network, all of whose states matter, in which no group hears a later one but for some noise."""
    torch.manual_seed(0)
    model = Reader(kind)
    model.head = nn.Identity()
    weight = model.recurrent.weight_hh_l0
    with torch.no_grad():
        weight.copy_(torch.linalg.qr(torch.randn(weight.shape)).Q * len(weight) ** 0.5 / 6)
        weight[later(group_of(32, groups), len(weight) // 32)] *= noise
    return model


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("gates", [1, 3])
def test_planted_groups_are_found(groups, gates):
    torch.manual_seed(0)
    group = group_of(32, groups)
    weight = torch.randn(gates * 32, 32).double()
    weight[later(group, gates)] *= 0.05
    both = Moments("states")
    x = torch.randn(400, 32).double()
    both.add(x, x @ weight.T)
    cells = triangular_cells(Regression.solve(both, both, weight, True, 1e-6), groups)
    for number, (rows, columns) in enumerate(cells):
        assert set((rows % 32).tolist()) == set(np.flatnonzero(group == number).tolist())
        assert len(rows) == gates * 32 // groups
        assert columns.tolist() == np.flatnonzero(group <= number).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_triangular_states_are_chosen_where_low_ranks_lose(kind):
    model, x = planted(kind, noise=0.02), sequences(400, inputs=12)
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    needed = (0.75 * 32 + 12) / (32 + 12)
    small = compress(model, budget=needed + 1e-6, calibration=x)
    part = small.recurrent.layers[0]
    assert part.form is not None
    assert part.ranks == (0, 0)
    assert "states: 2 triangular blocks, error 0." in cx.summary(small).changes[0].became
    assert sorted(block.size for block in part.form.blocks) == [16, 16]
    before, after = cx.summary(small).macs
    assert after <= (needed + 1e-6) * before
    assert not part.dense_weights()[1][later(group_of(32, 2), gates)].any()
    assert relative_error(small(x), model(x)) < 0.05


def mixed(mode, dtype=torch.float32, batch_first=False, bias=True):
    """Two layers, two directions: ranks and forms in all combinations."""
    torch.manual_seed(0)
    edges = np.tril(np.ones((3, 3), bool)).repeat(4, 0).repeat(4, 1)
    form, _ = frobenius_form(edges, np.zeros((12, 1), bool), GATES[mode], 1)
    forms = [form, None, form, None]
    small = LowRankRecurrent(
        mode,
        6,
        12,
        [(3, 0), (0, 4), (0, 0), (2, 0)],
        2,
        bias,
        batch_first,
        bidirectional=True,
        dtype=dtype,
        forms=forms,
    )
    for part in small.layers:
        if part.form is not None:
            weight = torch.randn(GATES[mode] * 12, 12, dtype=dtype) / 4
            order = np.random.default_rng(0).permutation(12)
            weight *= torch.from_numpy(np.tile(edges[order][:, order], (GATES[mode], 1)))
            own = torch.randn(GATES[mode] * 12, dtype=dtype) if bias else None
            part.recurrent = BlockRecurrentLayer.of_states(mode, weight, own)
            assert_close(part.recurrent.weight, weight)
    return small


@pytest.mark.parametrize("mode", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_operator_is_the_dense_module_with_its_weights(mode, dtype, batch_first, bias):
    small = mixed(mode, dtype, batch_first, bias)
    dense = small.to_dense()
    state = torch.randn(4, 7 if batch_first else 4, 12, dtype=dtype)
    given = (state, torch.randn_like(state)) if mode == "LSTM" else state
    x = torch.randn(7, 4, 6, dtype=dtype)
    ragged = pack_sequence([torch.randn(k, 6, dtype=dtype) for k in (3, 5, 1)], enforce_sorted=False)
    for arguments in ((x, given), (x,), (ragged,), (torch.randn(5, 6, dtype=dtype),)):
        for grad in (False, True):  # compiled blocks, and PyTorch's kernels
            with torch.set_grad_enabled(grad):
                found, expected = small(*arguments), dense(*arguments)
            assert_close(*(getattr(made[0], "data", made[0]) for made in (found, expected)))
            for a, b in zip(*(made[1] if mode == "LSTM" else [made[1]] for made in (found, expected)), strict=True):
                assert_close(a, b)


def test_gradients_reach_the_blocks_and_stay_inside_them():
    small = mixed("GRU")
    zeros = [part.dense_weights()[1] == 0 for part in small.layers]
    optimizer = torch.optim.SGD(small.parameters(), 0.1)
    small(torch.randn(4, 2, 6))[0].square().sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in small.parameters())
    optimizer.step()
    for zero, part in zip(zeros, small.layers, strict=True):
        assert torch.equal(part.dense_weights()[1] == 0, zero)


def test_saved_and_loaded(tmp_path):
    small, x = mixed("LSTM"), torch.randn(5, 3, 6)
    cx.save(small, tmp_path / "small")
    again = cx.load(tmp_path / "small")
    assert repr(again) == repr(small)
    assert "ranks 3 and 3 blocks; full and 4; full and 3 blocks; 2 and full" in repr(small)
    with torch.inference_mode():
        assert torch.equal(again(x)[0], small(x)[0])


def test_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    model, x = planted("GRU", noise=0.02), sequences(400)
    small = compress(model, budget=(0.75 * 32 + 12) / 44 + 1e-6, calibration=x)
    assert cx.export(small, tmp_path / "small.onnx", x.split(50)[:2]).deviation < 1e-5


def test_forms_that_do_not_fit_are_refused():
    said = describe(mixed("GRU"))
    form = said["forms"][0]
    for wrong in ([form] * 3, [form | {"hidden": 13}] * 4, [form | {"gates": 4}] * 4, ["x"] * 4):
        with pytest.raises(CheckpointError, match="expected the description of a module"):
            build(said | {"forms": wrong}, "a.json")
    with pytest.raises(InvalidOption, match="form: expected 1 gates and 12 units, got 3 and 12"):
        LowRankRecurrent("RNN_TANH", 6, 12, [(0, 0)], forms=[mixed("GRU").layers[0].form])
