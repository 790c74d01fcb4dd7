"""`crystallite report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from crystallite.cli.running import print_result
from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.manifest import read_manifest
from crystallite.models.opening import open_model
from crystallite.report.build import report

__all__ = ["run"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Write the page, and the figures if asked; 0."""
    if options.out.exists() and not options.force:
        raise InvalidOption(f"{options.out}: exists already; pass --force to replace it, or another name as --out")
    if folders := given.pop("reorganized", None):
        if len(folders) > 1 and "verdict" in given:
            raise InvalidOption("--verdict: is that of one folder, but --reorganized names several")
        given["reorganized"] = (
            folders[0] if len(folders) == 1 else {Path(folder).resolve().name: folder for folder in folders}
        )
    given |= {name: _read(given[name]) for name in ("verdict", "front") if name in given}
    if options.original is not None:
        _open_with_code(given, options.original)
    made = report(options.source, options.out, progress=sys.stderr.isatty(), **given)
    figures = made.figures(options.figures, options.format) if options.figures else []
    also = f" and {len(figures)} figures in {options.figures}" if figures else ""
    plain = {"out": str(options.out), "figures": [str(f) for f in figures], "verdict": made.analysis.verdict}
    print_result(f"{made.analysis.verdict}\nWritten: {options.out}{also}", plain, options)
    return 0


def _open_with_code(given: dict[str, Any], original: str) -> None:
    """Folders of models with code of their own become the models, beside the verdicts that lie in the folders."""
    folders = given["reorganized"]
    if not isinstance(folders, dict):
        given["reorganized"] = open_model(str(folders), None, original)
        given.setdefault("verdict", read_manifest(folders).get("verdict"))
        return
    given["reorganized"] = {name: open_model(str(folder), None, original) for name, folder in folders.items()}
    verdicts = {name: read_manifest(folder).get("verdict") for name, folder in folders.items()}
    given["verdict"] = {name: verdict for name, verdict in verdicts.items() if verdict}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from None
