"""The state of an unfinished training run on disk: safetensors and JSON, whole or not there.

FOLDER/step-000000938/   state.safetensors   weights, the optimizer's tensors, the state of the random numbers
                         state.json          format, what the run is, step, history
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.files import new_folder
from crystallite.weights.checkpoint import open_checkpoint
from crystallite.weights.stored import SourceFile, load_json

__all__ = ["Checkpoints", "State"]

_VERSION = 1
_TENSORS, _RECORD = "state.safetensors", "state.json"


@dataclass(frozen=True)
class State:
    """Where a run stands."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]


class Checkpoints:
    """A folder that holds the last state of one run.

    `run` says which run it is, in plain JSON values: a folder of another run is refused, not overwritten.
    """

    def __init__(self, folder: str | os.PathLike[str], run: Mapping[str, Any]) -> None:
        self.folder, self.run = Path(folder), json.loads(json.dumps(dict(run)))

    def latest(self) -> State | None:
        """The last state that was written completely, or None."""
        steps = sorted(self.folder.glob("step-*"))
        return self._read(steps[-1]) if steps else None

    def _read(self, step: Path) -> State:
        file = SourceFile.at(step / _RECORD)
        stored = load_json(step / _RECORD, file.head(file.size), "checkpoint")
        if stored.get("format") != "crystallite training" or stored.get("version") != _VERSION:
            raise CheckpointError(f"{step / _RECORD}: expected the state of a training run, version {_VERSION}")
        if stored.get("run") != self.run:
            kept = stored["run"] if isinstance(stored.get("run"), dict) else {}
            differs = [name for name in self.run if kept.get(name) != self.run[name]]
            raise InvalidOption(
                f"{self.folder}: holds the checkpoint of another run ({', '.join(differs)} differ); "
                "choose another folder or remove it"
            )
        if not isinstance(stored.get("record"), dict):
            raise CheckpointError(f"{step / _RECORD}: expected a record, got {stored.get('record')!r:.80}")
        with open_checkpoint(step / _TENSORS) as checkpoint:
            tensors = {name: torch.as_tensor(checkpoint.read(name)).clone() for name in checkpoint.tensors}
        return State(tensors, stored["record"])

    def write(self, step: int, state: State) -> None:
        """Keep a state; earlier ones are removed once it is there."""
        target = self.folder / f"step-{step:09d}"
        with new_folder(target) as unfinished:
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in state.tensors.items()},
                      unfinished / _TENSORS)  # fmt: skip
            written = {"format": "crystallite training", "version": _VERSION, "run": self.run, "record": state.record}
            (unfinished / _RECORD).write_text(json.dumps(written) + "\n")
        for old in self.folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        for left in self.folder.glob(".*"):  # of a run that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
