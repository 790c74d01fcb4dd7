"""Killed at random moments, again and again, and started anew: the result is that of an uninterrupted run."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.helpers import killed
from tests.helpers.waiting import finished


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", ["analyze", "upgrade", "compress", "save", "report"])
def test_resumed_is_uninterrupted(tmp_path, verb, seed):
    root = Path(killed.__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    result = finished([sys.executable, "-m", "tests.helpers.killed", verb, str(tmp_path), str(seed)], env=environment)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout.splitlines()[-1])
    assert answer["killed"]
    assert answer["found"] == answer["expected"]
    assert not answer["left"]
