"""`crystallite serve` in a process of its own."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager


@contextmanager
def served(*arguments, preexec_fn=None):
    """The process, where it answers over HTTP, and what it said when it had started."""
    words = [sys.executable, "-m", "crystallite", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=preexec_fn,
    ) as process:  # fmt: skip
        try:
            lines = [process.stdout.readline()]
            found = re.match(r"(http://127\.0\.0\.1:\d+)/v2/models/(\S+) ", lines[0])
            assert found, lines[0] + process.stderr.read()
            while not lines[-1].startswith("ready"):
                lines.append(process.stdout.readline())
            yield process, found[1], "".join(lines)
        finally:
            process.kill()
