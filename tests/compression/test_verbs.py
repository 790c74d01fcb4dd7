"""A compressed model is saved, loaded, summarised, validated and served like any other."""

import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.models.record import CompressedOptions, Record
from tests.helpers import compressible as networks
from tests.helpers.tolerance import assert_close

WAYS = [{"budget": 0.5}, {"blocks": 2}, {"blocks": 2, "joint": True}]


class Residual(nn.Module):
    """A model with code of its own: x + second(relu(first(x))), and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.head(x + self.second(torch.relu(self.first(x))))


class Beside(nn.Module):
    """Two layers beside each other: the rank of one is 3, the other one needs all it has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.small, self.needed = nn.Linear(24, 24), nn.Linear(24, 24)
        with torch.no_grad():
            self.small.weight.copy_(torch.randn(24, 3) @ torch.randn(3, 24) / 8)
            nn.init.orthogonal_(self.needed.weight)

    def forward(self, x):
        return torch.cat([self.small(x), self.needed(x)], -1)


def samples(width=24, count=600, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=WAYS, ids=str)
def both(request):
    model = networks.mlp(24, 48, 48, 6).eval()
    return model, cx.compress(model, calibration=samples(), **request.param)


def test_a_level_is_exact_and_a_budget_is_fitted():
    model = networks.mlp(24, 48, 6)
    exact = cx.reorganize(model, level=None, fold=False)
    assert cx.record(exact).method == "exact"
    assert torch.equal(exact[0].weight, model[0].weight)
    fitted = cx.compress(model, budget=0.5, calibration=samples())
    assert cx.record(fitted).method == "compressed"
    assert cx.record(fitted).options.budget == 0.5
    assert cx.summary(fitted).macs[1] <= 0.5 * cx.summary(fitted).macs[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "pass either budget= or blocks= or tolerance=, got none of them"),
        ({"tolerance": 0.1, "budget": 0.5}, "got budget=0.5, tolerance=0.1"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(cx.InvalidOption, match=message):
        cx.compress(networks.mlp(24, 48, 6), samples(), **options)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="buget"):
        cx.compress(networks.mlp(24, 48, 6), samples(), buget=0.5)
    with pytest.raises(TypeError, match="budget"):
        cx.reorganize(networks.mlp(24, 48, 6), budget=0.5)


def test_saved_and_loaded(both, tmp_path):
    model, small = both
    folder = cx.save(small, tmp_path / "small", source=model)
    again, x = cx.load(folder), samples(seed=9)
    assert torch.equal(again(x), small(x))
    assert repr(cx.summary(again)) == repr(cx.summary(small))
    assert cx.read_manifest(folder)["source_sha256"] == cx.source_sha256(model)


def test_loaded_into_a_model_with_code_of_its_own(tmp_path):
    torch.manual_seed(0)
    model = Residual().eval()
    small = cx.compress(model, budget=0.4, calibration=samples())
    cx.save(small, tmp_path / "small")
    with pytest.raises(cx.InvalidOption, match="into="):
        cx.load(tmp_path / "small")
    x = samples(seed=9)
    assert torch.equal(cx.load(tmp_path / "small", into=Residual())(x), small(x))


def test_it_cannot_be_restored(both):
    with pytest.raises(cx.InvalidOption, match="dense weights are gone"):
        cx.restore(both[1])
    with pytest.raises(cx.InvalidOption, match="reorganized already"):
        cx.compress(both[1], budget=0.5, calibration=samples())


def test_validated_and_served(both, tmp_path):
    model, small = both
    folder = cx.save(small, tmp_path / "small")
    with pytest.raises(cx.InvalidOption, match="never validated"):
        cx.Service.load(folder)
    x = samples(seed=9)
    verdict = cx.validate(model, folder, [x[:300], x[300:]], max_relative_deviation=20.0)
    assert verdict.passed
    assert verdict.macs[1] <= 0.5 * verdict.macs[0]
    expected = (small(x) - model(x)).norm(dim=1) / model(x).norm(dim=1)
    observed = torch.from_numpy(verdict.comparison.outputs[0].difference / verdict.comparison.outputs[0].norm)
    assert_close(observed.float(), expected.detach())
    with cx.Service.load(folder) as service:
        assert_close(service.infer(x[:7]), small(x[:7]).detach())


def test_the_sweep_of_a_fitted_model_anneals_its_original(both):
    model, small = both
    verdict = cx.validate(model, small, samples(seed=9), levels=[0.01], max_relative_deviation=20.0)
    assert [point.level for point in verdict.sweep.points] == [0.01]


def test_the_summary_says_what_was_asked_for_and_what_was_protected():
    small = cx.compress(Beside(), budget=0.7, calibration=samples())
    notes = cx.summary(small).notes
    assert "fitted to a budget of 70%" in notes[0]
    assert notes[1] == "layers were fitted on 512 samples and judged by 88 others"
    assert "kept dense" in notes[2]
    assert "needed (" in notes[2]
    assert cx.summary(small).changes[0].macs_after < 576 / 2
    assert all(note in repr(cx.summary(small)) for note in notes)
    assert cx.summary(small).to_json()["notes"] == list(notes)


@pytest.mark.parametrize(
    "options",
    [
        {"sensitive": 5}, {"polish": {"steps": 1}}, {"held_out_error": "x"}, {"guarantee": [1]}, {"budget": True},
        {"objective": "beauty"}, {"type": "os.system"}, {"another": 1},
    ],
)  # fmt: skip
def test_a_record_that_makes_no_sense_is_refused(options):
    plain = Record(CompressedOptions(0.01, 0, 0.1, budget=0.5)).to_plain()
    assert Record.from_plain(plain, "a.json").options.budget == 0.5
    with pytest.raises(cx.CheckpointError, match=r"a\.json: expected the record of a reorganization, got .*record"):
        Record.from_plain({**plain, "options": {**plain["options"], **options}}, "a.json")


def test_an_exact_result_has_no_notes():
    assert cx.summary(cx.reorganize(networks.mlp(24, 48, 6), level=None)).notes == ()
