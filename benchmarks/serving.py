"""The in-process service of reorganized networks beside the same server running the dense ones.

`python -m benchmarks serving`. Clients are connections of another process on the same machine, over HTTP with binary
tensors; servers take turns, and the best of several rounds counts. "no coalescing" computes one request at a time.
`python -m benchmarks.serving --soak MINUTES` keeps a server under load and prints what its memory does.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

import crystallite as cx
from benchmarks.operators import equal, mask_
from benchmarks.timing import show, store
from crystallite.cli.bench_serve import best_quantile, compared, forward_seconds, row, service_of
from crystallite.serving import Limits, Service

CLIENTS = 20
SECONDS, ROUNDS = 9.0, 6
THREADS = (1, 2)
NETWORKS = {"6×1024², 4 blocks": (1024, 6, 4), "8×4096², 8 blocks": (4096, 8, 8)}


def planted(width: int, layers: int, blocks: int) -> nn.Sequential:
    """A dense network that falls into independent networks from end to end, its neurons in no order."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    labels = [equal(rng, width, blocks) for _ in range(layers + 1)]
    modules: list[nn.Module] = []
    for rows, cols in zip(labels[1:], labels, strict=False):
        layer = nn.Linear(width, width)
        mask_(layer, rows, cols)
        modules += [layer, nn.ReLU()]
    return nn.Sequential(*modules[:-1]).eval()


def beside_dense(name: str, dense: nn.Module, folder: Path) -> list[dict]:
    """Rows of the network that is saved there, of the dense one, and of the first without coalescing."""
    small = cx.load(folder).eval()
    alone = Service.load({"one": folder}, unvalidated=True, limits=Limits(max_batch=1))
    with ExitStack() as stack:
        services = {
            "two tiers": stack.enter_context(Service.load({"small": folder}, unvalidated=True)),
            "dense": stack.enter_context(service_of(dense, "dense")),
            "two tiers, no coalescing": stack.enter_context(alone),
        }
        loads = compared(services, CLIENTS, 1, SECONDS, ROUNDS)
        threads, busy = torch.get_num_threads(), os.getloadavg()[0]  # what else ran counts for more than our load
        rows = [
            {"network": name, "threads": threads, "load average": busy, **row(server, loads[server], services[server])}
            for server in services
        ]
        single = compared({server: services[server] for server in ("two tiers", "dense")}, 1, 1, SECONDS / 2, ROUNDS)
        given = {"input": torch.randn(1, NETWORKS[name][0])}
        for found, model in zip(rows, (small, dense), strict=False):
            found["one client p50 ms"] = 1e3 * best_quantile(single[found["server"]], 0.5)
            found["bare forward ms"] = 1e3 * min(forward_seconds(model, given, 0.3) for _ in range(ROUNDS))
            found["overhead ms"] = found["one client p50 ms"] - found["bare forward ms"]
    for found in rows:
        found["× dense"] = found["requests/s"] / rows[1]["requests/s"]
    return rows


def soak(minutes: float) -> list[dict]:
    """Resident memory of this process, which serves, after every tenth of the time."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = cx.save(cx.reorganize(planted(1024, 6, 4), level=None), Path(scratch) / "small")
        with Service.load(folder, unvalidated=True) as service:
            compared({"warm-up": service}, CLIENTS, 1, 10.0, rounds=1)
            start = resident()
            for tenth in range(1, 11):
                load = compared({"soak": service}, CLIENTS, 1, minutes * 6, rounds=1)["soak"][0]
                growth = 100 * (resident() / start - 1)
                rows.append({
                    "minutes": minutes * tenth / 10, "requests": len(load.latencies),
                    "refused": sum(load.refused.values()), "p99 ms": 1e3 * load.quantile(0.99),
                    "resident MB": resident() / 1e6, "growth %": growth,
                })  # fmt: skip
                show(f"soak of {minutes:g} minutes", rows[-1:])
    return rows


def resident() -> int:
    """Bytes of memory that this process holds (Linux)."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="only this")
    options = parser.parse_args(arguments or [])
    if options.soak:
        store("serving_soak", soak(options.soak))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for i, (name, sizes) in enumerate(NETWORKS.items()):
            dense = planted(*sizes)
            folder = cx.save(cx.reorganize(dense, level=None), Path(scratch) / f"small{i}")
            for threads in THREADS:
                torch.set_num_threads(threads)
                rows += beside_dense(name, dense, folder)
                show(f"{CLIENTS} clients × batch 1, the best of {ROUNDS} rounds", rows)
    store("serving", rows)


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
