"""Waiting for other processes and threads, for as long as a busy machine may take."""

import subprocess
import time

PATIENCE = 600  # seconds: ends a test that hangs, never one that is slow


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def finished(command, **options):
    """A process that has ended, with what it printed as text."""
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **options)
