"""The two-tier service on Ray beside the in-process one, and what faults cost.

`python -m benchmarks.serving_ray`, and with `--forms [NAME …]` models of the paper's forms, every part a service, of
which one process is killed. A cluster of two nodes on this machine, in a network namespace that has nothing but
loopback, as in `tests/serving/test_ray.py`, whose scenarios are timed here. One machine cannot show what Ray is for:
all replicas, the HTTP server, the controller and the clients share its cores, so more replicas do not answer more
requests, and nothing travels over a network. What it shows is the price of a hop, and how long faults last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.namespace import NAMESPACE, bring_loopback_up
from benchmarks.ray_scenarios import APART, HEAVY, INPUTS, LIGHT, Inside
from benchmarks.serving_forms import FORMS
from benchmarks.timing import show, store
from crystallite.serving import Listener, Machine, Service
from crystallite.serving.load import Ask, Load, run
from crystallite.serving.machine import measure_machine

TOGETHER = Machine(hop=1e3, macs_per_second=1e9, bytes_per_second=1e9)  # no part is worth a service
SECONDS = 5.0
FAULTS = {
    "one of two replicas killed": "kill_a_replica",
    "the only replica killed": "kill_the_only_replica",
    "one of two replicas frozen": "freeze_a_replica",
    "transform replica killed": "kill_the_transform_replica",
    "node killed": "kill_the_node",
    "new version": "bring_a_new_version",
}


def loaded(url: str, clients: int, batch: int) -> Load:
    raw = torch.randn(batch, INPUTS).numpy().tobytes()
    tensor = {
        "name": "input",
        "datatype": "FP32",
        "shape": [batch, INPUTS],
        "parameters": {"binary_data_size": len(raw)},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = f"POST /v2/models/small/infer HTTP/1.1\r\nInference-Header-Content-Length: {len(header)}"
    host, _, port = url.removeprefix("http://").rpartition(":")
    return asyncio.run(run(Ask(host, int(port), [(head, (header + raw).hex())], clients, SECONDS, warmup=1.0)))


def load_rows(server: str, url: str) -> list[dict]:
    rows = []
    for clients, batch in ((1, 1), (20, 1), (20, 64)):
        load = loaded(url, clients, batch)
        rows.append({
            "server": server, "clients": clients, "batch": batch, "requests/s": load.per_second,
            "p50 ms": 1e3 * load.quantile(0.5), "p99 ms": 1e3 * load.quantile(0.99),
            "refused": sum(load.refused.values()),
        })  # fmt: skip
    return rows


def hops(inside: Inside) -> list[dict]:
    """Calls of the light piece, which computes next to nothing, from here and back."""
    from ray import serve

    from crystallite.serving.ray_engine import _packed

    handle = serve.get_deployment_handle(LIGHT, inside.application())
    rows = [{"hop": "in process", "samples": 1, "median ms": 1e3 * measure_machine().hop, "99 % ms": None}]
    for samples in (1, 64, 8192):
        x, times = _packed({"input": torch.zeros(samples, 8)}), []
        for _ in range(300):
            started = time.perf_counter()
            handle.remote(x).result()
            times.append(time.perf_counter() - started)
        times.sort()
        rows.append({
            "hop": "Ray Serve", "samples": samples, "median ms": 1e3 * statistics.median(times),
            "99 % ms": 1e3 * times[int(0.99 * len(times))],
        })  # fmt: skip
    return rows


def fault(name: str, found: dict) -> dict:
    return {
        "fault": name, "requests": found["right"] + found["wrong"] + sum(found["lost"].values()),
        "wrong": found["wrong"], "lost": sum(found["lost"].values()), "requests/s": found["requests per second"],
        "p50 ms": 1e3 * found["latency"]["median"], "p99 ms": 1e3 * found["latency"]["99 %"],
        "longest silence s": found["longest silence"], "until all was well s": found["until all was well"],
    }  # fmt: skip


def forms(inside: Inside, names: list[str]) -> list[dict]:
    rows = []
    for name in names or FORMS:
        found = inside.serve_form(name)
        rows.append({
            "form": name, "services": found["pieces"], "in process": found["in process"], "on Ray": found["on Ray"],
            "after the kill": found["on Ray afterwards"], "until it answers s": found["start seconds"],
            **fault("its only replica killed", found),
        })  # fmt: skip
    return rows


def run_inside_the_namespace(folder: Path, names: list[str] | None) -> None:
    bring_loopback_up()
    inside = Inside(folder)
    if names is not None:
        (folder / "rows.json").write_text(json.dumps({"forms": forms(inside, names)}))
        return
    rows = {"start": [{"seconds until it answers": inside.start_seconds, "load of the machine": os.getloadavg()[0]}]}
    rows["hops"] = hops(inside)
    rows["load"] = load_rows("Ray, both tiers", inside.service.url)
    for name, machine in (("in process, cut", APART), ("in process, whole", TOGETHER)):
        with Service.load(inside.link, machine=machine) as local, Listener(local, port=0) as listener:
            rows["load"] += load_rows(name, listener.url)
    rows["faults"] = [fault(name, getattr(inside, scenario)()) for name, scenario in FAULTS.items()]
    found = inside.grow_and_shrink()
    rows["scaling"] = [{
        "piece": HEAVY, "seconds until the third replica answers": found["grown"],
        "seconds until it is gone, without load": found["shrunk"], "wrong": found["wrong"],
        "lost": sum(found["lost"].values()), "replicas of others": str(found["light and transform"]),
    }]  # fmt: skip
    rows["start"][0]["load of the machine at the end"] = os.getloadavg()[0]
    (folder / "rows.json").write_text(json.dumps(rows))


def main(names: list[str] | None) -> None:
    """names: of forms, none for all of them; None: everything but forms."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as short:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0",  # others may need the memory
        }  # fmt: skip
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks.serving_ray", "--inside", folder]
        command += [] if names is None else ["--forms", *names]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        rows_file = Path(folder) / "rows.json"  # written last: Ray may end its processes with an error afterwards
        if not rows_file.exists():
            raise SystemExit(done.stderr[-5000:])
        found = json.loads(rows_file.read_text())
    for part, rows in found.items():
        show(part, rows)
    store(
        "serving_ray" if names is None else "serving_ray_forms",
        [{"part": part, **row} for part, rows in found.items() for row in rows],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="*", choices=FORMS, help="models of the paper's forms, nothing else")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="run here, which is a namespace already")
    options = parser.parse_args()
    if options.inside is not None:
        run_inside_the_namespace(options.inside, options.forms)
    else:
        main(options.forms)
