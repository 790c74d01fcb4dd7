"""Whole checkpoints: planted structure is found and named, noise is called noise, and work is not lost or repeated."""

import json
import signal
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import crystallite as cx
from crystallite.analysis.control import shuffled
from tests.helpers.waiting import finished


def planted_linear(rng, groups=3, size=240, bridges=0):
    """A layer with its uniform initialisation everywhere and strong weights inside groups of shuffled neurons."""
    layer = nn.Linear(size, size)
    rows, cols = (rng.permutation(np.arange(size) % groups) for _ in range(2))
    inside = torch.from_numpy(rows[:, None] == cols)
    with torch.no_grad():
        layer.weight += inside * torch.randn(size, size) * 0.5
        layer.weight[:bridges] += 0.5
    return layer


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_an_untrained_model_is_noise():
    model = nn.Sequential(nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 100), nn.Conv2d(16, 32, 3), nn.LayerNorm(100))
    analysis = cx.analyze(model)
    assert [row.finding for row in analysis.rows] == ["noise"] * 3
    assert "not distinguishable from the initialisation" in analysis.verdict
    assert analysis["0"].null == "Uniform(±0.05774)"
    assert set(analysis.skipped.values()) == {"bias", "norm"}


def test_planted_blocks_are_found_and_counted():
    analysis = cx.analyze(planted_linear(np.random.default_rng(0)), rule="neyman", correction="holm")
    (row,) = analysis.rows
    assert (row.finding, row.n_blocks, row.largest_share) == ("separate", 3, pytest.approx(1 / 3, abs=0.01))
    assert analysis.verdict.startswith("Exact block structure in every matrix")
    assert row.shuffled["largest_share"] > 0.99
    assert row.expected_false_edges < 0.02


def test_blocks_that_only_another_level_shows():
    layer = nn.Linear(200, 200)
    rows, cols = (np.random.default_rng(i).permutation(np.arange(200) % 2) for i in range(2))
    inside = torch.from_numpy(rows[:, None] == cols)
    with torch.no_grad():
        layer.weight.copy_(torch.where(inside, 1.0, 0.3) * torch.sign(torch.randn(200, 200)))
    (row,) = cx.analyze(layer, rule="neyman", null="init").rows
    assert row.finding == "nested"
    assert row.best_split["effective_blocks"] == pytest.approx(2, abs=0.01)
    assert row.best_split["threshold"] == pytest.approx(1.0)


def test_hubs_are_named():
    (row,) = cx.analyze(planted_linear(np.random.default_rng(0), bridges=2), rule="neyman", correction="holm").rows
    assert row.finding == "hubs"
    assert set(row.hubs["rows"]) <= {0, 1}
    assert row.hubs["largest_share"] < 0.5
    assert "hubs hold it together" in row.verdict


def test_one_block_is_said_plainly():
    layer = nn.Linear(200, 200)
    with torch.no_grad():
        layer.weight += torch.randn(200, 200) * 0.2
    analysis = cx.analyze(layer, rule="neyman")
    assert analysis.rows[0].finding == "one block"
    assert "No exact block structure" in analysis.verdict
    assert "random places" in analysis.rows[0].verdict


def test_a_matrix_is_not_called_noise_against_its_own_bulk():
    layer = nn.Linear(300, 300)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(300, 300) * 0.37)
    (row,) = cx.analyze(layer).rows
    assert row.null.startswith("Empirical")
    assert row.finding != "noise"


def test_recurrent_feedback_is_directed_over_all_gates():
    """Two groups that feed themselves, the second also fed by the first: two SCCs in two layers, one component."""
    gru = nn.GRU(8, 60)
    with torch.no_grad():
        gru.weight_hh_l0.zero_()
        gates = gru.weight_hh_l0.view(3, 60, 60)
        gates[0, :30, :30] = gates[1, 30:, 30:] = 1.0  # different gates: an edge exists where any gate keeps it
        gates[2, 30:, :30] = 1.0
    row = cx.analyze(gru, null="init", rule="neyman")["weight_hh_l0"]
    assert (row.kind, row.matrices) == ("recurrent feedback", 3)
    assert (row.n_scc, row.n_layers, row.n_components, row.largest_scc_share) == (2, 2, 1, 0.5)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_untrained_recurrent_layers_are_noise(kind):
    """Input weights keep their gates stacked; what is drawn for them goes by the state size all the same."""
    rows = cx.analyze(kind(64, 256)).rows
    assert [(row.null, row.finding) for row in rows] == [("Uniform(±0.0625)", "noise")] * 2


def test_the_config_of_a_module_is_heard_like_that_of_a_folder(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(200, 200)
            nn.init.normal_(self.dense.weight, std=0.02)
            self.config = type("Config", (), {"to_dict": lambda _: {"initializer_range": 0.02}})()

    model = Model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"initializer_range": 0.02}')
    rows = cx.analyze(model).rows
    assert rows[0].null == "Normal(0.02)"
    assert rows == cx.analyze(tmp_path).rows


