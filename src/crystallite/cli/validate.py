"""`crystallite validate`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from crystallite.cli.running import open_data, open_dense, print_result
from crystallite.core.errors import InvalidOption
from crystallite.models.manifest import check_source, is_saved
from crystallite.models.preparing import prepared
from crystallite.models.transformers_opening import open_pretrained
from crystallite.validation.run import validate

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Print the verdict; 0 if the reorganized model passed, 1 if it failed."""
    data = open_data(options, options.original, options.batch, halves=given.get("metric") == "retrieval")
    if given.get("levels") == ["default"]:
        given["levels"] = "default"
    elif "default" in given.get("levels", ()):
        raise InvalidOption('--levels: expected "default" alone, or levels')
    reorganized: Any = options.reorganized
    if not reorganized.is_dir():
        raise InvalidOption(f"{reorganized}: expected a folder with a reorganized model")
    if not is_saved(reorganized):
        reorganized = open_pretrained(reorganized).eval()
    original = open_dense(options.original, options.weights).eval()
    if options.weights is None and not Path(options.original).is_dir() and is_saved(options.reorganized):
        made = f"the weights are those that {options.original} returned, which may be random: pass --weights FILE"
        check_source(options.reorganized, prepared(original)[0], f"{made} with the trained ones")
    verdict = validate(original, reorganized, data, **given)
    print_result(verdict, verdict.to_json(), options, options.original)
    if is_saved(options.reorganized):
        print(f"\nVerdict written into {options.reorganized}.", file=sys.stderr if options.json else sys.stdout)
    return 0 if verdict.passed else 1
