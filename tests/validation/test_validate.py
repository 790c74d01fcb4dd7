"""Verdicts on planted systems: good ones, bad ones, and ones that are good on average only."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import crystallite as cx
from crystallite.core.errors import InvalidOption
from crystallite.models.manifest import read_manifest
from crystallite.validation import Verdict, validate
from tests.helpers.block_models import block_linear


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(block_linear(16, 32, 4, 0), nn.ReLU(), block_linear(32, 8, 4, 1)).eval()


def labelled(model, samples=600, batch=128):
    """Data that the model classifies without a mistake."""
    x = torch.randn(samples, 16)
    with torch.no_grad():
        y = model(x).argmax(1)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, samples, batch)]


class WrongOn(nn.Module):
    """A model that is right but for samples whose first feature exceeds a limit: there the classes are turned round."""

    def __init__(self, model, limit):
        super().__init__()
        self.model, self.limit = model, limit

    def forward(self, x):
        y = self.model(x)
        return torch.where(x[:, :1] > self.limit, -y, y)


def test_an_exact_reorganization_passes():
    model = classifier()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    verdict = validate(model, small, labelled(model), "accuracy", min_agreement=0.99)
    assert verdict.passed
    assert len(verdict.reasons) == 3
    assert verdict.metric.original == verdict.metric.reorganized == 1.0
    assert verdict.macs[1] * 4 == verdict.macs[0] == 128 * (16 * 32 + 32 * 8)
    assert verdict.parameters[1] < verdict.parameters[0]
    assert [latency.batch for latency in verdict.latency] == [128, 88]


def test_a_broken_reorganization_fails_by_every_rule():
    model = classifier()
    verdict = validate(model, classifier(seed=1), labelled(model), "accuracy", min_agreement=0.99)
    assert not verdict.passed
    assert [o.rule for o in verdict.outcomes if o.status == "violated"] == [
        "max_drop",
        "min_agreement",
        "max_relative_deviation",
    ]


def test_a_slice_that_goes_wrong_is_caught_by_the_worst_case():
    """Right on 99.4 % of the samples: the mean metric, its drop and the agreement are within generous limits."""
    torch.manual_seed(0)
    model = classifier()
    data = labelled(model, 4000)
    x = torch.cat([batch[0] for batch in data])
    wrong = np.flatnonzero((x[:, 0] > 2.5).numpy())
    assert 0 < len(wrong) < 0.02 * len(x)
    averages = {"max_drop": 0.03, "min_agreement": 0.97}
    broken = WrongOn(model, 2.5)
    assert validate(model, broken, data, "accuracy", max_relative_deviation=None, layers=False, **averages).passed
    verdict = validate(model, broken, data, "accuracy", layers=False, **averages)
    assert [o.rule for o in verdict.outcomes if not o.passed] == ["max_relative_deviation"]
    assert {case.index for case in verdict.worst} <= set(wrong)
    assert f"{len(wrong)} beyond it" in verdict.reasons[0]


@pytest.mark.parametrize("as_function", [True, False])
def test_a_slice_that_goes_wrong_is_named(as_function):
    torch.manual_seed(0)
    model = classifier()
    data = labelled(model, 4000)

    def side(inputs, target):
        return ["far" if first > 2.0 else "near" for first in inputs[:, 0]]

    labels = [label for x, y in data for label in side(x, y)]
    verdict = validate(
        model, WrongOn(model, 2.5), data, "accuracy", max_drop=0.05, max_relative_deviation=None,
        slices=side if as_function else labels, layers=False,
    )  # fmt: skip
    assert [o.reason.split(" (")[0] for o in verdict.outcomes if not o.passed] == ["slice far"]
    assert {part.label: part.samples for part in verdict.slices} == {s: labels.count(s) for s in ("far", "near")}
    assert next(p for p in verdict.slices if p.label == "near").reorganized == 1.0


@settings(max_examples=10)
@given(st.integers(1, 300), st.booleans())
def test_batch_size_does_not_change_the_verdict(batch, right):
    model = classifier()
    torch.manual_seed(2)
    x = torch.randn(300, 16)
    other = model if right else WrongOn(model, 1.0)
    whole = validate(model, other, x, min_agreement=0.95, layers=False)
    found = validate(model, other, iter(x.split(batch)), min_agreement=0.95, layers=False)
    assert found.passed == whole.passed == right
    # products of other batch sizes are summed in another order
    np.testing.assert_allclose(found.comparison.deviation, whole.comparison.deviation, atol=1e-5)


def test_too_few_samples_are_said_to_be_too_few():
    model = classifier()
    verdict = validate(model, model, torch.randn(20, 16), min_agreement=0.99)
    assert not verdict.passed
    assert [o.status for o in verdict.outcomes] == ["unproven", "passed"]
    assert "so few samples" in verdict.reasons[0]


class Returns(nn.Module):
    """Two linear layers called by keyword, whose outputs come in a given shape."""

    def __init__(self, wrap):
        super().__init__()
        self.first, self.second, self.wrap = nn.Linear(4, 3), nn.Linear(4, 2), wrap

    def forward(self, x, y):
        return self.wrap(self.first(x), self.second(y))


@pytest.mark.parametrize(
    ("wrap", "paths"),
    [
        (lambda a, b: (a, (b, None)), ["output[0]", "output[1][0]"]),
        (lambda a, b: {"a": a, "states": [b]}, ["output.a", "output.states[0]"]),
    ],
)
def test_inputs_and_outputs_of_any_shape(wrap, paths):
    model = Returns(wrap)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.second.weight[0] += 5.0
    x, y = torch.randn(2, 30, 4)
    for data in ([{"x": x, "y": y}], [((x, y),)], [((x, y), torch.zeros(30))], iter([{"x": x, "y": y}])):
        verdict = validate(model, other, data)
        assert [o.path for o in verdict.comparison.outputs] == paths
        assert [o.passed for o in verdict.outcomes] == [True, False]
        assert {layer.name: layer.deviation > 0 for layer in verdict.layers} == {"first": False, "second": True}


def test_layers_of_folded_chains_are_compared_in_the_original_order():
    model = classifier()
    small = cx.reorganize(model, level=None, only_if_faster=False)
    assert not isinstance(small[0], nn.Linear)
    verdict = validate(model, small, list(torch.randn(50, 16).split(20)))
    assert [layer.name for layer in verdict.layers] == ["0", "2"]
    assert max(layer.deviation for layer in verdict.layers) < 1e-5
    assert not verdict.skipped_layers
    assert not any(module._forward_hooks for module in (*model.modules(), *small.modules()))


def test_layer_deviation_is_the_relative_error_over_all_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[0] += 1.0
    x = torch.randn(40, 4)
    found = {layer.name: layer.deviation for layer in validate(model, other, list(x.split(9))).layers}
    with torch.no_grad():
        first, changed = model[0](x), other[0](x)
        expected = [(changed - first).norm() / first.norm(), (other(x) - model(x)).norm() / model(x).norm()]
    assert [found["0"], found["2"]] == pytest.approx([e.item() for e in expected], rel=1e-4)


def test_layers_of_other_shapes_are_skipped_and_named():
    model, other = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    verdict = validate(model, other, torch.randn(10, 4))
    assert "differ in shape" in verdict.skipped_layers["0"]
    assert [layer.name for layer in verdict.layers] == ["1"]


def test_layers_that_became_two_are_compared_in_their_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    other = copy.deepcopy(model)
    other[0] = cx.LowRankLinear(nn.Linear(8, 4, bias=False), nn.Linear(4, 8))
    other.append(nn.Linear(4, 4))
    verdict = validate(model, other, torch.randn(30, 8))
    assert [layer.name for layer in verdict.layers] == ["0", "2"]
    assert verdict.layers[0].deviation > 0.1
    assert verdict.skipped_layers == {"3": "only in one of the models"}


def test_the_verdict_is_kept_in_the_artifact(tmp_path):
    model = classifier()
    small = cx.reorganize(model, level=None, only_if_faster=False).train()
    folder = cx.save(small, tmp_path / "small")
    verdict = validate(model, folder, torch.randn(50, 16))
    manifest = read_manifest(folder)
    assert manifest["verdict"]["passed"] is verdict.passed is True
    assert manifest["verdict"]["weights_sha256"] == manifest["weights_sha256"]
    again = validate(model, str(folder), torch.randn(50, 16), min_agreement=0.99)
    assert read_manifest(folder)["verdict"]["passed"] is again.passed is False


def test_nan_fails_with_its_index():
    model = classifier()
    x = torch.randn(30, 16)
    x[12, 3] = float("nan")
    verdict = validate(model, model, x, max_relative_deviation=None, min_agreement=0.5)
    assert not verdict.passed
    assert "in 1 output, of sample 12" in verdict.reasons[0]
    json.dumps(verdict.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5)), r"the original gives different outputs.*\.eval\(\)"),
        (nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), "1 is in training mode"),
    ],
)
def test_models_in_training_are_refused_and_unchanged(model, message):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidOption, match=message):
        validate(model, model, torch.randn(64, 16))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert validate(model.eval(), model, torch.randn(64, 16)).passed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one sample"),
        ([torch.zeros(0, 16)], "at least one sample"),
        (7, "got int"),
        (["text"], "no tensor"),
        ([(torch.zeros(2, 16), torch.zeros(2), torch.zeros(2))], r"got 3 parts.*\(\(a, b\), target\)"),
        ([((torch.zeros(2, 16), torch.zeros(2, 16)), torch.zeros(2))], "cannot be called with the batch at sample 0"),
        ([torch.tensor(3.0)], "a single number"),
        ([torch.zeros(2, 16), torch.zeros(2)], "cannot be called with the batch at sample 2.*a list of batches"),
        ((torch.zeros(2, 16), torch.zeros(2), torch.zeros(2)), "got 3 parts.*several batches go into a list"),
    ],
)
def test_bad_data_is_refused(data, message):
    model = classifier()
    with pytest.raises(InvalidOption, match=message):
        validate(model, model, data)


def test_different_outputs_are_refused_by_name():
    with pytest.raises(InvalidOption, match=r"output: the original returns \(5, 3\).*\(5, 2\)"):
        validate(nn.Linear(4, 3), nn.Linear(4, 2), torch.zeros(5, 4))


def test_a_wrong_number_of_slice_labels_is_refused():
    model = classifier()
    with pytest.raises(InvalidOption, match="one label for each of 5 samples, got 4"):
        validate(model, model, torch.randn(5, 16), slices="abcd")


def test_a_verdict_prints_and_exports():
    model = classifier()
    x = torch.randn(40, 16)
    verdict = validate(model, WrongOn(model, 0.0), x, slices=lambda x, _: (x[:, 0] > 0).tolist())
    assert isinstance(verdict, Verdict)
    text = repr(verdict)
    assert text.startswith("FAILED on 40 samples")
    assert "worst cases" in text
    assert "slice True" in text
    assert max(map(len, text.splitlines()[6:])) < 120
    assert "<pre" in verdict._repr_html_()
    plain = json.loads(json.dumps(verdict.to_json(), allow_nan=False))
    assert plain["passed"] is False
    assert plain["worst"][0]["deviation"] == pytest.approx(2.0)
    frame = verdict.to_pandas()
    assert len(frame) == 40
    assert frame.deviation.max() == pytest.approx(2.0)