def test_groups_of_a_convolution_have_inputs_of_their_own():
    for groups in (1, 4, 32):
        conv = nn.Conv2d(32, 64, 3, groups=groups)
        with torch.no_grad():
            conv.weight.fill_(1.0)
        (row,) = cx.analyze(conv, null="init", rule="neyman").rows
        assert (row.rows, row.cols, row.n_blocks) == (64, 32, groups)
        assert row.finding == ("one block" if groups == 1 else "separate")


def test_convolutions_are_seen_as_channels():
    conv = nn.Conv2d(32, 48, 3)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[:24, :16, 1, 1] = conv.weight[24:, 16:, 0, 2] = 1.0
    (row,) = cx.analyze(conv, null="init", rule="neyman").rows
    assert (row.rows, row.cols, row.n_blocks) == (48, 32, 2)


def test_fast_stops_at_the_one_level():
    layer = planted_linear(np.random.default_rng(0))
    full, fast = (cx.analyze(layer, rule="neyman", fast=f).rows[0] for f in (False, True))
    assert fast.profile == []
    assert fast.hubs is fast.best_split is None
    assert (fast.kept, fast.n_blocks, fast.threshold) == (full.kept, full.n_blocks, full.threshold)


def test_fast_does_not_take_random_fragments_for_blocks():
    w = torch.randn(300, 300)
    full, fast = (cx.analyze({"w": w}, null="empirical", rule="neyman", level=0.0027, fast=f) for f in (False, True))
    assert full.rows[0].finding == fast.rows[0].finding == "fragments"
    assert "Exact" not in fast.verdict


def test_profile_points_are_exact():
    layer = planted_linear(np.random.default_rng(0))
    (row,) = cx.analyze(layer).rows
    w = layer.weight.detach()
    assert len(row.profile) > 10
    for point in row.profile:
        s = cx.decompose(w, threshold=point["threshold"])
        assert (point["n_blocks"], point["largest_share"]) == (s.n_blocks, s.largest_share)
        assert point["kept_share"] == float((w.abs() >= point["threshold"]).double().mean())


def test_rows_are_the_same_from_module_file_and_folder(tmp_path):
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rows = [cx.analyze(source).rows for source in (model, tmp_path / "model.safetensors", tmp_path)]
    assert rows[0] == rows[1] == rows[2]


def test_targets_and_ignore(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Embedding(8, 8)})
    assert [r.name for r in cx.analyze(model, targets=["a", "c"], fast=True).rows] == ["a", "c"]
    assert [r.name for r in cx.analyze(model, ignore=["b"], fast=True).rows] == ["a", "c"]
    assert [r.name for r in cx.analyze(model, targets="a*", fast=True).rows] == ["a"]
    with pytest.raises(cx.InvalidOption, match=r"targets: no layer with weights matches 'encoder'; the nearest is"):
        cx.analyze(model, targets="encoder")


def test_table_fits_and_keeps_the_findings():
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"layer_with_a_long_name" * 3: nn.Linear(64, 64)})})
    analysis = cx.analyze(model)
    for width in (80, 100, 140):
        table = analysis.table(width)
        assert max(map(len, table.splitlines())) <= width
        assert "noise" in table
    assert analysis.to_pandas().shape[0] == 1
    assert json.loads(json.dumps(analysis.to_json()))["matrices"][0]["finding"] == "noise"
    assert "&lt;" not in analysis._repr_html_()
    nothing = cx.analyze({"bias": np.zeros(3)})
    assert "No matrix of weights" in nothing._repr_html_()
    assert "No matrix of weights" in repr(nothing)


def test_rows_of_a_deep_model_can_be_told_apart():
    names = [f"encoder.layer.{i}.attention.{part}" for i in range(12) for part in ("self.query", "output.dense")]
    analysis = cx.analyze({f"{name}.weight": torch.randn(8, 8) for name in names}, fast=True)
    labels = [line.split()[0] for line in analysis.table(80).splitlines()[1:]]
    assert len(set(labels)) == len(names)


KILLED_AT_THE_THIRD = """
import os, signal
from crystallite.analysis import run
from crystallite.cli.main import main
add = run._Store.add
def add_and_die(self, row):
    add(self, row)
    if len(self.rows) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
run._Store.add = add_and_die
main()
"""


