"""`crystallite export`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.cli.running import open_data, print_result
from crystallite.core.errors import InvalidOption
from crystallite.export.run import export
from crystallite.models.artifact import load
from crystallite.models.opening import open_model

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Write the file and say how near it comes; 0."""
    data = None if options.data is None else open_data(options, options.model, options.batch)
    done = export(_opened(options), options.out, data, **given)
    print_result(done, asdict(done), options, options.model)
    return 0


def _opened(options: argparse.Namespace) -> nn.Module:
    """The model as it was saved: what is exported is the reorganized one, not the dense one it was made from."""
    if options.original is None:
        return open_model(options.model, options.weights)
    folder = Path(options.model)
    if not folder.is_dir() or (folder / "config.json").is_file():
        raise InvalidOption(f"--original says how a folder that crystallite saved computes; {folder} is none")
    if options.weights is not None:
        raise InvalidOption("--original and --weights do not go together: the folder has the weights")
    return load(folder, open_model(options.original, None))
