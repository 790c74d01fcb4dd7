"""Damaged files and artifacts of every kind: refused with one kind of error, or they open and answer the same twice."""

import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from benchmarks.attacks import seeds
from benchmarks.attacks.mutations import FAULTS, KINDS, Kind, run

from crystallite.core.errors import CrystalliteError
from crystallite.models.description import OPERATORS
from tests.helpers.waiting import finished

OUTCOMES = {"refused", "opened", "error at the call"}


def outcome(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy and torch warn of some oddities before they refuse them
        try:
            return kind.open(kind.damaged)
        except CrystalliteError:
            return "refused"


@pytest.mark.parametrize("name", KINDS)
def test_some_mutations(tmp_path, name):
    kind = Kind(name, tmp_path)
    assert kind.open(kind.sound) == "opened"
    found = set()
    for i in range(10 if name == "pretrained" else 40):
        kind.damage(np.random.default_rng([7, i]))
        found.add(outcome(kind))
    assert "refused" in found
    assert found <= OUTCOMES


def test_every_operator_is_among_them(tmp_path):
    texts = []
    for name in seeds.MODELS:
        seeds.artifact(name, tmp_path / name)
        texts.append((tmp_path / name / "manifest.json").read_text())
    assert not [kind for kind in OPERATORS if not any(f'"type": "{kind}"' in text for text in texts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_mutations_in_processes_of_their_own(name):
    """Watched from outside: code that runs, crashes, hangs and memory, too."""
    outcomes, faults, _ = run(name, seed=11, first=0, count=50 if name == "pretrained" else 500)
    assert not faults
    assert not {*FAULTS} & {*outcomes}


CHECKED = """
import sys, tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.attacks.mutations import Kind
from crystallite.core.errors import CrystalliteError
from crystallite.core.index_checks import CHECK_INDICES
import crystallite as cx

assert CHECK_INDICES
torch.set_num_threads(1)
answers = 0
for name in sys.argv[2:]:
    with tempfile.TemporaryDirectory() as folder:
        kind = Kind(name, Path(folder))
        for i in range(int(sys.argv[1])):
            kind.damage(np.random.default_rng([13, i]))
            try:
                answers += kind.open(kind.damaged) == "opened"
            except CrystalliteError:
                continue
turned = torch.eye(40).flip(0)
layer = cx.BlockLinear.from_dense(turned, None, cx.decompose(turned))
caught = 0
for samples in (1, 40):  # row by row, and in panels
    for table in (name for name, value in layer.named_buffers() if value.dtype == torch.int64 and len(value)):
        sound = layer.get_buffer(table).clone()
        layer.get_buffer(table)[3] = 10**6
        try:
            with torch.no_grad():
                layer(torch.ones(samples, 40))
        except IndexError:
            caught += 1
        layer.get_buffer(table).copy_(sound)
print(answers, caught)
"""


def checked(count, *kinds):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CRYSTALLITE_CHECK_INDICES": "1", "OMP_NUM_THREADS": "1"}
    result = finished([sys.executable, "-W", "ignore", "-c", CHECKED, str(count), *kinds], env=environment)
    assert result.returncode == 0, result.stderr
    return map(int, result.stdout.split())


def test_compiled_kernels_stay_inside_their_arrays():
    """Every index is checked, that of vector instructions too; tables changed after loading show that it is."""
    answers, caught = checked(60, "BlockLinear", "BlockRecurrent GRU")
    assert answers > 10
    assert caught >= 2


@pytest.mark.slow
def test_all_compiled_kernels_stay_inside_their_arrays():
    answers, caught = checked(300, *(name for name in KINDS if name.startswith(("Block", "LowRankRecurrent"))))
    assert answers > 200
    assert caught >= 2
