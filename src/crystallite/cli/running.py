"""What several commands do: open the model that MODEL names, and print results."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.models.opening import open_model
from crystallite.reorganization.restore import restore

__all__ = ["open_dense", "print_result"]


def open_dense(source: str, weights: Path | None) -> nn.Module:
    """The model that the command line names; a reorganized one with its layers dense again."""
    model = open_model(source, weights)
    return restore(model) if hasattr(model, "reorganization") else model


def print_result(result: Any, plain: Any, options: argparse.Namespace, source: str | None = None) -> None:
    """Print a result, or its plain values as JSON; and say so if `source` is a factory that was given no weights."""
    print(json.dumps(plain, indent=1) if options.json else result)
    if source is not None and options.weights is None and not Path(source).is_dir():
        note = f"{source}: weights as the factory returned them; pass --weights FILE for trained ones"
        print(note, file=sys.stderr if options.json else sys.stdout)  # whoever parses JSON wants nothing else
