"""The command line's `upgrade`."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.cli import main


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture
def call(tmp_path):
    x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=x, labels=(x[:, 0] > 0).astype(np.int64))

    def run(*arguments, out="small"):
        given = ["--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / out), "--blocks", "2", "--batch", "32"]
        return main(["upgrade", f"{__name__}:net", *given, *arguments])

    return run


def test_upgrades_and_saves(call, tmp_path, capsys):
    assert call("--epochs", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["upgrade"]["blocks"] == 2
    assert cx.load(tmp_path / "small")[0].n_subnetworks == 2


def test_without_labels(call, capsys):
    assert call("--epochs", "1", "--loss", "match", "--ignore", "4") == 0
    assert "Upgrading(2 blocks in 1 chain" in capsys.readouterr().out


def test_what_exists_is_not_overwritten(call, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    assert call(out="taken") == 2
    assert "exists already" in capsys.readouterr().err
