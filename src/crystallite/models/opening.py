"""Models as the command line names them: folders, or functions of the user's that return one; and written again."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.artifact import load, save
from crystallite.models.transformers_folder import open_pretrained
from crystallite.weights.checkpoint import open_checkpoint

__all__ = ["open_model", "write_model"]


def open_model(source: str, weights: Path | None) -> nn.Module:
    """A model from a folder, as it was saved there, or from code."""
    folder = Path(source)
    if not folder.is_dir():
        model = _from_code(source)
    elif (folder / "config.json").is_file():
        model = open_pretrained(folder)
    else:
        model = load(folder)
    if weights is not None:
        _fill(model, weights)
    return model


def _from_code(source: str) -> nn.Module:
    module_name, _, factory_name = source.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), *factory_name.split(".")]):
        raise InvalidOption(f"{source}: expected a model folder, or package.module:factory")
    sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
        model = factory()
    except Exception as error:  # whatever the user's code raises
        raise InvalidOption(f"{source}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"{source}: expected a function that returns an nn.Module, got {type(model).__name__}")
    return model


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
