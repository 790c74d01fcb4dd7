"""What coverage-guided fuzzing found, read again, and a bounded run of it over every reader and artifacts."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest
from benchmarks.attacks.fuzzing import KINDS, sound, target
from benchmarks.attacks.large_files import torch_archive

from tests.helpers.waiting import finished

CORPUS = Path(__file__).parent / "corpus"
FOUND = {  # by hand and by mutation, beside what lies in the folder
    "torch": [torch_archive(b"cbuiltins\nbytearray\nJ\x00\x94\x35\x77\x85R."), torch_archive(b"]" * 10**5 + b".")],
    "artifact": [b"\x00{}", b"\x00[]", b"", b"\x05" + b'{"modules": {"": ' * 900],
    "journal": [b"[" * 10**5, b'{"fingerprint": "' + b"\xff" * 9],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_corpus(tmp_path, kind):
    """Inputs that reached code that no other reached: refused with one kind of error, or read."""
    inputs = [path.read_bytes() for path in sorted((CORPUS / kind.replace(" ", "_")).iterdir())]
    run = target(kind, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in [*sound(kind), *inputs, *FOUND.get(kind, [])]:
            run(data)
    assert len(inputs) >= 5


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is for Linux")
@pytest.mark.parametrize("kind", KINDS)
def test_a_bounded_run(tmp_path, kind):
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.attacks.fuzzing", kind, "--runs", "5000", "--seconds", "60"]
    result = finished([*command, "--corpus", str(tmp_path / "corpus")], env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Done " in result.stderr
    assert not [*(tmp_path / "corpus").glob("crash-*")]
