"""`crystallite validate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from crystallite.core.errors import InvalidOption
from crystallite.data.files import read_data
from crystallite.models.manifest import is_saved
from crystallite.models.opening import open_model
from crystallite.models.transformers_folder import open_pretrained
from crystallite.reorganization.restore import restore
from crystallite.validation.metrics import METRICS
from crystallite.validation.run import validate

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  crystallite validate my_package.models:build small --data held_out.npz --metric accuracy --max-drop 0.01
  crystallite validate ./my-hf-model small --data tokens.safetensors --levels default --json > verdict.json

The data file holds `inputs`, or the model's keyword arguments by name, and `labels` if a metric needs them; the first
axis counts samples. The verdict is printed, and kept in REORGANIZED if crystallite wrote that folder; ORIGINAL must
then be the model it was made from. Exit code 0: passed, 1: failed, 2: bad input.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "validate",
        help="whether a reorganized model may replace the original",
        description="Run the original and the reorganized model on the same inputs, and compare what they return.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("original", metavar="ORIGINAL", help="a folder, or package.module:factory")
    parser.add_argument("reorganized", type=Path, metavar="REORGANIZED", help="the folder that reorganize wrote")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help=".npz or .safetensors")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="samples at once (default: 64)")
    parser.add_argument("--metric", choices=sorted(METRICS), help="what the task calls good; needs labels")
    parser.add_argument("--max-drop", type=float, default=0.01, help="of the metric, in its units (default: 0.01)")
    parser.add_argument("--min-agreement", type=float, help="least share of samples with the same argmax")
    parser.add_argument("--max-relative-deviation", type=float, default=0.1, help="of an output (default: 0.1)")
    parser.add_argument("--quantile", type=float, default=1.0, help="of the samples that keep it (default: 1, all)")
    parser.add_argument("--levels", nargs="+", metavar="LEVEL", help='also sweep these levels; "default" for a grid')
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the verdict; 0 if the reorganized model passed, 1 if it failed."""
    data = read_data(options.data, options.batch)
    levels = options.levels
    if levels is not None:
        levels = "default" if levels == ["default"] else [_level(text) for text in levels]
    reorganized: Any = options.reorganized
    if not reorganized.is_dir():
        raise InvalidOption(f"{reorganized}: expected a folder with a reorganized model")
    if not is_saved(reorganized):
        reorganized = open_pretrained(reorganized).eval()
    original = open_model(options.original, options.weights).eval()
    original = restore(original) if hasattr(original, "reorganization") else original
    verdict = validate(
        original,
        reorganized,
        data,
        options.metric,
        levels,
        max_drop=options.max_drop,
        min_agreement=options.min_agreement,
        max_relative_deviation=options.max_relative_deviation,
        quantile=options.quantile,
    )
    print(json.dumps(verdict.to_json(), indent=1) if options.json else verdict)
    return 0 if verdict.passed else 1


def _level(text: str) -> float | str:
    if text in ("percolation", "bonferroni"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidOption(f'--levels: expected numbers, "percolation" or "bonferroni", got {text!r}') from None
