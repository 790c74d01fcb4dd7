"""An upgrade that was killed goes on to the result it would have had."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import crystallite as cx
from crystallite.separation import find_chains, random_partition, training, upgrade
from tests.helpers import digits

KILLED = """
import os, signal, sys
from torch.nn import functional as F
from crystallite.separation import upgrade
from crystallite.statistics import trainer
from tests.helpers import digits
from crystallite.separation import find_chains, random_partition, training, upgrade

trainer._SECONDS = 0.0  # a checkpoint after every batch
loader, *_ = digits.data()

def loss(output, target):
    loss.calls += 1
    if loss.calls == 30 * 5:  # of the model and of its four blocks alone, in the middle of the second epoch
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(output, target)

loss.calls = 0
given = {"epochs": 3, "seed": 5, "ignore": "5", "partition": "regions", **digits.RECIPE}
upgrade(digits.network(0.2), blocks=4, data=loader, loss=loss, checkpoint=sys.argv[1], **given)
"""


def run(folder=None, **options):
    """A network with dropout, so that random numbers matter beyond the order of batches."""
    loader, *_ = digits.data()
    given = {"blocks": 4, "epochs": 3, "seed": 5, "ignore": "5", "partition": "regions", **digits.RECIPE, **options}
    return upgrade(digits.network(0.2), data=loader, loss=F.cross_entropy, checkpoint=folder, **given)


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    folder = tmp_path / "state"
    root = Path(digits.__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder)], cwd=root, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    (step,) = folder.iterdir()
    assert step.name == "step-000000029"
    assert json.loads((step / "state.json").read_text())["record"]["step"] == 29
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resumed, whole = run(folder), run()
    finally:
        torch.set_num_threads(threads)
    expected = whole.state_dict()
    assert resumed.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.state_dict().items())
    assert cx.record(resumed).options.history == cx.record(whole).options.history


def test_a_finished_run_is_not_repeated(tmp_path, monkeypatch):
    first = run(tmp_path / "state", epochs=1)
    monkeypatch.setattr(training, "_loss", None)  # no step may be taken
    again = run(tmp_path / "state", epochs=1)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in again.state_dict().items())


def test_another_run_is_refused(tmp_path):
    options = {"epochs": 1, "partition": random_partition(find_chains(digits.network(0.2), ignore=["5"]), 4)}
    run(tmp_path / "state", **options)
    with pytest.raises(cx.InvalidOption, match=r"another run \(seed differ"):
        run(tmp_path / "state", seed=6, **options)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    run(tmp_path / "state", epochs=1)
    (step,) = (tmp_path / "state").iterdir()
    stored = (step / "state.safetensors").read_bytes()
    (step / "state.safetensors").write_bytes(stored[: len(stored) // 2])
    with pytest.raises(cx.CheckpointError):
        run(tmp_path / "state", epochs=1)
    (step / "state.json").write_text('{"format": "something else"}')
    with pytest.raises(cx.CheckpointError, match="expected the state of a training run"):
        run(tmp_path / "state", epochs=1)


def test_rubbish_of_a_killed_writer_is_swept_away(tmp_path):
    left = tmp_path / "state" / ".unfinished"
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"half")
    run(tmp_path / "state", epochs=1)
    assert [p.name for p in (tmp_path / "state").iterdir()] == ["step-000000022"]
