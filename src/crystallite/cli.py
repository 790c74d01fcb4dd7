"""The `crystallite` command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from crystallite.errors import CrystalliteError

__all__ = ["main"]

_ANALYZE_EXAMPLE = """\
example:
  crystallite analyze model.safetensors
  crystallite analyze ./my-hf-model --level percolation --rule neyman --json > analysis.json
  crystallite analyze big-model/ --fast --resume done.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 1 with one line on standard error when the input is bad."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CrystalliteError, OSError) as error:
        print(f"crystallite: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("crystallite: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crystallite",
        description="Take trained neural networks apart along the structure that training left in them.",
    )
    parser.add_argument("--version", action="version", version=f"crystallite {version('crystallite')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    analyze = commands.add_parser(
        "analyze",
        help="what structure the weights of a checkpoint have",
        description="Test and decompose every matrix of a checkpoint. Needs no data and no model code.",
        epilog=_ANALYZE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    analyze.add_argument(
        "path", help="safetensors, .pt/.pth/.bin, .npz, .onnx or .gguf file, or a Hugging Face model folder"
    )
    analyze.add_argument(
        "--level", default=0.01, type=_level, help='significance level, or "percolation" (default: 0.01)'
    )
    analyze.add_argument("--null", choices=["auto", "init", "empirical"], default="auto", help="what noise looks like")
    analyze.add_argument("--correction", choices=["bonferroni", "holm", "bh"], help="for testing many weights at once")
    analyze.add_argument("--rule", choices=["both", "neyman"], default="both", help="tests a kept weight must pass")
    analyze.add_argument("--random-walk", choices=["calibrated", "literal"], default="calibrated")
    analyze.add_argument("--fast", action="store_true", help="blocks at the one level only: no profile, no hubs")
    analyze.add_argument("--include", action="append", metavar="PATTERN", help="only layers whose name matches")
    analyze.add_argument("--exclude", action="append", metavar="PATTERN", help="not the layers whose name matches")
    analyze.add_argument("--resume", metavar="FILE", help="keep finished matrices here and go on after an interruption")
    analyze.add_argument("--engine", choices=["local", "ray"], default="local", help="where to run")
    analyze.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    analyze.set_defaults(run=_analyze)

    demo = commands.add_parser(
        "demo",
        help="a tour on a network trained on the spot",
        description="Train small networks on scikit-learn's digits and show what separates and what does not.",
        epilog="example:\n  crystallite demo --out demo-output",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--out", default="demo-output", type=Path, help="folder for what the demo writes")
    demo.set_defaults(run=_demo)
    return parser


def _level(text: str) -> float | str:
    if text == "percolation":
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected a number or "percolation", got {text!r}') from None


def _analyze(options: argparse.Namespace) -> int:
    from crystallite.analysis import analyze

    analysis = analyze(
        options.path,
        null=options.null,
        level=options.level,
        correction=options.correction,
        random_walk=options.random_walk,
        rule=options.rule,
        fast=options.fast,
        include=options.include or ("*",),
        exclude=options.exclude or (),
        resume=options.resume,
        engine=options.engine,
        progress=sys.stderr.isatty(),
    )
    if options.json:
        json.dump(analysis.to_json(), sys.stdout, indent=1)
        print()
        return 0
    print(analysis.table(shutil.get_terminal_size((100, 24)).columns))
    print(f"\n{analysis.verdict}")
    if analysis.skipped:
        print(f"Left out: {len(analysis.skipped)} tensors that are no matrices of weights (--json lists them).")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from crystallite.demo import run

    run(options.out)
    return 0
