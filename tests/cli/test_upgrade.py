"""The command line's `upgrade`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from tests.helpers.tasks import block_network


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
    assert "upgraded to 2 blocks in 1 chain" in capsys.readouterr().out


def test_what_exists_is_not_overwritten(call, tmp_path, capsys):
    (tmp_path / "taken").mkdir()
    assert call(out="taken") == 2
    assert "exists already" in capsys.readouterr().err


def test_along_the_modules_that_the_data_shows(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(256, 12)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=x)
    given = ["--data", str(tmp_path / "data.npz"), "--out", str(tmp_path / "small"), "--loss", "match", "--json"]
    assert main(["upgrade", f"{__name__}:apart", "--modules", "--epochs", "3", *given]) == 0
    assert json.loads(capsys.readouterr().out)["upgrade"]["blocks"] == 2


def apart():
    """Two networks in one."""
    return block_network([(6, 8, 3), (6, 8, 3)], np.random.default_rng(0))[0]


class Fragile(nn.Module):
    """Kills its process in a training step, if the environment says in which."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        Fragile.steps += self.training
        if Fragile.steps == int(os.environ.get("KILLED_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(x)


@pytest.mark.slow  # test_checkpoint.py kills what the command calls
def test_a_killed_command_goes_on_to_the_same_bits(tmp_path):
    x = np.random.default_rng(0).normal(size=(256, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=x, labels=(x[:, 0] > 0).astype(np.int64))
    root = Path(__file__).parents[2]

    def run(out, *arguments, **environment):
        given = ["--data", tmp_path / "data.npz", "--out", tmp_path / out, "--blocks", "2", "--batch", "32", *arguments]
        command = ["-m", "crystallite", "upgrade", f"{__name__}:Fragile", "--epochs", "4", *map(str, given)]
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment}
        return subprocess.run([sys.executable, *command], cwd=root, env=environment, check=False).returncode

    state = ["--checkpoint", str(tmp_path / "state")]
    assert run("small", *state, KILLED_AT="24") == -signal.SIGKILL
    assert list((tmp_path / "state").glob("step-*"))
    assert not (tmp_path / "small").exists()
    assert run("small", *state) == run("whole") == 0
    (resumed,), (whole,) = ((tmp_path / out).glob("*.safetensors") for out in ("small", "whole"))
    assert resumed.read_bytes() == whole.read_bytes()
