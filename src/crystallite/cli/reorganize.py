"""`crystallite reorganize` and `crystallite compress`: a smaller model, saved where it is smaller."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.cli.running import open_calibration, open_dense, print_result
from crystallite.core.errors import InvalidOption
from crystallite.models.layered_folder import is_transformers_folder
from crystallite.models.opening import write_model
from crystallite.models.summary import summary

__all__ = ["run", "run_compress"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Reorganize and save; 0, or 1 if no layer became smaller."""
    from crystallite.reorganization.rewrite import reorganize

    model = open_dense(options.model, options.weights)
    small = reorganize(model, progress=sys.stderr.isatty(), **given)
    return _saved(options, model, small, given)


def run_compress(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Compress and save; 0, or 1 if no layer became smaller."""
    from crystallite.compression.compress import compress

    calibration = open_calibration(options, options.model, options.batch)
    if options.memory is not None:
        return _layer_by_layer(options, given, calibration)
    model = open_dense(options.model, options.weights)
    small = compress(model, calibration, progress=sys.stderr.isatty(), **given)
    return _saved(options, model, small, {**given, "calibration": ", ".join(map(str, options.calibration))})


def _layer_by_layer(options: argparse.Namespace, given: dict[str, Any], calibration: Any) -> int:
    """Compress a folder that need not fit into memory."""
    from crystallite.compression.decoders.on_disk import compress_folder

    if not is_transformers_folder(Path(options.model)):
        raise InvalidOption(f"--memory: expected a transformers folder as MODEL, got {options.model}")
    shown = {"memory": options.memory, "progress": sys.stderr.isatty()}
    result = compress_folder(options.model, calibration, options.out, **shown, **given)
    end = f"Saved in {options.out}."
    print_result(f"{result}\n\n{end}", {**result.to_json(), "out": str(options.out)}, options, options.model)
    return 0


def _saved(options: argparse.Namespace, model: nn.Module, small: nn.Module, given: dict[str, Any]) -> int:
    result = summary(small)
    replaced = any(c.macs_after != c.macs_before for c in result.changes)
    if replaced:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        write_model(small, options.out, model, Path(options.model), plain)
    end = f"Saved in {options.out}." if replaced else "Nothing saved: no layer became smaller."
    plain_result = {**result.to_json(), "out": str(options.out) if replaced else None}
    print_result(f"{result}\n\n{end}", plain_result, options, options.model)
    return 0 if replaced else 1
