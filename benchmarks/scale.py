"""A checkpoint of seven billion parameters: memory, speed beside plain reading, and going on after a kill.

`python -m benchmarks.scale` writes 13.5 GB into the folder for temporary files, and removes them.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import show, store

HIDDEN, FEED_FORWARD, VOCABULARY, LAYERS = 4096, 11008, 32000, 32
INITIALIZER_RANGE = 0.02
SHARD_BYTES = 2_000_000_000
SPARE_BYTES = 4_000_000_000
MEMORY_TARGET_GB = 2.0
KILL_AFTER = 60  # finished matrices

Named = tuple[str, tuple[int, ...]]


def tensors() -> Iterator[Named]:
    """Names and shapes of a Llama with 6.7 billion parameters."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part in "qkvo":
            yield f"{layer}.self_attn.{part}_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (FEED_FORWARD, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, FEED_FORWARD)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


class Values:
    """Cheap weights that differ from tensor to tensor: one buffer of noise, from another place and in another scale.

    Every fourth tensor keeps the scale of its initialisation, the others have trained away from it. All have a few
    strong columns and single outliers, as transformers do.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._rng = np.random.default_rng(0)
        # An odd length: where a tensor wraps around, equal numbers do not come to lie in equal columns.
        self._noise = (torch.randn((1 << 26) + 12_345) * INITIALIZER_RANGE).bfloat16()
        self._count = 0

    def draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        size, offset = math.prod(shape), int(self._rng.integers(len(self._noise)))
        turns = -(-(size + offset) // len(self._noise))
        w = torch.cat([self._noise] * turns)[offset : offset + size]
        if self._count % 4:
            w = w * float(self._rng.uniform(0.7, 1.6))
        self._count += 1
        w = w.reshape(shape)
        w[:, self._rng.choice(shape[1], 4, replace=False)] *= 6
        w.view(-1)[self._rng.integers(size, size=1000)] = 0.5
        return w


def write_checkpoint(folder: Path) -> int:
    """Shards, their index and a config; returns the bytes of all shards."""
    shards: list[list[Named]] = [[]]
    room = SHARD_BYTES
    for name, shape in tensors():
        nbytes = 2 * math.prod(shape)
        if nbytes > room:
            shards.append([])
            room = SHARD_BYTES
        shards[-1].append((name, shape))
        room -= nbytes
    values, total = Values(), 0
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        path = folder / f"model-{i:05}-of-{len(shards):05}.safetensors"
        _write_shard(path, shard, values)
        weight_map |= {name: path.name for name, _ in shard}
        total += path.stat().st_size
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "initializer_range": INITIALIZER_RANGE, "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _write_shard(path: Path, shard: list[Named], values: Values) -> None:
    """Tensor by tensor: the library's own writer would hold the whole shard."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shard:
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in shard:
            values.draw(shape).view(torch.int16).numpy().tofile(file)
        file.flush()
        os.fsync(file.fileno())  # only what is on the disk can be dropped from the page cache


