"""What the monitor records, what it costs, and that training does not notice it."""

import json
from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.discovery import discover
from crystallite.monitoring import StructureMonitor
from crystallite.monitoring.journal import read_journal
from crystallite.structure.decompose import decompose
from crystallite.structure.levels import level_profile
from tests.helpers.tasks import draw, mlp, steps


def test_rows_say_what_the_stages_say_alone():
    torch.manual_seed(0)
    model, x = mlp(64, 10), draw(1, torch.arange(64), 200)[0]
    expected = nulls.for_module(model)
    rows = StructureMonitor(model, batch=x, every=1).step(0)
    assert [row["layer"] for row in rows] == ["0.weight", "2.weight", "4.weight", "(model)"]
    for row, weight in zip(rows, (model[0].weight, model[2].weight, model[4].weight), strict=False):
        alone = anneal(weight.detach(), expected[row["layer"]], 0.01, rule="neyman")
        at = level_profile(weight.detach()).at(alone.threshold)
        assert row["kept_share"] == alone.kept_share
        assert (row["blocks"], row["largest_share"]) == (at.n_blocks, at.largest_share)
        assert {name: row[name] for name in alone.class_shares} == alone.class_shares
        assert len(row["profile"]["blocks"]) == 8
        for threshold, blocks in zip(row["profile"]["thresholds"], row["profile"]["blocks"], strict=True):
            assert level_profile(weight.detach()).at(threshold).n_blocks == blocks
    np.testing.assert_allclose(rows[-1]["sigma"], discover(model, x).spectrum[:8], atol=1e-4)


def test_modules_show_in_the_functional_map_before_they_show_in_weights():
    torch.manual_seed(0)
    model, order = mlp(128, 20, width=128), torch.randperm(128)
    monitor = StructureMonitor(model, batch=draw(2, order, 256)[0], every=50)
    monitor.step(0)
    for step in steps(model, 2, order, 150):
        monitor.step(step + 1)
    sigma = {row["step"]: row["sigma"][1] for row in monitor.rows if "sigma" in row}
    assert list(sigma) == [0, 50, 100, 150]
    assert sigma[0] < 0.2
    assert sigma[150] > 0.5
    assert all(row["blocks"] == 1 for row in monitor.rows if "blocks" in row and row["step"])


