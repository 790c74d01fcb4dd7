"""`crystallite bench --baselines`: from files to a table, or to rows that a report draws."""

import json

import numpy as np
import pytest

from crystallite.baselines import METHODS
from crystallite.cli.main import main
from crystallite.core.run_charts import front_charts
from tests.helpers.prunable import hidden_from


@pytest.fixture
def files(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(
        "import torch\nfrom torch import nn\n\ndef build():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))\n"
    )
    rng = np.random.default_rng(0)
    for name, samples in (("calibration", 256), ("data", 64)):
        labels = {"labels": rng.integers(0, 4, samples)} if name == "data" else {}
        np.savez(tmp_path / f"{name}.npz", inputs=rng.normal(size=(samples, 8)).astype(np.float32), **labels)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = "bench --baselines own_network:build --budget 0.5 --calibration calibration.npz --data data.npz"


def test_the_command_ends_in_a_report(files, capsys):
    pytest.importorskip("onnxruntime")
    assert main([*WORDS.split(), "--json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert [row["name"] for row in found if not row["skipped"]][:2] == ["dense", "fitted"]
    assert {row["name"] for row in found} == {"dense", "fitted", *METHODS}
    assert {row["measure"] for row in found} == {"accuracy"}
    assert {row["batch"] for row in found if not row["skipped"]} == {32}
    assert set(front_charts(found)) == {"multiply-adds", "latency, ms"}
    (files / "front.json").write_text(printed)
    np.savez(files / "weights.npz", **{"a.weight": np.eye(8, dtype=np.float32)})
    assert main(["report", "weights.npz", "--front", "front.json", "--out", "page.html"]) == 0
    assert "fitted + ONNX Runtime int8" in (files / "page.html").read_text()


def test_the_command_prints_a_table(files, capsys, monkeypatch):
    hidden_from(monkeypatch, "onnxruntime", "torch_pruning")
    assert main([*WORDS.split(), "--metric", "agreement", "--batch", "8"]) == 0
    text = capsys.readouterr().out
    assert "ms, batch 8  agreement" in text
    assert "dense" in text
    assert "Skipped: Torch-Pruning" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (WORDS.replace(" --budget 0.5", ""), "--baselines needs --budget"),
        (WORDS.replace("0.5", "1.5"), "budget: expected a share"),
        (WORDS.replace("--data data.npz", "--data other.npz"), "other.npz: no such file"),
    ],
)
def test_bad_commands_give_one_line(files, capsys, words, message):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_one_thing_is_measured_at_a_time(capsys):
    for words in (["bench"], ["bench", "--serve", "a", "--baselines", "b"]):
        assert main(words) == 2
        assert "exactly one of --serve, --baselines" in capsys.readouterr().err
    assert main(["bench", "--serve", "a", "--budget", "0.5"]) == 2
    assert "--budget needs --baselines" in capsys.readouterr().err
