"""All methods side by side: what they cost, how good they are, and why some are skipped."""

import importlib.util
import inspect

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.baselines import METHODS, Row, compare, table
from tests.helpers.prunable import data, hidden_from, perceptron
from tests.helpers.transformers_models import llama, tokens

SHAPED = ["magnitude", "Wanda score", "SVD", "random blocks"]
ONNX = [name for name in METHODS if "ONNX" in name]


@pytest.fixture(scope="module")
def pair():
    net = perceptron(hidden=48, alive=24)  # a share of .3 does all they do
    return net, cx.compress(net, budget=0.3, calibration=data(256, 2))


@pytest.fixture(scope="module")
def rows(pair):
    labels = [pair[0](x).argmax(1) for x in data()]
    judged = list(zip(data(), labels, strict=True))
    return {row.name: row for row in compare(*pair, judged, calibration=data(64, 2), methods=SHAPED)}


def test_each_method_keeps_to_the_budget(pair, rows):
    assert list(rows) == ["dense", "fitted", *SHAPED]
    assert rows["dense"].share == 1
    assert rows["dense"].macs == 8 * 48 + 48 * 48 + 48 * 4
    for name in ("fitted", *SHAPED):
        assert 0.1 < rows[name].share <= 0.3 * (1.03 if name == "random blocks" else 1)
        assert rows[name].macs == pytest.approx(rows[name].share * rows["dense"].macs, abs=1)
    assert all(row.latency_ms > 0 and row.batch == 16 and not row.skipped for row in rows.values())


def test_integer_targets_are_classes(rows):
    assert {row.measure for row in rows.values()} == {"accuracy"}
    assert rows["dense"].quality == 1
    assert rows["fitted"].quality > 0.95
    assert rows["magnitude"].quality == 1  # half of the neurons do nothing
    assert rows["random blocks"].quality < 0.9


def test_without_targets_the_outputs_are_compared(pair):
    found = {
        measure: {row.name: row for row in compare(*pair, data(), measure, calibration=data(), methods=["SVD"])}
        for measure in (None, "cosine", "agreement")
    }
    assert found[None]["SVD"].measure == "cosine"
    assert found[None]["SVD"].quality == found["cosine"]["SVD"].quality < 1
    assert found["agreement"]["SVD"].quality < 1
    assert all(by["dense"].quality == pytest.approx(1) for by in found.values())


def test_a_loss_counts_negative(pair):
    judged = [(x, pair[0](x).detach()) for x in data()]
    found = {row.name: row for row in compare(*pair, judged, "loss", calibration=data(), methods=["SVD"])}
    assert found["dense"].quality == 0
    assert found["SVD"].quality < 0


def test_models_beside_are_measured_too(pair):
    other = nn.Sequential(nn.Dropout(), nn.Linear(8, 4)).train()
    (*_, row) = compare(*pair, data(), calibration=data(), methods=[], beside={"narrow": other})
    assert (row.name, row.family, row.macs) == ("narrow", "narrow", 32)
    assert other.training


def test_given_groups_are_used(pair):
    (*_, row) = compare(*pair, data(), calibration=data(), methods=["magnitude"], groups=[])
    assert row.skipped == "no hidden neurons, channels or heads were found that can be taken out"
    assert row.macs is row.quality is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["Wonda"]}, "methods must be one of magnitude, .* got 'Wonda'"),
        ({"metric": "accurracy"}, "accurracy"),
        ({"metric": "accuracy"}, "needs a target"),
        ({"targets": "none"}, "targets: no layer with weights matches 'none'"),
        ({"data": []}, "at least one sample"),
    ],
)
def test_bad_input(pair, change, message):
    given = {"data": data(), "calibration": data(), "methods": ["SVD"], **change}
    with pytest.raises(cx.InvalidOption, match=message):
        compare(*pair, **given)


