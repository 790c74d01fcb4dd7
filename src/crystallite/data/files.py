"""Calibration and test data from files: arrays, plain text and the tokenizer of the model, or a folder of images."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.data.general_text import general_text
from crystallite.data.images import has_processor, images
from crystallite.data.text import texts

__all__ = ["read_data"]

_ARRAYS = (".npz", ".npy", ".safetensors")


def read_data(
    paths: Path | Sequence[Path],
    batch: int,
    model: str | Path = "",
    *,
    length: int | None = None,
    tokens: int | None = None,
    least: int = 1,
    halves: bool = False,
    general: bool = False,
) -> Iterable[Any]:
    """The batches of a file of arrays (`inputs`, or keyword arguments by name, and `labels` if any), of text files, or
    of a folder of images.

    model: the folder with the tokenizer that text is read with, or the processor that prepares images. length, tokens,
    least, halves: of text, as for `texts`. general: take turns with `general_text`.
    """
    if batch < 1:
        raise InvalidOption(f"--batch must be at least 1, got {batch}")
    files = [paths] if isinstance(paths, Path) else list(paths)
    more = [general_text()] if general else []
    if folders := [path for path in files if path.is_dir()]:
        if more:
            raise InvalidOption(f"--general-text takes turns with text, and {folders[0]} holds images")
        if len(files) > 1 or length is not None:
            given = "--length" if length is not None else f"{len(files)} paths"
            raise InvalidOption(f"{folders[0]}: expected one folder of images and nothing beside it, got {given}")
        return images(folders[0], model if has_processor(model) else None, batch=batch, least=least)
    arrays = [path for path in files if path.suffix in _ARRAYS or _holds_arrays(path)]
    if not arrays:
        sources: list[Path | str] = [*files, *more]
        return texts(sources, Path(model), length=length, tokens=tokens, batch=batch, least=least, halves=halves)
    if more:
        raise InvalidOption(f"--general-text takes turns with text, and {arrays[0]} holds arrays")
    if len(files) > 1:
        raise InvalidOption(f"{arrays[0]}: expected one file of arrays, or several of text, got {len(files)} files")
    if length is not None:
        raise InvalidOption(f"--length is that of text; the arrays in {files[0]} have their own")
    return _read_arrays(files[0], batch)


def _holds_arrays(path: Path) -> bool:
    """Whether a file of some other name begins as NumPy's do."""
    if not path.is_file():
        raise InvalidOption(f"{path}: no such file")
    with path.open("rb") as stream:
        return stream.read(6).startswith((b"PK\x03\x04", b"\x93NUMPY"))


def _read_arrays(path: Path, batch: int) -> list[Any]:
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
        with path.open("rb") as stream:
            stored = np.load(stream, allow_pickle=False)
            if not isinstance(stored, np.lib.npyio.NpzFile):
                raise CheckpointError(f"{path}: expected .npz with named arrays, got one array; np.savez names it")
            with stored:
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
