"""A minute of load leaves memory where it was; `python -m benchmarks.serving --soak 10` runs longer."""

from pathlib import Path

import pytest

from crystallite.cli.bench_serve import compared
from crystallite.serving import Service

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's account of memory")
def test_memory_does_not_grow(folder):
    def pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    with Service.load(folder) as service:
        compared({"warm-up": service}, 20, 1, 10, rounds=1)
        before = pages()
        (load,) = compared({"soak": service}, 20, 1, 50, rounds=1)["soak"]
        assert load.refused == {}
        assert pages() <= 1.02 * before
