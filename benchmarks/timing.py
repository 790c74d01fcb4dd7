"""Interleaved best-of timing, peak memory, and result files."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
MNIST = Path(os.environ.get("CRYSTALLITE_MNIST", Path(__file__).parents[2] / "shared" / "data" / "mnist.npz"))


def interleaved(
    calls: dict[str, Callable[[], object]], repeats: int = 7, budget: float = 25.0, pause: float = 0.01,
    least: float = 0.0,
) -> dict[str, float]:  # fmt: skip
    """Best time of each call in seconds; the calls take turns, and slow ones stop after their share of the budget.

    pause: OpenMP threads of the call before spin for a while and would take a core from calls with other threads.
    least: short calls are repeated until they last so many seconds together, which are shared out.
    """
    best: dict[str, float] = {}
    spent = dict.fromkeys(calls, 0.0)
    times = dict.fromkeys(calls, 1)
    for name, call in calls.items():
        if least:
            call()
            start = time.perf_counter()
            call()
            times[name] = max(1, round(least / (time.perf_counter() - start)))
    for _ in range(repeats):
        for name, call in calls.items():
            if spent[name] > budget / len(calls):
                continue
            time.sleep(pause)
            start = time.perf_counter()
            for _ in range(times[name]):
                call()
            took = time.perf_counter() - start
            spent[name] += took
            best[name] = min(best.get(name, np.inf), took / times[name])
    return best


def peak_extra_bytes(call: Callable[[], object]) -> int:
    """How far resident memory rises above its level before the call (Linux)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls left in the heap would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    result = call()
    peak = _status("VmHWM")
    del result
    return max(0, peak - before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def store(part: str, rows: list[dict]) -> None:
    """Write benchmarks/results/<part>.json."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{part}.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


def stored(part: str) -> list[dict]:
    """Rows of earlier runs."""
    path = RESULTS / f"{part}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def show(title: str, rows: list[dict]) -> None:
    """Print rows as a table."""
    if not rows:
        return
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(c)) for c in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for row in cells:
        print("  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return str(value)
