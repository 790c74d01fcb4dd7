"""The run itself finds rate, smoothing, block loss and partition, on samples that it holds out."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import crystallite as cx
from crystallite.cli.main import main
from crystallite.data.batch import batches
from crystallite.models.record import Recipe, RecipeSearch
from crystallite.separation import find_chains, random_partition, search, stand_in, upgrade
from crystallite.separation import task as tasks
from crystallite.separation.search import Choices, find_recipe
from crystallite.separation.stand_in import can_stand_in
from tests.helpers import digits


@pytest.fixture(scope="module")
def small_digits():
    """A network of 32 hidden neurons that has seen 640 images, and these."""
    loader, *_ = digits.data()
    x, y = (torch.cat(parts)[:640] for parts in zip(*loader, strict=True))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    return digits.train(net, DataLoader(TensorDataset(x, y), 64), 10).eval(), x, y


def loader(small_digits):
    return DataLoader(TensorDataset(*small_digits[1:]), 64, shuffle=True)


def run(small_digits, **options):
    given = {"blocks": 2, "loss": F.cross_entropy, "ignore": "4", "epochs": 2, **options}
    return upgrade(small_digits[0], **{"data": loader(small_digits), **given})


def planted(small_digits, rates, loss=F.cross_entropy):
    """What is found where only the learning rate is open."""
    net, x, y = small_digits
    data = list(zip(x.split(64), y.split(64), strict=True))
    partition = random_partition(find_chains(net, ignore=["4"], example=x), 2)
    thresholds = dict.fromkeys(partition.layers, 0.0)
    task = tasks.Task(net, {"given": partition}, thresholds, ["2"], loss, list(batches(data)), 0)
    return find_recipe(task, Choices(("given",), rates), data, None, 5, False, False)


@pytest.mark.parametrize("loss", [F.cross_entropy, None])
@pytest.mark.parametrize("rates", [(1e-6, 5e-3), (5e-3, 1e-6), (5e-3, 1e3)])
def test_the_better_rate_is_found(small_digits, rates, loss):
    best, found = planted(small_digits, rates, loss)
    assert best.learning_rate == 5e-3
    assert [trial.recipe.learning_rate for trial in found.trials] == list(rates)
    assert (found.trained_on, found.held_out, found.epochs) == (512, 128, 2)
    assert found.cost == pytest.approx(2 * 2 * 8 / (5 * 10))  # two trials, two of five epochs, eight of ten batches


def test_what_is_no_number_is_never_best(small_digits):
    best, found = planted(
        small_digits, (5e-3, 1e-3), lambda output, target: F.cross_entropy(output, target) * torch.nan
    )
    assert [trial.score for trial in found.trials] == [None, None]
    assert best.learning_rate == 5e-3


def unseen():
    """Images that the network was not trained on."""
    _, x, y = digits.data()
    return list(zip(x.split(64), y.split(64), strict=True))


def test_samples_that_the_model_has_seen_choose_the_rate_alone(small_digits):
    found = cx.record(run(small_digits, partition="regions")).options
    recipes = [trial.recipe for trial in found.search.trials]
    assert recipes == [Recipe("regions", rate, 0.0, 1.0) for rate in (5e-3, 1e-2, 2e-2)]
    assert found.recipe == min(found.search.trials, key=lambda trial: trial.score).recipe
    assert found.search.partition is None
    assert "chosen from 3 trials by 128 held-out samples" in str(found)


def test_a_stand_in_that_has_not_seen_them_chooses_the_partition(small_digits):
    found = cx.record(run(small_digits)).options
    first = found.search.partition
    assert [trial.recipe for trial in first.trials] == [Recipe(one, 5e-3, 0.0, 1.0) for one in ("regions", "spread")]
    assert (first.trained_on, first.held_out) == (448, 128)  # one epoch is half, not two fifths: fewer batches
    assert first.cost == pytest.approx((1 + 2 * 7 / 16) * 8 / 10)  # a training and two trials, on eight of ten batches
    regions, spread = (trial.score for trial in first.trials)
    best = "spread" if spread < 0.95 * regions else "regions"
    assert {trial.recipe.partition for trial in found.search.trials} == {found.recipe.partition} == {best}
    assert "partition chosen from 2 trials by 128 held-out samples, at 1.5 × the cost" in str(found)


def test_blocks_that_need_inputs_of_both_kinds_get_them():
    """Inputs are noisy copies of two numbers, and the class is the sign of their product: one kind does not say."""
    torch.manual_seed(0)
    kinds = torch.randn(1280, 2)
    x, y = kinds.repeat_interleave(8, 1) + 0.1 * torch.randn(1280, 16), (kinds.prod(1) > 0).long()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    data = DataLoader(TensorDataset(x, y), 64)
    small = run((digits.train(net, data, 20).eval(), x, y), epochs=4, learning_rate=5e-3)
    found = cx.record(small).options
    scores = {trial.recipe.partition: trial.score for trial in found.search.partition.trials}
    assert scores["spread"] < 0.7 * scores["regions"]
    assert found.recipe.partition == "spread"


def test_a_stand_in_that_diverges_says_nothing(small_digits, monkeypatch):
    monkeypatch.setattr(stand_in, "_RATE", 1e30)
    found = cx.record(run(small_digits, learning_rate=5e-3, epochs=1)).options
    assert found.search.partition is None
    assert found.recipe.partition == "regions"


def test_a_model_that_cannot_be_drawn_anew_keeps_the_first_partition(small_digits):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = small_digits[0], nn.Parameter(torch.ones(10))

        def forward(self, x):
            return self.net(x) * self.scale

    assert can_stand_in(small_digits[0])
    assert not can_stand_in(Own())
    found = cx.record(run((Own(), *small_digits[1:]), ignore="net.4", learning_rate=5e-3, epochs=1)).options
    assert found.search.partition is None
    assert found.recipe.partition == "regions"


def test_others_turn_every_knob(small_digits):
    found = cx.record(run(small_digits, held_out=unseen())).options
    recipes = [trial.recipe for trial in found.search.trials]
    assert len(recipes) == len(set(recipes)) == 7
    assert {recipe.partition for recipe in recipes} == {"regions", "spread"}
    assert {recipe.learning_rate for recipe in recipes} == {5e-3, 1e-2, 2e-2}
    assert {recipe.smoothing for recipe in recipes} == {0.0, 0.1}
    assert {recipe.block_loss for recipe in recipes} == {0.0, 1.0, 3.0}
    assert found.recipe == min(found.search.trials, key=lambda trial: trial.score).recipe
    assert (found.search.trained_on, found.search.held_out) == (512, 397)


def test_the_same_seed_finds_the_same(small_digits, tmp_path):
    one, two = run(small_digits), run(small_digits)
    assert cx.record(one).options == cx.record(two).options
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    again = cx.load(cx.save(one, tmp_path / "small"))
    assert cx.record(again).options == cx.record(one).options


class Interrupted(Exception):
    pass


def test_an_interrupted_run_does_not_search_again(small_digits, tmp_path, monkeypatch):
    options = {"block_loss": 0.0, "partition": "spread", "smoothing": 0.0}
    whole = run(small_digits, **options)

    def metric(model):
        raise Interrupted  # before the first step of the training that counts, after what was found is written

    with pytest.raises(Interrupted):
        run(small_digits, metric=metric, checkpoint=tmp_path / "state", **options)
    (step,) = (tmp_path / "state").iterdir()
    assert len(json.loads((step / "state.json").read_text())["record"]["search"]["trials"]) == 3
    monkeypatch.setattr(search, "_score", None)  # nothing may be tried
    resumed = run(small_digits, checkpoint=tmp_path / "state", **options)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())
    assert cx.record(resumed).options == cx.record(whole).options
    with pytest.raises(cx.InvalidOption, match=r"another run \(choices differ"):
        run(small_digits, checkpoint=tmp_path / "state", **{**options, "smoothing": 0.1})


def test_without_labels_the_rate_is_searched(small_digits):
    images = list(small_digits[1].split(64))
    found = cx.record(run(small_digits, data=images, loss=None)).options
    assert len(found.search.trials) == 3
    assert (found.recipe.smoothing, found.recipe.block_loss) == (0.0, 0.0)
    assert found.recipe == min(found.search.trials, key=lambda trial: trial.score).recipe


def test_what_is_given_is_not_searched(small_digits, monkeypatch):
    given = {"learning_rate": 3e-3, "block_loss": 0.5, "partition": "spread"}
    found = cx.record(run(small_digits, held_out=unseen(), epochs=1, **given)).options
    assert [t.recipe for t in found.search.trials] == [Recipe("spread", 3e-3, s, 0.5) for s in (0.0, 0.1)]
    monkeypatch.setattr(search, "_score", None)
    found = cx.record(run(small_digits, epochs=1, smoothing=0.1, **given)).options
    assert found.search == RecipeSearch(note="every knob was given")
    assert found.recipe == Recipe("spread", 3e-3, 0.1, 0.5)


def test_too_little_data_is_not_held_out(small_digits):
    _, x, y = small_digits
    found = cx.record(run(small_digits, data=[(x, y)], epochs=1)).options
    assert not found.search.trials
    assert found.search.partition is None
    assert "640 samples in 1 batches are too few to hold some out" in str(found)
    assert (found.recipe.learning_rate, found.recipe.block_loss, found.recipe.smoothing) == (5e-3, 1.0, 0.0)


def test_smoothing_reaches_the_loss(small_digits):
    """The loss sees the smoothed labels while it trains."""
    seen = []

    def loss(output, target):
        seen.append(target)
        return F.cross_entropy(output, target)

    run(small_digits, loss=loss, smoothing=0.2, learning_rate=5e-3, block_loss=0.0, partition="spread", epochs=1)
    (smooth,) = {round(float(target.max()), 4) for target in seen[-5:]}
    assert smooth == pytest.approx(0.82)
    with pytest.raises(cx.InvalidOption, match="smoothing: needs labels, and a loss that takes probabilities"):
        run(small_digits, loss=lambda output, target: F.nll_loss(output.log_softmax(1), target), smoothing=0.1)


def test_labels_that_do_not_count_stay_as_they_are():
    output, target = torch.randn(3, 4), torch.tensor([1, -100, 2])
    assert torch.equal(tasks.smoothed(F.cross_entropy, 0.1)(output, target), F.cross_entropy(output, target))


def test_the_command_searches_by_default(small_digits, tmp_path, capsys):
    net, x, y = small_digits
    torch.save(net.state_dict(), tmp_path / "net.pt")
    np.savez(tmp_path / "data.npz", inputs=x.numpy(), labels=y.numpy())
    (tmp_path / "made.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), "
        "nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))\n"
    )
    command = ["upgrade", f"{tmp_path}/made.py:build", "--weights", str(tmp_path / "net.pt"), "--blocks", "2", "--json"]
    command += ["--data", str(tmp_path / "data.npz"), "--batch", "64", "--ignore", "4", "--epochs", "1"]
    assert main([*command, "--out", str(tmp_path / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)["upgrade"]
    assert len(found["search"]["trials"]) == 3
    assert main([*command, "--out", str(tmp_path / "more"), "--held-out", str(tmp_path / "data.npz")]) == 0
    found = json.loads(capsys.readouterr().out)["upgrade"]
    assert len(found["search"]["trials"]) == 7
    given = ["--learning-rate", "0.01", "--smoothing", "0", "--block-loss", "1", "--partition", "spread"]
    assert main([*command, *given, "--out", str(tmp_path / "given")]) == 0
    found = json.loads(capsys.readouterr().out)["upgrade"]
    assert found["search"]["note"] == "every knob was given"
    assert found["recipe"] == {"partition": "spread", "learning_rate": 0.01, "smoothing": 0.0, "block_loss": 1.0}
