"""A budget may count parameters or measured time."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import crystallite as cx
from crystallite.compression.compress import compress
from crystallite.compression.int8_latency import Int8Latency
from crystallite.compression.latency import Latency
from crystallite.compression.operator_specs import OperatorSpec
from crystallite.compression.session import Session
from crystallite.data.calibration import Calibration
from crystallite.models.layers import find_units
from crystallite.statistics.observer import ForwardPlan
from tests.helpers import compressible as networks


def session_of(model, x):
    units = {unit.name: unit for unit in find_units(model, ["*"], [])}
    data = Calibration.read(x)
    return Session(model, units, data, ForwardPlan.of(model, list(units), data.fitted[0]), 0.01, 0)


@pytest.fixture
def work(monkeypatch):
    """The clock counts operations, of PyTorch and of 8-bit products, so that what else the machine does is not seen."""
    session_of_sizes = Int8Latency._session
    quantised = []

    def counted(self, sizes):
        session = session_of_sizes(self, sizes)

        def run(outputs, fed):
            quantised.append(sum(2 * len(fed["x0"]) * a * b for a, b in pairwise(sizes)))
            return session.run(outputs, fed)

        return SimpleNamespace(run=run)

    monkeypatch.setattr(Int8Latency, "_session", counted)
    with FlopCounterMode(display=False) as counter:
        clock = SimpleNamespace(perf_counter=lambda: counter.get_total_flops() + sum(quantised))
        for module in ("latency", "int8_latency"):
            monkeypatch.setattr(f"crystallite.compression.{module}.time", clock)
        yield


@pytest.mark.usefixtures("work")
def test_smaller_layers_are_timed_as_what_they_would_be():
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    price = Latency(session_of(model, torch.randn(600, 512)))
    dense, narrow, thin = (
        price("0", OperatorSpec(), 1024, 512),
        price("0", OperatorSpec(), 128, 512),
        price("0", OperatorSpec(8), 1024, 512),
    )
    assert narrow < 0.7 * dense
    assert thin < 0.7 * dense
    assert price("0", OperatorSpec(), 1024, 512) == dense  # measured once
    assert price("2", OperatorSpec(), 512, 256) < price("2", OperatorSpec(), 512, 1024)


@pytest.mark.usefixtures("work")
def test_8_bit_products_are_timed_where_there_will_be_some():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval()
    price = Int8Latency(session_of(model, torch.randn(600, 512)))
    dense, thin = price("0", OperatorSpec(), 1024, 512), price("0", OperatorSpec(8), 1024, 512)
    assert price("0", OperatorSpec(), 128, 512) < 0.7 * dense
    assert thin < 0.7 * dense
    assert price("2", OperatorSpec(), 512, 256) < price("2", OperatorSpec(), 512, 1024)


@pytest.mark.usefixtures("work")
def test_a_budget_of_8_bit_time_reaches_onnx_runtime():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    small = compress(model, budget=0.6, objective="int8", calibration=list(torch.randn(2600, 64).split(650)))
    assert small[0].out_features < 256
    assert "a budget of 60% of the measured time with 8-bit weights" in cx.summary(small).notes[0]


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
def test_convolutions_are_timed_with_the_channels_that_are_left(kind):
    places = [9] * (1 if kind is nn.Conv1d else 2)
    model = nn.Sequential(kind(8, 16, 3), nn.ReLU(), kind(16, 8, 3)).eval()
    price = Latency(session_of(model, torch.randn(60, 8, *places)))
    taps = 3 ** len(places)
    for spec, outputs, inputs in (
        (OperatorSpec(), 8, 4 * taps),
        (OperatorSpec(3), 8, 16 * taps),
        (OperatorSpec(), 8, 16 * taps),
    ):
        assert price("2", spec, outputs, inputs) > 0


def test_a_budget_of_time_is_kept_by_what_comes_out(monkeypatch):
    """Where time is multiply-adds: what a machine makes of them is no matter of a test."""

    def measured(self, module, x, spec, outputs, inputs, embedded):
        return spec.macs(outputs, inputs, tuple(module.weight.shape))

    monkeypatch.setattr(Latency, "_measured", measured)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).eval()
    small = compress(model, budget=0.4, objective="latency", calibration=list(torch.randn(2600, 64).split(650)))
    assert cx.record(small).options.objective == "latency"
    assert "a budget of 40% of the measured time" in cx.summary(small).notes[0]
    assert cx.summary(small).macs[1] <= 0.4 * cx.summary(small).macs[0]


def test_a_budget_of_parameters_counts_weights_once():
    """A convolution's few weights are used at every place: multiply-adds would cut there first."""
    model = nn.Sequential(nn.Conv1d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30, 32)).eval()
    small = compress(model, budget=0.5, objective="parameters", calibration=torch.randn(700, 4, 32))
    before, after = (sum(p.numel() for p in net.parameters() if p.ndim > 1) for net in (model, small))
    assert after <= 0.5 * before


def test_what_is_no_objective_is_refused():
    model, x = networks.mlp(16, 32, 4), torch.randn(80, 16)
    with pytest.raises(cx.InvalidOption, match=r"objective must be one of macs, .*, int8, got 'speed'"):
        compress(model, budget=0.5, objective="speed", calibration=x)
    with pytest.raises(cx.InvalidOption, match="objective= says what a budget is a share of"):
        cx.compress(model, blocks=2, objective="latency", calibration=x)
