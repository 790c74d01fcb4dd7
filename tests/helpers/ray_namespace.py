"""Ray in a network namespace that has nothing but loopback; a process namespace ends whatever was started inside."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from benchmarks.namespace import NAMESPACE

from tests.helpers.waiting import finished

RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nobody else is in the namespace, and a token would be written to the home folder
    "RAY_worker_niceness": "0",  # of 15, workers hardly run where others keep the machine busy
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill workers where others fill the machine's memory
}


def run_in_namespace(module, folder):
    """`python -m MODULE FOLDER` inside it; what it printed, and what it left in the folder for temporary files."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'crystallite[ray]'")
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("Ray is tested in a namespace of its own, which `unshare` may not make here")
    with tempfile.TemporaryDirectory() as short:  # paths of Unix sockets hold 107 bytes
        command = [*NAMESPACE, sys.executable, "-m", module, str(folder)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | RAY
        environment |= {"RAY_TMPDIR": short, "TMPDIR": short}
        done = finished(command, env=environment, cwd=Path(__file__).parents[2])
        left = sorted(path.name for path in Path(short).iterdir())
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout, left
