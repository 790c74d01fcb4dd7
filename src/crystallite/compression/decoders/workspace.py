"""Tensors that a long run keeps: in memory, or as files in a folder from which a killed run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.core.files import write_file, writing

__all__ = ["Workspace"]


class Workspace:
    """Named sets of tensors; in a folder, each is there whole or not at all.

    >>> import torch
    >>> kept = Workspace()
    >>> kept.put("a", {"x": torch.ones(2)})
    >>> kept.has("a"), kept.get("a")["x"].tolist()
    (True, [1.0, 1.0])
    """

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None keeps everything in memory."""
        self.folder = folder
        self._kept: dict[str, dict[str, Tensor]] = {}
        if folder is not None:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, tensors: dict[str, Tensor]) -> None:
        if self.folder is None:
            self._kept[name] = tensors
            return
        target = self._file(name)
        unfinished = target.with_suffix(".unfinished")
        with writing(target):
            save_file({key: value.contiguous() for key, value in tensors.items()}, unfinished)
            os.replace(unfinished, target)

    def get(self, name: str) -> dict[str, Tensor]:
        if self.folder is None:
            return self._kept[name]
        with safe_open(self._file(name), "pt") as stored:
            return {key: stored.get_tensor(key).clone() for key in stored.keys()}  # noqa: SIM118

    def one(self, name: str, key: str) -> Tensor:
        """One tensor of a set."""
        if self.folder is None:
            return self._kept[name][key]
        with safe_open(self._file(name), "pt") as stored:
            found: Tensor = stored.get_tensor(key).clone()
        return found

    def has(self, name: str) -> bool:
        return name in self._kept if self.folder is None else self._file(name).is_file()

    def drop(self, name: str) -> None:
        if self.folder is None:
            self._kept.pop(name, None)
        else:
            self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.safetensors"

    def check_identity(self, identity: dict[str, Any]) -> None:
        """Refuse a folder in which another run has left its state; a new one is marked as this run's."""
        if self.folder is None:
            return
        file, plain = self.folder / "run.json", json.loads(json.dumps(identity))
        if not file.is_file():
            write_file(file, json.dumps(plain, indent=1).encode())
            return
        found = json.loads(file.read_text())
        if found != plain:
            other = next((k for k in {*found, *plain} if found.get(k) != plain.get(k)), "")
            raise InvalidOption(
                f"{self.folder}: holds the state of another run ({other}: {found.get(other)!r:.80}, here "
                f"{plain.get(other)!r:.80}); remove it or name another folder"
            )
