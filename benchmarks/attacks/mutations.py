"""Tens of thousands of damaged files and artifacts: each is refused with one kind of error, or opens and answers.

`python -m benchmarks.attacks.mutations --count 40000` prints the table of docs/security.md and stores it in
benchmarks/results/mutations.json. Each kind has a process of its own, which is ended if it hangs and goes on after a
crash; `--kind KIND --first I --count 1 --keep FOLDER` makes one mutation again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attacks import seeds
from benchmarks.attacks.mutators import mutate_artifact, mutate_bytes

SLACK_BYTES, TIMES_THE_FILE = 64 << 20, 3
HANG_SECONDS = 120  # without an answer, on a machine that may be busy
_ROOM = 4 << 30  # of addresses beyond those in use: a bomb ends its process's call, not the machine
_RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "socket.connect", "pty.spawn")
WEIGHTS = {"pretrained": 0.2}  # of a kind whose files take much longer to open
KINDS = [*seeds.FILES, *seeds.MODELS, "pretrained", "training state"]
FAULTS = ("executed", "crash", "hang", "raw", "varies", "memory")


def _open_weights(path: Path) -> str:
    from crystallite.weights import open_checkpoint, recognise

    with open_checkpoint(path) as checkpoint:
        for layer in recognise(checkpoint):
            layer.matrices(checkpoint)
        for name in checkpoint.tensors:
            first, second = (np.asarray(_numbers(checkpoint.read(name))).tobytes() for _ in range(2))
            if first != second:
                return "varies"
    return "opened"


def _numbers(value: Any) -> Any:
    import torch

    return value.contiguous().view(torch.uint8) if isinstance(value, torch.Tensor) and value.ndim else value


def _open_model(path: Path, given: Any) -> str:
    import torch

    import crystallite as cx

    model = cx.load(path).eval()
    answers = []
    for garbage in (float("nan"), 1e30):  # what memory holds before a call decides nothing
        left = [torch.full((size,), garbage) for size in (64, 256, 384, 1024, 1536, 4096)]
        del left
        try:
            with torch.no_grad():
                answers.append(_flat(model(*given)))
        except cx.CrystalliteError:
            raise
        except Exception as error:  # PyTorch's own: what was described computes nothing from such inputs
            if isinstance(error, IndexError) and ("bounds" in str(error) or "outside its array" in str(error)):
                raise  # a table that should not have been believed
            return "error at the call"
    same = all(torch.equal(a.nan_to_num(0.123), b.nan_to_num(0.123)) for a, b in zip(*answers, strict=True))
    return "opened" if same else "varies"


def _flat(result: Any) -> list[Any]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result
    return [tensor for value in values if value is not None for tensor in _flat(value)]


def _open_state(path: Path) -> str:
    from crystallite.statistics.checkpoints import Checkpoints

    Checkpoints(path, {"seed": 1}).latest()
    return "opened"


class Kind:
    """Makes sound files of one kind, damages them, and opens them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.sound = name, folder / "sound"
        self.open: Callable[[Path], str] = _open_weights
        suffix = seeds.SUFFIXES.get(name, f".{name}" if name in seeds.FILES else "")
        self.sound, self.damaged = folder / f"sound{suffix}", folder / f"damaged{suffix}"
        if name in seeds.FILES:
            seeds.FILES[name](self.sound)
        elif name == "training state":
            seeds.training_state(self.sound)
            self.open = _open_state
        elif name == "pretrained":
            import torch

            seeds.pretrained(self.sound)
            self.open = lambda path: _open_model(path, (torch.tensor([[1, 2, 3]]),))
        else:
            given = seeds.artifact(name, self.sound)
            self.open = lambda path: _open_model(path, given)

    def damage(self, rng: np.random.Generator) -> int:
        """Make a damaged copy; returns its size."""
        if self.damaged.is_dir():
            shutil.rmtree(self.damaged)
        if self.sound.is_file():
            self.damaged.write_bytes(mutate_bytes(rng, self.sound.read_bytes()))
            return self.damaged.stat().st_size
        shutil.copytree(self.sound, self.damaged)
        if self.name in seeds.MODELS or self.name == "pretrained":
            mutate_artifact(rng, self.damaged)
        else:
            files = sorted(path for path in self.damaged.rglob("*") if path.is_file())
            victim = files[rng.integers(len(files))]
            victim.write_bytes(mutate_bytes(rng, victim.read_bytes()))
        return sum(path.stat().st_size for path in self.damaged.rglob("*") if path.is_file())


