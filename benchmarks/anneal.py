"""Annealing and whole-checkpoint analysis against one read pass and against plain reading of the file."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import crystallite as cx
from benchmarks.timing import interleaved, show, store

SHAPE = (4096, 16384)


def partly_trained(dtype: torch.dtype) -> tuple[torch.Tensor, cx.nulls.Uniform]:
    """A matrix of uniform noise with a trained corner, and the distribution of the noise."""
    torch.manual_seed(0)
    bound = 1 / SHAPE[1] ** 0.5
    w = torch.empty(SHAPE).uniform_(-bound, bound)
    w[:400, :1600] += torch.randn(400, 1600) * bound  # some of it was trained
    return w.to(dtype), cx.nulls.Uniform(bound)


def with_blocks(w: torch.Tensor, **options: Any) -> cx.BipartiteStructure:
    """The blocks of what `anneal` keeps."""
    a = cx.anneal(w, **options)
    if hasattr(a, "structure"):
        return a.structure()
    return cx.decompose(w, threshold=a.threshold if a.column_thresholds is None else a.column_thresholds)


def matrices() -> list[dict]:
    """anneal + decompose of one matrix, as multiples of one torch.sum over it."""
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        w, null = partly_trained(dtype)
        cases = {
            "neyman, known null": {"null": null, "rule": "neyman"},
            "neyman, null chosen": {"rule": "neyman"},
            "both tests, known null": {"null": null},
            "both tests, null chosen": {},
            "neyman + Holm, known null": {"null": null, "rule": "neyman", "correction": "holm"},
        }
        calls = {"read": lambda w=w: torch.sum(w)}
        calls |= {name: partial(with_blocks, w, **options) for name, options in cases.items()}
        for call in calls.values():
            call()
        best = interleaved(calls, repeats=9)
        for name in cases:
            rows.append(
                {
                    "task": "anneal + decompose",
                    "case": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ms": best[name] * 1e3,
                    "× read": best[name] / best["read"],
                }
            )
    return rows


def plain_reading(path: Path) -> int:
    """What `cat` does: the whole file through one buffer."""
    buffer, total = bytearray(16 << 20), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return total


def checkpoints() -> list[dict]:
    """GB/s of analyze beside plain reading of the same file, page cache warm for both."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.float32, torch.bfloat16):
            path = Path(folder) / "model.safetensors"
            torch.manual_seed(0)
            shapes = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
            save_file({f"layers.{i}.weight": (torch.randn(s) * 0.02).to(dtype) for i, s in enumerate(shapes)}, path)
            size = path.stat().st_size
            calls = {
                "read": lambda path=path: plain_reading(path),
                "fast": lambda path=path: cx.analyze(path, fast=True),
                "full": lambda path=path: cx.analyze(path),
            }
            for call in calls.values():
                call()
            best = interleaved(calls, repeats=5, budget=120)
            for name in calls:
                rows.append(
                    {
                        "task": f"analyze ({name})" if name != "read" else "plain reading",
                        "dtype": str(dtype).removeprefix("torch."),
                        "GB": size / 1e9,
                        "GB/s": size / best[name] / 1e9,
                        "share of plain reading": best["read"] / best[name],
                    }
                )
    return rows


def main() -> None:
    measured = matrices()
    show(f"anneal + decompose of {SHAPE[0]}×{SHAPE[1]} (× read: time over one torch.sum of the same matrix)", measured)
    read = checkpoints()
    show("analyze a checkpoint of seven matrices, 2 threads", read)
    store("anneal", measured + read)
