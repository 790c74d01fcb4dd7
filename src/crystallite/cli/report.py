"""`crystallite report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from crystallite.cli.options import add_annealing
from crystallite.core.errors import CheckpointError

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  crystallite report model.safetensors --out report.html
  crystallite validate original small --data held_out.npz --levels default --json > verdict.json
  crystallite report ./my-hf-model --out report.html --reorganized small --verdict verdict.json --figures figures
"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "report",
        help="one HTML page that shows what was found",
        description="Analyse a checkpoint and write one self-contained HTML page: verdict, layers, pictures, levels.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="a weights file or a Hugging Face model folder, as for analyze")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(default: report.html)")
    parser.add_argument("--title", help="what the page calls the model")
    parser.add_argument("--reorganized", type=Path, metavar="FOLDER", help="what reorganize wrote")
    parser.add_argument("--verdict", type=Path, metavar="FILE", help="what validate --json printed")
    parser.add_argument("--front", type=Path, metavar="FILE", help="JSON rows: name, family, macs, latency_ms, quality")
    parser.add_argument("--monitor", type=Path, metavar="FILE", help="JSON lines that training wrote")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="also write each figure as a file of its own")
    parser.add_argument("--format", choices=["svg", "png"], default="svg", help="of these figures (default: svg)")
    add_annealing(parser)
    parser.add_argument("--include", action="append", metavar="PATTERN", help="only layers whose name matches")
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="not the layers whose name matches")
    parser.add_argument("--json", action="store_true", help="what was written, as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page, and the figures if asked; 0."""
    from crystallite.report.build import report

    made = report(
        options.path,
        options.out,
        title=options.title,
        reorganized=options.reorganized,
        verdict=_read(options.verdict),
        front=_read(options.front),
        monitor=options.monitor,
        progress=sys.stderr.isatty(),
        level=options.level,
        null=options.null,
        correction=options.correction,
        rule=options.rule,
        random_walk=options.random_walk,
        alpha=options.alpha,
        delta0=options.delta0,
        tau=options.tau,
        include=options.include or ("*",),
        exclude=options.exclude or (),
    )
    figures = made.figures(options.figures, options.format) if options.figures else []
    if options.json:
        written = {"out": str(options.out), "figures": [str(f) for f in figures], "verdict": made.analysis.verdict}
        print(json.dumps(written, indent=1))
        return 0
    print(made.analysis.verdict)
    print(f"Written: {options.out}" + (f" and {len(figures)} figures in {options.figures}" if figures else ""))
    return 0


def _read(path: Path | None) -> Any:
    if path is None:
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from None
