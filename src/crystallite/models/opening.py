"""Models as the command line names them: folders, or functions of the user's that return one; and written again."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.suggest import nearest
from crystallite.models.artifact import load, load_mapped, save
from crystallite.models.layered_folder import is_transformers_folder
from crystallite.models.manifest import is_saved
from crystallite.models.transformers_opening import open_pretrained
from crystallite.weights.checkpoint import open_checkpoint

__all__ = ["open_mapped", "open_model", "write_model"]


def open_model(source: str, weights: Path | None, original: str | None = None) -> nn.Module:
    """A model from a folder, as it was saved there, or from code.

    original: what makes an instance of it, for a folder of a model with code of its own.
    """
    folder = Path(source)
    into = None if original is None else open_model(original, None)
    if original is not None and not folder.is_dir():
        raise InvalidOption(f"--original says how a folder that crystallite saved computes; {source} is none")
    if original is not None and weights is not None:
        raise InvalidOption("--original and --weights do not go together: the folder has the weights")
    if not folder.is_dir():
        model = _from_code(source)
    elif is_transformers_folder(folder):
        model = open_pretrained(folder, into)
    else:
        model = load(folder, into)
    if weights is not None:
        _fill(model, weights)
    return model


def open_mapped(folder: Path, into: nn.Module | None = None) -> nn.Module:
    """A model from a folder that crystallite or transformers saved; of ours, its weights are left in the file."""
    is_plain = not is_saved(folder) and is_transformers_folder(folder)
    return open_pretrained(folder, into) if is_plain else load_mapped(folder, into)


def _from_code(source: str) -> nn.Module:
    """What `package.module:factory` or `file.py:factory` returns."""
    place, _, factory_name = source.rpartition(":")
    file = Path(place) if place.endswith(".py") else None
    named = factory_name.split(".") if file else [*place.split("."), *factory_name.split(".")]
    if not all(part.isidentifier() for part in named):
        expected = "expected a model folder, package.module:factory or file.py:factory"
        raise InvalidOption(f"{source}: {expected}")
    if file is not None and not file.is_file():
        raise InvalidOption(f"{source}: no file {file}")
    folder = str(file.resolve().parent) if file else os.getcwd()  # the current one, as python -m has it
    sys.path.insert(0, folder)
    try:
        factory: Any = importlib.import_module(place) if file is None else _module_of(file)
        for part in factory_name.split("."):
            if not hasattr(factory, part):
                known = [name for name in dir(factory) if callable(getattr(factory, name, None))]
                raise AttributeError(f"there is no {part} in {place}{nearest(part, known)}")
            factory = getattr(factory, part)
        model = factory()
    except Exception as error:  # whatever the user's code raises
        raise InvalidOption(f"{source}: {type(error).__name__}: {error}") from error
    finally:
        if file is not None:  # what stands beside the file is importable while it loads, and not longer
            sys.path.remove(folder)
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"{source}: expected a function that returns an nn.Module, got {type(model).__name__}")
    return model


def _module_of(file: Path) -> ModuleType:
    """A file of the user's as a module, under a name that no other module has."""
    name = f"_crystallite_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # .py is a kind of file that Python knows
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _fill(model: nn.Module, file: Path) -> None:
    """Give a model the weights of a checkpoint, all of them."""
    with open_checkpoint(file) as checkpoint:
        state = {name: torch.as_tensor(checkpoint.read(name)) for name in checkpoint.tensors}
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f"{file}: {error}") from None


def write_model(model: nn.Module, target: Path, original: nn.Module, source: Path, options: dict[str, Any]) -> None:
    """A model as `crystallite.load` reads it; of a transformers folder, with its tokenizer and other files."""
    files = source if (source / "config.json").is_file() else None
    save(model, target, source=original, metadata={"model": str(source), **options}, files=files)
