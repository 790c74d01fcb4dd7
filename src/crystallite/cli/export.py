"""`crystallite export`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.data.files import read_data
from crystallite.export.onnx import export
from crystallite.models.artifact import load
from crystallite.models.opening import open_model
from crystallite.models.transformers_folder import open_pretrained

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  crystallite export small small.onnx --data inputs.npz
  crystallite export small small.onnx --data tokens.safetensors --int8

MODEL is a folder that reorganize wrote, a transformers folder, or package.module:factory. The data file holds `inputs`,
or the model's keyword arguments by name; the first axis counts samples. ONNX Runtime and the model run on them, and the
file is written only if they agree: to rounding, or with --int8 within --max-deviation.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "export",
        help="a model as ONNX, also with 8-bit weights",
        description="Write a model as ONNX, and check the file in ONNX Runtime against the model.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or package.module:factory")
    parser.add_argument("out", type=Path, metavar="FILE.onnx", help="where to write; must not exist")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="inputs: .npz or .safetensors")
    parser.add_argument("--int8", action="store_true", help="weights of linear layers as 8-bit integers")
    parser.add_argument("--max-deviation", type=float, default=0.1, help="that int8 may have (default: 0.1)")
    parser.add_argument("--original", metavar="MODEL", help="package.module:factory, for a model with its own code")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="samples at once (default: 32)")
    parser.add_argument("--json", action="store_true", help="what was written, as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.out.exists():  # before the work, not after it
        raise InvalidOption(f"{options.out}: exists already; choose another name or remove it")
    data = read_data(options.data, options.batch)
    done = export(_opened(options), options.out, data, int8=options.int8, max_deviation=options.max_deviation)
    print(json.dumps(asdict(done), indent=1) if options.json else done)
    return 0


def _opened(options: argparse.Namespace) -> nn.Module:
    """The model as it was saved: what is exported is the reorganized one, not the dense one it was made from."""
    folder = Path(options.model)
    if (folder / "config.json").is_file():
        return open_pretrained(folder)
    if folder.is_dir():
        return load(folder, None if options.original is None else open_model(options.original, options.weights))
    return open_model(options.model, options.weights)