def work(name: str, seed: int, first: int, count: int, keep: Path | None) -> None:
    """One process: a line of JSON for every mutation."""
    import warnings

    import torch

    from crystallite.core.errors import CrystalliteError

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    executed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        kind = Kind(name, keep or Path(temporary))
        for _ in range(3):
            assert kind.open(kind.sound) == "opened"
        for i in range(20):  # errors, too, bring code with them
            kind.damage(np.random.default_rng([seed, i]))
            try:
                kind.open(kind.damaged)
            except Exception:
                continue

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _RUNS_CODE or (event == "open" and _writes_elsewhere(arguments, kind.sound.parent)):
                executed.append(f"{event} {arguments!r:.200}")

        resident, addresses = _memory("VmRSS"), _memory("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (addresses + _ROOM, addresses + _ROOM))
        sys.addaudithook(watch)
        for i in range(first, first + count):
            size = kind.damage(np.random.default_rng([seed, zlib.crc32(name.encode()), i]))
            executed.clear()
            print(json.dumps(["begin", i]), flush=True)
            start, detail = time.process_time(), ""
            try:
                outcome = kind.open(kind.damaged)
            except CrystalliteError:
                outcome = "refused"
            except Exception as error:
                outcome, detail = "raw", f"{type(error).__name__}: {error!s:.200}"
            seconds = time.process_time() - start
            grown = _memory("VmHWM") - resident
            if executed:
                outcome, detail = "executed", executed[0]
            elif grown > SLACK_BYTES + TIMES_THE_FILE * size:
                outcome, detail = "memory", f"{grown >> 20} MB after {outcome}"
                resident = _memory("VmHWM")  # said once
            print(json.dumps([outcome, i, seconds, detail]), flush=True)


def _writes_elsewhere(arguments: tuple[Any, ...], folder: Path) -> bool:
    path, mode, flags = arguments
    writing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(flags, int) else "r" not in (mode or "r")
    ours = isinstance(path, str) and (path.startswith((str(folder), "/dev/", "/proc/")) or "__pycache__" in path)
    return bool(writing) and not ours  # numba keeps what it compiled for a dtype that it has not met before


def _memory(what: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{what}:")[1].split()[0]) << 10


def run(name: str, seed: int, first: int, count: int) -> tuple[Counter[str], list[list[Any]], float]:
    """Outcomes of so many mutations, those that are faults, and the longest time one took."""
    outcomes: Counter[str] = Counter()
    faults: list[list[Any]] = []
    slowest, end = 0.0, first + count
    while first < end:
        command = [sys.executable, "-m", "benchmarks.attacks.mutations", "--worker", "--kind", name]
        command += ["--seed", str(seed), "--first", str(first), "--count", str(end - first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            begun = None
            while (answer := _line(process)) is not None and answer:
                outcome, i, *more = json.loads(answer)
                if outcome == "begin":
                    begun = i
                    continue
                outcomes[outcome] += 1
                slowest, first, begun = max(slowest, more[0]), i + 1, None
                if outcome in FAULTS:
                    faults.append([name, i, outcome, more[1]])
            if answer is None:
                process.kill()
            code = process.wait()
            if first < end:
                assert process.stderr is not None
                if begun is None:
                    raise RuntimeError(f"{name}: the process never began: {process.stderr.read()[-2000:]}")
                outcome = "hang" if answer is None else "crash"
                outcomes[outcome] += 1
                faults.append([name, begun, outcome, f"exit code {code}: {process.stderr.read()[-200:]}"])
                first = begun + 1
    return outcomes, faults, slowest


def _line(process: Any) -> str | None:
    """The next line of a process; "" when it has ended, None when it says nothing any more."""
    ready, _, _ = select.select([process.stdout], [], [], HANG_SECONDS)
    return process.stdout.readline() if ready else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40_000, help="mutations in all, or of the one kind")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave the files in this folder")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker or given.keep:
        work(given.kind, given.seed, given.first, given.count, given.keep)
        return
    kinds = [given.kind] if given.kind else KINDS
    share = given.count / sum(WEIGHTS.get(kind, 1) for kind in kinds)
    columns = ("refused", "opened", "error at the call", *FAULTS)
    print(f"| kind | mutations | {' | '.join(columns)} | slowest, s |\n|{'---|' * (len(columns) + 3)}")
    total: Counter[str] = Counter()
    faults: list[list[Any]] = []
    rows = []
    for kind in kinds:
        outcomes, found, slowest = run(kind, given.seed, given.first, round(share * WEIGHTS.get(kind, 1) + 0.5))
        rows.append({"kind": kind, **outcomes, "slowest": round(slowest, 3)})
        total += outcomes
        faults += found
        _print_row(kind, outcomes, columns, slowest)
        for fault in found[:5]:
            print(fault, file=sys.stderr, flush=True)
    _print_row("**all**", total, columns, max(row["slowest"] for row in rows))
    if not given.kind:
        results = Path(__file__).parents[1] / "results" / "mutations.json"
        results.write_text(json.dumps({"seed": given.seed, "rows": rows, "faults": faults[:100]}, indent=1) + "\n")


def _print_row(name: str, outcomes: Counter[str], columns: tuple[str, ...], slowest: float) -> None:
    cells = [str(outcomes[column]) for column in columns]
    print(f"| {name} | {sum(outcomes.values())} | {' | '.join(cells)} | {slowest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