class TestResume:
    def test_finished_matrices_are_not_done_again(self, tmp_path, monkeypatch):
        path, done = tmp_path / "m.safetensors", tmp_path / "done.jsonl"
        save_file({f"layer.{i}.weight": torch.randn(32, 32) for i in range(4)}, path)
        first = cx.analyze(path, resume=done)
        monkeypatch.setattr("crystallite.analysis.run.analyze_layer", pytest.fail)
        assert cx.analyze(path, resume=done).rows == first.rows

    def test_other_options_or_another_file_start_over(self, tmp_path):
        path, done = tmp_path / "m.safetensors", tmp_path / "done.jsonl"
        save_file({"a.weight": torch.randn(32, 32)}, path)
        cx.analyze(path, resume=done)
        assert cx.analyze(path, resume=done, level=0.2).rows[0].level == 0.2
        time.sleep(0.01)
        save_file({"a.weight": torch.zeros(32, 32)}, path)
        assert cx.analyze(path, resume=done).rows[0].finding == "empty"

    def test_a_model_in_memory_cannot_be_resumed(self, tmp_path):
        with pytest.raises(cx.InvalidOption, match="on disk"):
            cx.analyze(nn.Linear(8, 8), resume=tmp_path / "done.jsonl")

    @pytest.mark.parametrize("content", [b"my notes", b'{"verdict": ""}\n', b"\xff\xfe\x00"])
    def test_other_files_are_not_written_to(self, tmp_path, content):
        path, notes = tmp_path / "m.safetensors", tmp_path / "notes"
        save_file({"a.weight": torch.randn(8, 8)}, path)
        notes.write_bytes(content)
        with pytest.raises(cx.InvalidOption, match="expected a file that `resume` wrote"):
            cx.analyze(path, resume=notes)
        assert notes.read_bytes() == content

    @pytest.mark.parametrize("start", ["", "{", '{"fingerprint": "m.saf', '{"fingerprint": 1}\n'])
    def test_a_run_killed_at_its_first_matrix_goes_on(self, tmp_path, start):
        path, done = tmp_path / "m.safetensors", tmp_path / "done.jsonl"
        save_file({"a.weight": torch.randn(8, 8)}, path)
        done.write_text(start)
        first = cx.analyze(path, resume=done)
        assert cx.analyze(path, resume=done).rows == first.rows == cx.analyze(path).rows
        assert len([line for line in done.read_text().splitlines() if "row" in line]) == 1

    def test_a_killed_run_goes_on(self, tmp_path):
        path, done = tmp_path / "m.safetensors", tmp_path / "done.jsonl"
        save_file({f"layer.{i}.weight": torch.randn(100, 100) for i in range(30)}, path)
        command = [sys.executable, "-m", "crystallite", "analyze", str(path), "--resume", str(done), "--json"]
        assert finished([sys.executable, "-c", KILLED_AT_THE_THIRD, *command[3:]]).returncode == -signal.SIGKILL
        assert len(done.read_text().splitlines()) == 3
        with done.open("a") as file:
            file.write('{"fingerprint": "cut sh')  # what a kill in the middle of a write leaves
        resumed = json.loads(finished(command, check=True).stdout)
        assert sorted(m["name"] for m in resumed["matrices"]) == sorted(f"layer.{i}" for i in range(30))
        lines = [json.loads(line) for line in done.read_text().splitlines() if "cut sh" not in line]
        assert len(lines) == 30  # each matrix once
        assert resumed == json.loads(json.dumps(cx.analyze(path).to_json()))


