"""Speed of the parts in two source trees, which take turns within one run, on 1 and 2 threads.

`python -m benchmarks speed --before FOLDER [--only PART …]`: FOLDER is a checkout of another commit, "after" is this
one. A process for each tree holds the same networks and matrices; both are asked in turn for their fastest call,
together with what they are compared with (the dense network, one read of the matrix, scipy), and the best of all turns
counts. One thread is timed by the processor time it took, which leaves out other work on the machine; two by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import show, store, stored

HERE = Path(__file__).resolve().parents[1]
SLICE = 0.05  # seconds for each call in a turn
Calls = dict[str, Callable[[], object]]


def network(dense: nn.Module, x: torch.Tensor) -> tuple[Calls, dict]:
    """A network beside its reorganized form; `ideal` is the speed-up that its multiply-adds left allow."""
    import crystallite as cx
    from benchmarks.operators import macs

    before, after = macs(dense)
    small = cx.reorganize(dense, level=None, example=x[:2]).eval()
    with torch.inference_mode():
        expected = dense(x)
        error = float((small(x) - expected).abs().max()) / max(float(expected.abs().max()), 1e-30)
    assert error <= (1e-4 if x.dtype == torch.float32 else 0.03), f"off by {error}"
    return {"dense": lambda: dense(x), "ours": lambda: small(x)}, {
        "ideal": before / after,
        "bytes": after * x.element_size(),
        "dense bytes": before * x.element_size(),
    }


def linear(
    sizes: list[int], k: int, shared: bool, batch: int, ragged: bool = False, dtype: str = "float32"
) -> tuple[Calls, dict]:
    from benchmarks.operators import equal, planted, power_law

    dense = planted(sizes, k, shared, labels=power_law if ragged else equal).to(getattr(torch, dtype))
    return network(dense, torch.randn(batch, sizes[0]).to(getattr(torch, dtype)))


def convolution(channels: int, size: int, k: int, batch: int) -> tuple[Calls, dict]:
    from benchmarks.operators import two_convolutions

    return network(two_convolutions(channels, k), torch.randn(batch, channels, size, size))


def annealed(dtype: str) -> tuple[Calls, dict]:
    """Both tests and the blocks of what they keep, beside one read of the matrix."""
    import crystallite as cx
    from benchmarks.anneal import partly_trained, with_blocks

    w, null = partly_trained(getattr(torch, dtype))
    run = partial(with_blocks, w, null=null)
    assert isinstance(run(), cx.BipartiteStructure)
    return {"dense": lambda: torch.sum(w), "ours": run}, {"ideal": 1.0, "bytes": w.nbytes, "dense bytes": w.nbytes}


def components(survivors: float) -> tuple[Calls, dict]:
    """The blocks of a 768×3072 matrix, beside scipy's."""
    import crystallite as cx
    from benchmarks.decompose import scipy_components

    w = torch.randn(768, 3072)
    array = w.numpy()
    calls = {"dense": lambda: scipy_components(array, survivors), "ours": lambda: cx.decompose(w, threshold=survivors)}
    return calls, {"ideal": 1.0, "bytes": w.nbytes, "dense bytes": w.nbytes}