def drop_from_page_cache(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: list[Path]) -> float:
    """Which share of the files' pages is in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    pages = resident = 0
    for path in files:
        mapped = np.memmap(path, np.uint8, "r")
        flags = np.zeros(-(-mapped.nbytes // os.sysconf("SC_PAGE_SIZE")), np.uint8)
        arguments = (ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes))
        if mincore(*arguments, flags.ctypes.data_as(ctypes.POINTER(ctypes.c_ubyte))):
            raise OSError(ctypes.get_errno(), "mincore")
        pages += flags.size
        resident += int((flags & 1).sum())
    return resident / pages


def seconds_to_read(files: list[Path]) -> float:
    """Plain reading, 64 MB at a time."""
    start = time.perf_counter()
    for path in files:
        with path.open("rb") as file:
            while np.fromfile(file, np.uint8, 64 << 20).size:
                pass
    return time.perf_counter() - start


@dataclass
class Run:
    """What one `crystallite analyze` took. Memory in bytes, each at its own highest."""

    seconds: float = 0.0
    total: int = 0  # VmHWM: what follows, together
    anonymous: int = 0  # RssAnon + RssShmem: what the process itself holds
    mapped: int = 0  # RssFile: pages of files, which the kernel can take back at any time


def run_analyze(
    checkpoint: Path, *options: str, output: Path, resume: Path | None = None, kill_after: int | None = None
) -> Run:
    """Runs the command in a process of its own and watches its memory; kills it after so many finished matrices."""
    command = [sys.executable, "-m", "crystallite", "analyze", str(checkpoint), "--json", *options]
    if resume is not None:
        command += ["--resume", str(resume)]
    run = Run()
    start = time.perf_counter()
    with output.open("w") as file, subprocess.Popen(command, stdout=file) as process:
        while process.poll() is None:
            _sample(process.pid, run)
            if kill_after is not None and resume is not None and _line_count(resume) >= kill_after:
                process.kill()
            time.sleep(0.005)
    run.seconds = time.perf_counter() - start
    if kill_after is None and process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return run


def _sample(pid: int, run: Run) -> None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return
    size = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest
    }
    run.total = max(run.total, size.get("VmHWM", 0))
    run.anonymous = max(run.anonymous, size.get("RssAnon", 0) + size.get("RssShmem", 0))
    run.mapped = max(run.mapped, size.get("RssFile", 0))


def _line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _row(task: str, cached: float, nbytes: int, run: Run, plain: float | None) -> dict[str, Any]:
    return {
        "task": task,
        "cached before": f"{cached:.0%}",
        "GB": nbytes / 1e9,
        "seconds": run.seconds,
        "GB/s": nbytes / run.seconds / 1e9,
        "share of plain reading": None if plain is None else plain / run.seconds,
        "peak GB": run.total / 1e9 or None,
        "of it own GB": run.anonymous / 1e9 or None,
        "of it file pages GB": run.mapped / 1e9 or None,
    }


def speed(checkpoint: Path, output: Path) -> list[dict[str, Any]]:
    """Plain reading and `analyze --fast`, each with the files on disk only and with the files in the page cache."""
    files = sorted(checkpoint.glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in files)
    rows = []
    plain: dict[str, float] = {}
    for state in ("cold", "warm"):  # the first reading warms the second
        if state == "cold":
            drop_from_page_cache(files)
        cached = cached_share(files)
        plain[state] = seconds_to_read(files)
        rows.append(_row(f"plain reading, {state}", cached, nbytes, Run(plain[state]), plain[state]))
    for state in ("warm", "cold"):
        if state == "cold":
            drop_from_page_cache(files)
        cached = cached_share(files)
        run = run_analyze(checkpoint, "--fast", output=output)
        rows.append(_row(f"analyze --fast, {state}", cached, nbytes, run, plain[state]))
    return rows


def interruption(checkpoint: Path, uninterrupted: Path, folder: Path) -> list[dict[str, Any]]:
    """A run that is killed and one that goes on from there, which must give what the uninterrupted one gave."""
    output, kept = folder / "resumed.json", folder / "kept.jsonl"
    killed = run_analyze(checkpoint, "--fast", output=output, resume=kept, kill_after=KILL_AFTER)
    done = _line_count(kept)
    resumed = run_analyze(checkpoint, "--fast", output=output, resume=kept)
    expected, came = (json.loads(path.read_text()) for path in (uninterrupted, output))
    total = len(expected["matrices"])
    if came != expected:
        sys.exit("the resumed analysis differs from the uninterrupted one")
    if done >= total or _line_count(kept) > total + 1:  # the one that was being written may be done again
        sys.exit(
            f"{_line_count(kept)} matrices analysed over both runs, {done} before the kill, where there are {total}"
        )
    tasks = {f"killed with {done} of {total} matrices done": killed, f"resumed for {total - done}: equal": resumed}
    return [{"task": task, "seconds": run.seconds, "peak GB": run.total / 1e9} for task, run in tasks.items()]


def in_full(checkpoint: Path, output: Path) -> list[dict[str, Any]]:
    """With profile, control and hubs, for one layer and for the largest matrix."""
    files = sorted(checkpoint.glob("*.safetensors"))
    rows = []
    for pattern in ("model.layers.0.*", "lm_head"):
        cached = cached_share(files)
        run = run_analyze(checkpoint, "--include", pattern, output=output)
        nbytes = sum(2 * row["rows"] * row["cols"] for row in json.loads(output.read_text())["matrices"])
        rows.append(_row(f"analyze in full, {pattern}", cached, nbytes, run, None))
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="crystallite-scale-") as name:
        folder = Path(name)
        needed = 2 * sum(math.prod(shape) for _, shape in tensors())
        free = shutil.disk_usage(folder).free
        if free < needed + SPARE_BYTES:
            sys.exit(
                f"needs {(needed + SPARE_BYTES) / 1e9:.0f} GB of disk in {folder.parent}, which has {free / 1e9:.0f}"
            )
        checkpoint = folder / "model"
        checkpoint.mkdir()
        start = time.perf_counter()
        nbytes = write_checkpoint(checkpoint)
        seconds = time.perf_counter() - start
        print(f"{nbytes / 2e9:.2f} billion parameters, {nbytes / 1e9:.2f} GB, written in {seconds:.0f} s", flush=True)
        uninterrupted = folder / "whole.json"
        rows = speed(checkpoint, uninterrupted)
        rows += interruption(checkpoint, uninterrupted, folder)
        rows += in_full(checkpoint, folder / "full.json")
    show("analyze a Llama-shaped bfloat16 checkpoint of 6.7 billion parameters", rows)
    peak = max(row.get("peak GB") or 0.0 for row in rows)
    print(f"\npeak memory {peak:.2f} GB, {'within' if peak <= MEMORY_TARGET_GB else 'ABOVE'} {MEMORY_TARGET_GB:.0f} GB")
    store("scale", rows)


if __name__ == "__main__":
    main()