def test_the_shuffled_control_matches_shuffled_matrices():
    """The random process has the law of real shuffles: same blocks and largest share on average."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((120, 80))
    for kept in (60, 120, 300):
        threshold = np.sort(np.abs(w).ravel())[-kept]
        real, drawn = [], []
        for seed in range(60):
            mixed = rng.permutation(w.ravel()).reshape(w.shape)
            s = cx.decompose(mixed, threshold=threshold)
            real.append((s.n_blocks, s.largest_share))
            control = shuffled(120, 80, seed)
            at = control.at(kept)
            drawn.append((control.n_blocks[at], control.largest_share[at]))
        real, drawn = np.array(real), np.array(drawn)
        error = 4 * np.sqrt((real.var(0) + drawn.var(0)) / 60)
        assert (np.abs(real.mean(0) - drawn.mean(0)) <= error + np.array([1, 0.01])).all()


def test_the_control_of_a_feedback_matrix_shares_its_neurons():
    rng = np.random.default_rng(0)
    n, kept = 150, 90
    real, drawn = [], []
    for seed in range(60):
        mask = np.zeros(n * n, bool)
        mask[rng.choice(n * n, kept, replace=False)] = True
        d = cx.decompose(mask.reshape(n, n), kind="directed")
        sizes = np.bincount(d.component[~d.isolated])
        real.append(((sizes > 1).sum(), sizes.max() / n))
        control = shuffled(n, n, seed, feedback=True)
        drawn.append((control.n_blocks[kept], control.largest_share[kept]))
    real, drawn = np.array(real), np.array(drawn)
    error = 4 * np.sqrt((real.var(0) + drawn.var(0)) / 60)
    assert (np.abs(real.mean(0) - drawn.mean(0)) <= error).all()


def test_the_control_has_as_many_edges_as_the_channels():
    """Nine kept places of a kernel are one edge; random edges are then what chance gives."""
    conv, rng = nn.Conv2d(64, 64, 3), np.random.default_rng(0)
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[rng.integers(0, 64, 45), rng.integers(0, 64, 45)] = 1.0
    (row,) = cx.analyze(conv, null="init", rule="neyman").rows
    assert row.shuffled["n_blocks"] == pytest.approx(row.n_blocks, abs=10)
    assert row.shuffled["largest_share"] < 0.2


def test_experts_of_a_stack_are_analysed_apart(tmp_path):
    """Eight experts of two blocks each, every one shuffled in its own way: together they would be one block."""
    rng = np.random.default_rng(0)
    experts = np.zeros((8, 60, 60), np.float32)
    for expert in experts:
        rows, cols = (rng.permutation(np.arange(60) % 2) for _ in range(2))
        expert[rows[:, None] == cols] = 1.0
    analysis = cx.analyze({"mlp.experts.gate_up_proj": experts}, null="init", rule="neyman")
    assert [row.name for row in analysis.rows] == [f"mlp.experts.gate_up_proj[{i}]" for i in range(8)]
    assert {(row.finding, row.n_blocks) for row in analysis.rows} == {("separate", 2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"null": "x"}, "null must be one of"),
        ({"correction": "fdr"}, "correction must be one of"),
        ({"rule": "x"}, "rule must be one of"),
        ({"random_walk": None}, "random_walk: expected a string, got None"),
        ({"level": 2.0}, "level"),
        ({"engine": "dask"}, "engine must be one of"),
        ({"engine": "ray"}, "on disk"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(cx.CrystalliteError, match=message):
        cx.analyze(nn.Linear(4, 4), **options)


@pytest.mark.parametrize("source", [np.ones((3, 3)), torch.ones(3, 3), None, 3])
def test_what_is_no_model_is_refused(source):
    with pytest.raises(cx.InvalidOption, match=r"source: expected an nn\.Module or a mapping or a string or a path"):
        cx.analyze(source)


def test_a_bad_matrix_is_named():
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[3, 4] = float("nan")
    with pytest.raises(cx.InvalidMatrix, match=r"weight.*\(3, 4\)"):
        cx.analyze(layer)


class TestNoise:
    """Few weights in random places fall into small blocks as well, and no verdict may call those structure."""

    def shapes(self, count):
        rng = np.random.default_rng(0)
        return rng, [tuple(rng.choice([48, 64, 96, 192], 2)) for _ in range(count)]

    @pytest.mark.parametrize("level", [0.01, 0.003])
    def test_is_not_called_separate(self, level):
        rng, shapes = self.shapes(60)
        noise = {f"{i}": rng.normal(0, 0.02, shape).astype(np.float32) for i, shape in enumerate(shapes)}
        findings = [row.finding for row in cx.analyze(noise, null="empirical", level=level, fast=True)]
        assert findings.count("separate") <= 3
        assert findings.count("fragments") >= 20

    def test_is_not_said_to_have_hubs(self):
        """Near the percolation level few neurons hold together what is kept, wherever it lies."""
        rng = np.random.default_rng(0)
        noise = {f"{i}": rng.normal(size=(128, 128)).astype(np.float32) for i in range(12)}
        rows = cx.analyze(noise, null="empirical", rule="neyman", level=0.014).rows
        assert sum(row.hubs is not None and row.hubs["by_chance"] for row in rows) >= 6
        assert all(row.finding != "hubs" for row in rows)
        assert any("as many weights in random places, too" in row.verdict for row in rows)

    @pytest.mark.parametrize("blocks", [2, 4, 8])
    def test_planted_blocks_are_told_from_it(self, blocks):
        rng, shapes = self.shapes(12)
        planted = {}
        for i, (rows, cols) in enumerate(shapes):
            same = rng.integers(0, blocks, rows)[:, None] == rng.integers(0, blocks, cols)
            planted[f"{i}"] = (rng.normal(0, 0.02, (rows, cols)) * np.where(same, 12, 1)).astype(np.float32)
        found = cx.analyze(planted, null="empirical", correction="holm", rule="neyman", fast=True)
        assert [row.finding for row in found] == ["separate"] * 12
        assert all(row.shuffled["effective_blocks"] < row.effective_blocks for row in found)

    def test_a_diagonal_is_separate(self):
        w = np.random.default_rng(0).normal(0, 0.02, (64, 64)) + np.roll(np.eye(64), 7, 0)
        found = cx.analyze({"a": w}, null="empirical", correction="holm", rule="neyman", fast=True)
        assert found["a"].finding == "separate"