def _cases() -> dict[str, dict[str, tuple[Callable, tuple, dict]]]:
    """part → name → how it is built."""
    wide = [4096] * 5
    parts: dict[str, dict[str, tuple[Callable, tuple, dict]]] = {
        "batch 1": {
            "4 × 4096² folded, k = 4": (linear, (wide, 4, True, 1), {}),
            "4 × 4096² shuffled, k = 4": (linear, (wide, 4, False, 1), {}),
            "4 × 4096² folded, k = 16": (linear, (wide, 16, True, 1), {}),
            "4096², k = 4": (linear, (wide[:2], 4, False, 1), {}),
            "4096², k = 16": (linear, (wide[:2], 16, False, 1), {}),
        },
        "ragged, batch 1": {
            "4096², k = 16": (linear, (wide[:2], 16, False, 1, True), {}),
            "4 × 4096², k = 16": (linear, (wide, 16, True, 1, True), {}),
            "6 × 1024², k = 16": (linear, ([1024] * 7, 16, True, 1, True), {}),
            "768→3072, k = 16": (linear, ([768, 3072], 16, False, 1, True), {}),
            "4 × 4096², k = 64": (linear, (wide, 64, True, 1, True), {}),
        },
        "blocks of 64², batch 128": {
            "6 × 1024² folded": (linear, ([1024] * 7, 16, True, 128), {}),
            "6 × 1024² shuffled": (linear, ([1024] * 7, 16, False, 128), {}),
            "1024²": (linear, ([1024] * 2, 16, False, 128), {}),
            "4096²": (linear, (wide[:2], 64, False, 128), {}),
        },
        "convolutions, k = 16": {
            f"{channels} channels {size}², batch {batch}": (convolution, (channels, size, 16, batch), {})
            for channels, size in ((64, 56), (128, 28), (256, 14), (512, 7))
            for batch in (1, 8)
        },
        "16 bits": {
            f"{name}, {dtype}, batch {batch}": (linear, (sizes, k, True, batch), {"dtype": dtype})
            for name, sizes, k in (("4 × 4096², k = 4", wide, 4), ("6 × 1024², k = 16", [1024] * 7, 16))
            for dtype in ("bfloat16", "float16")
            for batch in (1, 128)
        },
        "both tests and blocks": {f"4096×16384 {d}": (annealed, (d,), {}) for d in ("float32", "bfloat16")},
        "components of 768×3072": {
            f"{share} survive": (components, (c,), {})
            for share, c in (
                ("0.01 %", 3.8906),
                ("0.1 %", 3.2905),
                ("1 %", 2.5758),
                ("5 %", 1.96),
                ("20 %", 1.2816),
                ("50 %", 0.6745),
            )
        },
    }
    return parts


CASES = _cases()


def work() -> None:
    """Answer requests for times, one per line, until the input ends."""
    held: tuple[str, Calls, dict] | None = None
    for line in sys.stdin:
        part, name, threads = json.loads(line)
        torch.set_num_threads(threads)
        if held is None or held[0] != part + name:
            held = None
            torch.manual_seed(0)
            build, arguments, options = CASES[part][name]
            held = (part + name, *build(*arguments, **options))
        _, calls, facts = held
        with torch.inference_mode():
            clock = time.thread_time if threads == 1 else time.perf_counter
            found = {call: _fastest(run, clock) for call, run in calls.items()}
        print(json.dumps({**found, **facts}), flush=True)


def _fastest(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the fastest of as many calls as fit into a slice, after a pause: threads of other calls may spin."""
    time.sleep(0.004)
    call()
    best, end = float("inf"), clock() + SLICE
    while True:
        start = clock()
        call()
        now = clock()
        best = min(best, now - start)
        if now > end:
            return best


class Tree:
    """A process that times the code of one source tree."""

    def __init__(self, folder: Path) -> None:
        paths = {"PYTHONPATH": f"{folder / 'src'}{os.pathsep}{HERE}"}
        command = [sys.executable, "-c", "from benchmarks.speed import work; work()"]
        self.process = subprocess.Popen(
            command, cwd=HERE, env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, *request: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(trees: dict[str, Tree], part: str, name: str, turns: int, numbers: list[int]) -> list[dict]:
    """A row for each number of threads."""
    rows = []
    for threads in numbers:
        best: dict[str, float] = {}
        for _ in range(turns):
            for tree, process in trees.items():
                found = process.ask(part, name, threads)
                best[tree] = min(best.get(tree, float("inf")), found["ours"])
                best["dense"] = min(best.get("dense", float("inf")), found["dense"])
        row: dict[str, Any] = {"part": part, "task": name, "threads": threads, "compared ms": best["dense"] * 1e3}
        for tree in trees:
            row |= {f"{tree} ms": best[tree] * 1e3, f"{tree} ×": best["dense"] / best[tree]}
            row[f"{tree} of ideal"] = row[f"{tree} ×"] / found["ideal"]
            row[f"{tree} GB/s"] = found["bytes"] / best[tree] / 1e9
        rows.append(row | {"compared GB/s": found["dense bytes"] / best["dense"] / 1e9})
    return rows


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speed", description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="PART", help=", ".join(CASES))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args(arguments)
    folders = {"after": HERE} if given.before is None else {"before": given.before, "after": HERE}
    trees = {name: Tree(folder.resolve()) for name, folder in folders.items()}
    rows = [row for row in stored("speed") if row["part"] not in given.only or row["threads"] not in given.threads]
    try:
        for part in given.only:
            made = [row for name in CASES[part] for row in measured(trees, part, name, given.turns, given.threads)]
            show(part, [{key: value for key, value in row.items() if key != "part"} for row in made])
            rows += made
            store("speed", rows)
    finally:
        for tree in trees.values():
            tree.close()
