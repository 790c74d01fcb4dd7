"""Calibration and test data from files of arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from crystallite.core.errors import CheckpointError, InvalidOption

__all__ = ["read_data"]


def read_data(path: Path, batch: int) -> list[Any]:
    """The batches of a file of arrays: `inputs`, or keyword arguments by name, and `labels` if there are any."""
    if batch < 1:
        raise InvalidOption(f"--batch must be at least 1, got {batch}")
    if not path.is_file():
        raise InvalidOption(f"{path}: no such file")
    arrays = _arrays(path)
    if not arrays:
        raise CheckpointError(f"{path}: expected an array `inputs`, found none")
    sizes = {name: len(value) if value.ndim else 0 for name, value in arrays.items()}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise CheckpointError(f"{path}: expected the same number of samples, at least one, in all arrays, got {sizes}")
    if arrays.keys() == {"labels"}:
        raise CheckpointError(f"{path}: expected an array `inputs` beside `labels`, found none")
    return list(_cut(arrays, batch))


def _arrays(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise CheckpointError(f"{path}: expected .npz with named arrays, got one array")
            return {name: torch.from_numpy(stored[name]) for name in stored.files}
    except (ValueError, TypeError, EOFError, SafetensorError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: expected arrays in .npz or .safetensors: {error}") from None


def _cut(arrays: dict[str, Tensor], batch: int) -> Iterator[Any]:
    labels = arrays.get("labels")
    for start in range(0, len(next(iter(arrays.values()))), batch):
        part = {name: value[start : start + batch] for name, value in arrays.items()}
        if "inputs" not in arrays:
            yield part
        else:
            yield part["inputs"] if labels is None else (part["inputs"], part["labels"])
