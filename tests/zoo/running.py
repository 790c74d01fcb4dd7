"""Runs cells, each model in a process of its own, so that a crash or a loop ends one model and not the table."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.zoo.cases import Case, Outcome, plain_text, where
from tests.zoo.entry import Entry
from tests.zoo.models import ZOO
from tests.zoo.tables import Table
from tests.zoo.verbs import run_all

__all__ = ["run_models"]

SECONDS = 300  # for all cells of a model
ROOT = Path(__file__).parents[2]


def run_models(
    names: Sequence[str], verbs: Sequence[str], folder: Path, jobs: int = 1, said: Callable[[str], object] = print
) -> Table:
    """The cells of some models; `folder` keeps what they write, `said` is told how it goes."""
    waiting, running = list(names), dict[str, tuple[Any, float]]()
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    table: Table = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            (folder / name).mkdir(parents=True)
            process = context.Process(target=_model, args=(ZOO[name], list(verbs), folder / name))
            process.start()
            running[name] = process, time.monotonic()
        for name, (process, began) in list(running.items()):
            late = time.monotonic() - began > SECONDS
            if late:
                process.kill()
            if late or not process.is_alive():
                process.join()
                del running[name]
                reason = "time limit" if late else f"the process ended with code {process.exitcode}"
                table[name] = _read(folder / name / "cells.jsonl", verbs, reason)
                said(f"{name}: " + ", ".join(f"{verb} {cell['status']}" for verb, cell in table[name].items()))
        time.sleep(0.05)
    if "pretrained" in verbs:
        _reopen(table, folder, said)
    return {name: table[name] for name in names}


def _model(entry: Entry, verbs: list[str], folder: Path) -> None:
    """The cells of one model, written down one by one."""
    torch.set_num_threads(1)
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with (folder / "cells.jsonl").open("a") as file:
        try:
            case = Case(entry, folder)
        except Exception as error:  # no fault of a verb
            lost = Outcome("crash", f"the model cannot be built: {plain_text(error)}", frames=where(error)).to_json()
            file.writelines(json.dumps([verb, lost]) + "\n" for verb in verbs)
            return
        for verb, outcome in run_all(case, verbs):
            file.write(json.dumps([verb, outcome.to_json()]) + "\n")
            file.flush()


def _read(file: Path, verbs: Sequence[str], reason: str) -> dict[str, dict[str, Any]]:
    found = dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {}
    return found | {verb: Outcome("crash", reason).to_json() for verb in verbs if verb not in found}


def _reopen(table: Table, folder: Path, said: Callable[[str], object]) -> None:
    """Let a fresh process open what was saved, and write what it says into the cells."""
    files = [str(path) for name in table for path in sorted((folder / name).glob("fresh-*.pt"))]
    results = folder / "reopened.jsonl"
    results.touch()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    while files:
        command = [sys.executable, "-m", "tests.zoo.reopening", str(results), *files]
        with (folder / "reopened.log").open("a") as log:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=60 + 20 * len(files))
        done = {json.loads(line)["file"] for line in results.read_text().splitlines()}
        left = [file for file in files if file not in done]
        if left:  # the process died on the first of them
            line = {"file": left[0], "status": "crash", "text": "the process that opened it ended"}
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        files = left[1:]
    for line in map(json.loads, results.read_text().splitlines()):
        name, verb = Path(line["file"]).parent.name, Path(line["file"]).stem.removeprefix("fresh-")
        cell = table[name]["pretrained"]
        if line["status"] != "works" and cell["status"] == "works":
            frames = line.get("frames", [])
            table[name]["pretrained"] = cell | {
                "status": line["status"], "text": f"{verb}: {line['text']}", "frames": frames
            }  # fmt: skip
        written = table[name].get("generate", {"status": "n/a"})
        if line.get("tokens") is False and written["status"] == "works":
            text = "other tokens after reopening in a fresh process"
            table[name]["generate"] = written | {"status": "wrong", "text": text}
        said(f"{name}: {verb} reopened: {line['status']}")