def test_training_goes_on_bit_for_bit_as_without():
    def run(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
        x = draw(1, torch.arange(64), 100)[0]
        monitor = StructureMonitor(model, batch=x, every=2) if watched else None
        for step in steps(model, 1, torch.arange(64), 10):
            if monitor:
                monitor.step(step)
            assert model.training
        return model.state_dict()

    with_monitor, without = run(True), run(False)
    assert all(torch.equal(with_monitor[name], without[name]) for name in without)


def test_auto_keeps_its_share_of_the_time(monkeypatch):
    """By a clock of our own: a step takes a second, a look two."""
    now = [0.0]
    look = StructureMonitor._look

    def slow_look(self):
        now[0] += 2
        return look(self)

    monkeypatch.setattr(StructureMonitor, "_look", slow_look)
    monkeypatch.setattr("crystallite.monitoring.monitor.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monitor = StructureMonitor(nn.Linear(8, 4))
    for step in range(1000):
        now[0] += 1
        monitor.step(step)
    looks = [row["step"] for row in monitor.rows if row["layer"] == "(model)"]
    assert looks[:3] == [0, 134, 200]  # the first, and one whenever 3 % of the steps' time pays for all so far
    assert 0.025 < monitor.overhead <= 0.03


def test_auto_waits_until_a_look_is_paid_for():
    model = nn.Linear(8, 8)
    monitor = StructureMonitor(model)
    assert monitor.step(0) is not None
    assert all(monitor.step(step) is None for step in range(1, 50))


def test_a_journal_is_written_as_it_goes_and_continued(tmp_path):
    path = tmp_path / "runs" / "structure.jsonl"
    model, x = nn.Linear(6, 4), torch.randn(50, 6)
    first = StructureMonitor(model, batch=x, every=10, path=path)
    for step in range(31):
        first.step(step)
    assert read_journal(path) == json.loads(json.dumps(first.rows))
    with path.open("a") as file:
        file.write('{"step": 40, "layer": "wei')  # killed here
    resumed = StructureMonitor(model, batch=x, every=10, path=path)
    for step in range(20, 41):  # from the checkpoint of step 20
        resumed.step(step)
    rows = read_journal(path)
    assert [row["step"] for row in rows if row["layer"] == "(model)"] == [0, 10, 20, 30, 40]
    assert len(rows) == len(path.read_text().splitlines())


def test_diverged_weights_are_a_row_and_not_the_end(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    monitor = StructureMonitor(model, batch=torch.randn(20, 4), every=1, path=tmp_path / "rows.jsonl")
    model[0].weight.data[0, 0] = np.nan
    rows = monitor.step(0)
    assert "not finite" in rows[-1]["problem"]
    assert "problem" in rows[0]
    assert "kept_share" in rows[1]
    assert len(read_journal(tmp_path / "rows.jsonl")) == 3


def test_gates_of_recurrent_layers_have_their_own_rows():
    rows = StructureMonitor(nn.GRU(3, 8), every=1).step(0)
    assert [row["layer"] for row in rows][:3] == ["weight_ih_l0[r]", "weight_ih_l0[z]", "weight_ih_l0[n]"]


@pytest.mark.parametrize("every", [0, -1, "often", 1.5])
def test_intervals_that_make_no_sense_are_refused(every):
    with pytest.raises(InvalidOption, match="every"):
        StructureMonitor(nn.Linear(2, 2), every=every)


def test_what_cannot_work_is_refused_at_the_start():
    with pytest.raises(InvalidOption, match="no weight matrix"):
        StructureMonitor(nn.ReLU())
    with pytest.raises(CrystalliteError, match="floating-point"):
        StructureMonitor(nn.Linear(2, 2), batch=torch.zeros(3, 2, dtype=torch.long))


def test_rows_are_a_table():
    monitor = StructureMonitor(nn.Linear(3, 3), every=1)
    monitor.step(0)
    assert list(monitor.to_pandas()["layer"]) == ["weight", "(model)"]


@pytest.mark.parametrize("rule", ["neyman", "both"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_feedback_matrices_have_their_directed_structure(rule, kind):
    """All gates of a layer together, against networkx on the union of the masks that `anneal` gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), kind(5, 24, num_layers=2))
    level = 0.02 if rule == "neyman" else 0.2
    rows = StructureMonitor(model, every=1, level=level, rule=rule).step(0)
    masks = {}
    for name, found in anneal(model, null=nulls.for_module(model), level=level, rule=rule).items():
        masks.setdefault(name.partition("[")[0], []).append(found.mask.numpy())
    feedback = {row["layer"]: row for row in rows if "sccs" in row}
    assert list(feedback) == ["1.weight_hh_l0 (feedback)", "1.weight_hh_l1 (feedback)"]
    for name, row in feedback.items():
        mask = np.logical_or.reduce(masks[name.removesuffix(" (feedback)")])
        graph = nx.from_numpy_array(mask.T.astype(int), create_using=nx.DiGraph)
        weak = [c for c in nx.weakly_connected_components(graph) if set(c) - set(nx.isolates(graph))]
        condensed = nx.condensation(graph)
        assert row["sccs"] == len(condensed)
        assert row["layers"] == len(list(nx.topological_generations(condensed)))
        assert row["components"] == len(weak)
        assert row["isolated"] == len(list(nx.isolates(graph)))
        assert row["largest_scc_share"] == max(map(len, nx.strongly_connected_components(graph))) / 24


def test_either_rule_can_be_watched():
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    rows = {rule: StructureMonitor(model, every=1, rule=rule).step(0)[0] for rule in ("neyman", "both")}
    for rule, row in rows.items():
        found = anneal(model.weight.detach(), nulls.for_module(model), rule=rule)
        assert row["kept_share"] == found.kept_share
        assert row["blocks"] == decompose(found.mask).n_blocks
    with pytest.raises(InvalidOption, match="rule must be"):
        StructureMonitor(model, rule="all")