def test_a_model_that_is_not_smaller_is_refused(pair):
    with pytest.raises(cx.InvalidOption, match="expected a smaller model"):
        compare(pair[0], pair[0], data(), calibration=data())


def test_ignored_layers_do_not_count(pair):
    """The budget is a share of the other layers, and the ignored one is left alone by all."""
    net = pair[0]
    small = cx.compress(net, budget=0.5, calibration=data(256, 2), ignore="0")
    found = compare(net, small, data(), calibration=data(), methods=["SVD", "random blocks"], ignore="0")
    for row in found[1:]:
        assert 8 * 48 < row.macs <= 1.03 * (8 * 48 + (48 * 48 + 48 * 4) / 2)


def test_missing_packages_are_named(pair, monkeypatch):
    hidden_from(monkeypatch, "torch_pruning", "onnxruntime")
    found = {row.name: row for row in compare(*pair, data(), calibration=data(), methods=["Torch-Pruning", *ONNX])}
    assert "pip install torch-pruning" in found["Torch-Pruning"].skipped
    assert all("pip install 'crystallite[onnx]'" in found[name].skipped for name in ONNX)
    text = table(list(found.values()))
    assert text.count("Skipped: ") == 1 + len(ONNX)
    assert "dense" in text


class Torn(nn.Module):
    """Looks at its numbers, so that no graph can be had."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) if float(x.sum()) > -1e9 else x


def test_what_cannot_be_followed_is_skipped_and_the_rest_measured():
    torch.manual_seed(0)
    net = Torn().eval()
    small = cx.compress(net, budget=0.5, calibration=data(256, 2))
    found = {row.name: row for row in compare(net, small, data(), calibration=data())}
    for name in ("magnitude", "Wanda score", *ONNX):
        assert found[name].skipped
    for name in ("SVD", "random blocks"):
        assert found[name].share <= 0.5
    if importlib.util.find_spec("torch_pruning"):
        assert found["Torch-Pruning"].share <= 0.5  # it follows models in its own way


def test_the_table_says_what_quality_is():
    rows = [Row("dense", "dense", "cosine", 10, 1.0, 1.0, 4, 1.0), Row("SVD", "low rank", "cosine", skipped="no")]
    assert table(rows).splitlines()[0].split("  ")[-1] == "cosine"


def test_grouped_queries_are_pruned():
    """4 heads of queries share 2 of keys and values: the groups of heads overlap."""
    (model, _), (small, _) = llama(), llama(intermediate_size=24)
    texts = [{"input_ids": tokens(8, count)} for count in (4, 4, 2)]
    found = compare(model, small, texts, calibration=texts, methods=["magnitude", "Wanda score"], ignore="lm_head")
    rows = {row.name: row for row in found}
    for name in ("magnitude", "Wanda score"):
        assert not rows[name].skipped
        assert rows[name].share <= rows["fitted"].share


class Breaks(nn.Module):
    """Fails on the second batch."""

    def __init__(self, model):
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise ArithmeticError("out of range\nand so on")
        return self.model(x)


def test_a_method_that_fails_is_a_row(pair, monkeypatch):
    def fails(*arguments):
        raise ZeroDivisionError("nothing to divide")

    names = inspect.unwrap(compare).__globals__
    monkeypatch.setitem(names, "decomposed", fails)
    monkeypatch.setitem(names, "random_blocks", lambda model, *rest: Breaks(model))
    rows = {row.name: row for row in compare(*pair, data(), calibration=data(), methods=SHAPED)}
    assert rows["SVD"].skipped == "ZeroDivisionError: nothing to divide"
    assert rows["random blocks"].skipped == "ArithmeticError: out of range"
    assert all(rows[name].quality is not None for name in ("dense", "fitted", "magnitude", "Wanda score"))
    assert "Skipped: SVD (ZeroDivisionError" in table(list(rows.values()))
    with pytest.raises(ArithmeticError):
        compare(*pair, data(), calibration=data(), methods=[], beside={"mine": Breaks(pair[0])})
