"""What several commands do: open the model that MODEL names, and print results."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.data.files import read_data
from crystallite.data.images import Images
from crystallite.data.text import Texts
from crystallite.models.opening import open_model
from crystallite.reorganization.restore import restore

__all__ = ["open_calibration", "open_data", "open_dense", "print_result"]


def open_dense(source: str, weights: Path | None, original: str | None = None) -> nn.Module:
    """The model that the command line names; a reorganized one with its layers dense again."""
    model = open_model(source, weights, original)
    return restore(model) if hasattr(model, "reorganization") else model


def open_data(
    options: argparse.Namespace, model: str, batch: int, name: str = "data", *, halves: bool = False
) -> Iterable[Any]:
    """The data that an option names; how much text or how many images is said. halves: of text, as for `texts`."""
    return _said(read_data(getattr(options, name), batch, model, length=options.length, halves=halves))


def open_calibration(options: argparse.Namespace, model: str, batch: int) -> Iterable[Any]:
    """The same for what is fitted to, of which a part is needed to judge by."""
    limits = {"length": options.length, "tokens": options.tokens, "least": 2}
    general = getattr(options, "general_text", False)
    return _said(read_data(options.calibration, batch, model, general=general, **limits))


def _said(data: Iterable[Any]) -> Iterable[Any]:
    if isinstance(data, (Texts, Images)):
        print(data, file=sys.stderr)
    return data


def print_result(result: Any, plain: Any, options: argparse.Namespace, source: str | None = None) -> None:
    """Print a result, or its plain values as JSON; and say so if `source` is a factory that was given no weights."""
    print(json.dumps(plain, indent=1) if options.json else result)
    if source is not None and options.weights is None and not Path(source).is_dir():
        note = f"{source}: weights as the factory returned them; pass --weights FILE for trained ones"
        print(note, file=sys.stderr if options.json else sys.stdout)  # whoever parses JSON wants nothing else
