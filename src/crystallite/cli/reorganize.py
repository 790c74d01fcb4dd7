"""`crystallite reorganize` and `crystallite compress`: a smaller model, saved where it is smaller."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.cli.running import open_calibration, open_dense, print_result
from crystallite.core.errors import InvalidOption
from crystallite.models.gguf_source import is_gguf
from crystallite.models.layered_folder import is_layered
from crystallite.models.opening import write_model
from crystallite.models.summary import Summary, summary

__all__ = ["run", "run_compress"]

# What `compress_folder` takes.
_OF_FOLDERS = {"budget", "objective", "form", "embeddings", "ridge", "seed", "targets", "ignore"}


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Reorganize and save; 0, or 1 if no layer became smaller."""
    from crystallite.reorganization.rewrite import reorganize

    model = open_dense(options.model, options.weights, options.original)
    small = reorganize(model, progress=sys.stderr.isatty(), **given)
    return _saved(options, model, {options.out: small}, given)


def run_compress(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Compress and save; 0, or 1 if no layer became smaller."""
    from crystallite.compression.compress import compress

    calibration = open_calibration(options, options.model, options.batch)
    budgets = given.get("budget", [])
    if len(budgets) == 1:
        given = {**given, "budget": budgets[0]}
    places = [options.out / f"{budget:g}" for budget in budgets] if len(budgets) > 1 else [options.out]
    if options.memory is not None or options.engine == "ray" or is_gguf(Path(options.model)):
        return _layer_by_layer(options, given, calibration, places)
    model = open_dense(options.model, options.weights, options.original)
    found = compress(model, calibration, progress=sys.stderr.isatty(), **given)
    results = dict(zip(places, found if len(places) > 1 else [found], strict=True))
    sources = [*map(str, options.calibration), *["general text"] * options.general_text]
    return _saved(options, model, results, {**given, "calibration": ", ".join(sources)})


def _layer_by_layer(options: argparse.Namespace, given: dict[str, Any], calibration: Any, places: list[Path]) -> int:
    """Compress a folder that need not fit into memory."""
    from crystallite.compression.decoders.on_disk import compress_folder

    if not is_layered(Path(options.model)):
        asked = "--memory" if options.memory is not None else "--engine ray"
        raise InvalidOption(f"{asked}: expected a transformers folder or a GGUF file as MODEL, got {options.model}")
    if wrong := sorted({*given} - _OF_FOLDERS):
        word = f"--{wrong[0].replace('_', '-')}"
        raise InvalidOption(f"{options.model}: {word} needs the model in memory; open it as a transformers folder")
    shown = {"memory": options.memory, "engine": options.engine, "progress": sys.stderr.isatty()}
    found = compress_folder(options.model, calibration, options.out, **shown, **given)
    _print(options, dict(zip(places, found if len(places) > 1 else [found], strict=True)), places)
    return 0


def _saved(options: argparse.Namespace, model: nn.Module, results: dict[Path, nn.Module], given: dict[str, Any]) -> int:
    summaries = {place: summary(small) for place, small in results.items()}
    smaller = [place for place, found in summaries.items() if any(c.macs_after != c.macs_before for c in found.changes)]
    for place in smaller:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        write_model(results[place], place, model, Path(options.model), plain)
    _print(options, summaries, smaller)
    return 0 if smaller else 1


def _print(options: argparse.Namespace, summaries: dict[Path, Summary], saved: list[Path]) -> None:
    """Summaries, and where what they are of was saved; one alone is one object in JSON, too."""
    ends = {
        place: f"Saved in {place}." if place in saved else "Nothing saved: no layer became smaller."
        for place in summaries
    }
    text = "\n\n".join(f"{found}\n\n{ends[place]}" for place, found in summaries.items())
    plain = [{**found.to_json(), "out": str(p) if p in saved else None} for p, found in summaries.items()]
    print_result(text, plain if len(plain) > 1 else plain[0], options, options.model)
