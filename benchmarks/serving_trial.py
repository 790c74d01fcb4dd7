"""A trial of MiniLM at half of its multiply-adds beside the original: what it costs the original's clients, and finds.

`python -m benchmarks.serving_trial --small FOLDER [--seconds 5] [--rounds 3]`, FOLDER as `benchmarks.serving_models`
makes it. Servers are processes of their own and take turns. Overhead: the time of the original's answers with a trial
and without, for clients that never pause, which leave a trial no idle moment, and for one that asks now and then.
A bad slice is planted: of the smaller model, the embedding of one word is another one; one of twenty texts has it.
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

import torch
from transformers import AutoTokenizer

import crystallite as cx
from benchmarks.fitted_tasks import minilm_folder
from benchmarks.server_process import SERVE, Server, started
from benchmarks.serving_models import text_request, texts
from benchmarks.timing import show, store
from crystallite.cli.bench_serve import best_quantile, loaded
from crystallite.serving.load import Ask

WORD, EVERY, REQUESTS, PAUSE = "zebra", 20, 200, 0.2
RULE = ["--max-relative-deviation", "0.6"]  # of any sample


def planted(small: Path, folder: Path) -> Path:
    """The smaller model with another embedding of one word."""
    model = cx.load(small)
    (token,) = AutoTokenizer.from_pretrained(small)(WORD, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] *= -20
    return cx.save(model, folder, files=small)


def overhead(servers: dict[str, Server], seconds: float, rounds: int) -> list[dict]:
    requests, rows = list(map(text_request, texts())), []
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
    for text in texts():
        for name, server in servers.items():
            times[name].append(ask(server, text)[1])
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


def ask(server: Server, text: str, request_id: str = "") -> tuple[Any, float]:
    """The answer and the seconds that it took, on a connection of its own."""
    body = {"id": request_id, "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", "/v2/models/minilm/infer", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    elapsed = time.perf_counter() - began
    connection.close()
    return answer, elapsed


def summary(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", "/v2/models/minilm/trial")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def tried(name: str, server: Server) -> dict:
    """What a trial finds in a few hundred live requests, of which some have the word."""
    given = texts()
    for i in range(REQUESTS):
        has_word = i % EVERY == EVERY - 1
        text = given[i % len(given)]
        ask(server, f"{text} {WORD}" if has_word else text, f"{'word' if has_word else 'other'}-{i}")
    until = time.monotonic() + 300
    while (found := summary(server))["verdict"] is None and time.monotonic() < until:
        time.sleep(0.5)
    verdict = found["verdict"] or {}
    return {
        "model": name, "requests": found["requests"], "dropped": found["dropped"], "agreement": found["agreement"],
        "mean deviation": found["mean_deviation"], "worst deviation": found["worst_deviation"],
        "passed": verdict.get("passed"), "reasons": "; ".join(verdict.get("reasons", [])),
        "worst five with the word": sum(case["request_id"].startswith("word") for case in found["worst"]),
        "seconds of both": str([round(s, 4) for s in found["seconds"]]),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load for each server and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    dense = str(minilm_folder())
    trial = ["--trial", dense, "--trial-requests", str(REQUESTS - 20), *RULE]
    with tempfile.TemporaryDirectory() as scratch:
        bad = planted(options.small, Path(scratch) / "bad")
        found = []
        for name, folder in (("as it was fitted", options.small), ("with the planted slice", bad)):
            with started([*SERVE, f"minilm={folder}", *trial]) as server:
                found.append(tried(name, server))
        show(f"{REQUESTS} live requests, one of {EVERY} with the word", found)
        with ExitStack() as stack:
            servers = {
                "the original alone": stack.enter_context(started([*SERVE, f"minilm={dense}", "--unvalidated"])),
                "the original in a trial": stack.enter_context(started([*SERVE, f"minilm={options.small}", *trial])),
            }
            rows = overhead(servers, options.seconds, options.rounds)
        show(f"the original's answers, load average {os.getloadavg()[0]:.1f}", rows)
    store("serving_trial", [*found, *rows])


if __name__ == "__main__":
    main()
