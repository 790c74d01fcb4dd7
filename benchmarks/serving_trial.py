"""A trial of MiniLM at half of its multiply-adds beside the original: what it costs the original's clients, and finds.

`python -m benchmarks.serving_trial [--small FOLDER] [--seconds 5] [--rounds 3]`, FOLDER as `benchmarks.serving_models`
makes it. Servers are processes of their own and take turns. Overhead: the time of the original's answers with a trial
and without, for clients that never pause, which leave a trial no idle moment, and for one that asks now and then.
Without FOLDER a bad slice is planted: a tiny BERT of blocks, which is exact but for the embedding of one token; one of
twenty requests has it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

import crystallite as cx
from benchmarks.fitted_tasks import minilm_folder
from benchmarks.server_process import SERVE, Server, started
from benchmarks.serving_forms import bert
from benchmarks.serving_models import text_request, texts
from benchmarks.timing import show, store
from crystallite.cli.bench_serve import best_quantile, loaded
from crystallite.serving.load import Ask

TOKEN, EVERY, REQUESTS, PAUSE = 3, 20, 200, 0.2


def planted(folder: Path, times: float) -> Path:
    """A tiny BERT, reorganized and saved, with the embedding of one token multiplied."""
    model = cx.reorganize(bert(), level=None, only_if_faster=False, fold=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[TOKEN] *= times
    return cx.save(model, folder)


def overhead(servers: dict[str, Server], seconds: float, rounds: int) -> list[dict]:
    requests, rows = [text_request(given, "tried") for given in texts()], []
    for clients in (1, 20):
        loads: dict[str, list] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                loads[name].append(loaded(Ask("127.0.0.1", server.port, requests, clients, seconds, warmup=1.0)))
        for name, found in loads.items():
            rows.append({
                "server": name, "clients": f"{clients} without a pause",
                "requests/s": statistics.median(load.per_second for load in found),
                "p50 ms": 1e3 * best_quantile(found, 0.5), "p99 ms": 1e3 * best_quantile(found, 0.99),
            })  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in servers}
    for given in texts():
        for name, server in servers.items():
            times[name].append(ask(server, text(given))[1])
            time.sleep(PAUSE)
    for name, found in times.items():
        found.sort()
        rows.append({
            "server": name, "clients": f"1, every {2 * PAUSE:g} s", "requests/s": 0.5 / PAUSE,
            "p50 ms": 1e3 * statistics.median(found), "p99 ms": 1e3 * found[int(0.99 * len(found))],
        })  # fmt: skip
    for row in rows:
        (alone,) = [r for r in rows if r["clients"] == row["clients"] and r["server"] == next(iter(servers))]
        row["p50, × alone"] = row["p50 ms"] / alone["p50 ms"]
        row["p99, × alone"] = row["p99 ms"] / alone["p99 ms"]
    return rows


def text(content: str) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [1], "data": [content]}


def ask(server: Server, given: dict[str, Any], request_id: str = "") -> tuple[Any, float]:
    """The answer and the seconds that it took, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", "/v2/models/tried/infer", json.dumps({"id": request_id, "inputs": [given]}))
    answer = json.loads(connection.getresponse().read())
    elapsed = time.perf_counter() - began
    connection.close()
    return answer, elapsed


def summary(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", "/v2/models/tried/trial")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def tried(name: str, server: Server) -> dict:
    """What a trial finds in a few hundred live requests, of which some have the word."""
    rng = np.random.default_rng(0)
    for i in range(REQUESTS):
        tokens, is_bad = rng.integers(TOKEN + 1, 50, 7), i % EVERY == EVERY - 1
        tokens[2] = TOKEN if is_bad else tokens[2]
        given = {"name": "input_ids", "datatype": "INT64", "shape": [1, 7], "data": tokens.tolist()}
        ask(server, given, f"{'slice' if is_bad else 'other'}-{i}")
    until = time.monotonic() + 300
    while (found := summary(server))["verdict"] is None and time.monotonic() < until:
        time.sleep(0.5)
    verdict = found["verdict"] or {}
    return {
        "model": name, "requests": found["requests"], "dropped": found["dropped"], "agreement": found["agreement"],
        "mean deviation": found["mean_deviation"], "worst deviation": found["worst_deviation"],
        "passed": verdict.get("passed"), "reasons": "; ".join(verdict.get("reasons", [])),
        "worst five in the slice": sum(case["request_id"].startswith("slice") for case in found["worst"]),
        "seconds of both": str([round(s, 4) for s in found["seconds"]]),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="watch the overhead")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load for each server and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    wanted = ["--trial-requests", str(REQUESTS - 20)]
    if options.small is None:
        found = []
        with tempfile.TemporaryDirectory() as scratch:
            for name, times in (("as it is", 1), ("with the planted slice", -20)):
                folder = planted(Path(scratch) / f"times{times}", times)
                words = [*SERVE, f"tried={folder}", "--trial", "benchmarks.serving_forms:bert", *wanted]
                with started(words) as server:
                    found.append(tried(name, server))
        show(f"{REQUESTS} live requests, one of {EVERY} in the slice", found)
        store("serving_trial_slice", found)
        return
    dense = str(minilm_folder())
    trial = ["--trial", dense, *wanted]
    with ExitStack() as stack:
        servers = {
            "the original alone": stack.enter_context(started([*SERVE, f"tried={dense}", "--unvalidated"])),
            "the original in a trial": stack.enter_context(started([*SERVE, f"tried={options.small}", *trial])),
        }
        rows = overhead(servers, options.seconds, options.rounds)
    show(f"the original's answers, load average {os.getloadavg()[0]:.1f}", rows)
    store("serving_trial", rows)


if __name__ == "__main__":
    main()
