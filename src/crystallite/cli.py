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

from crystallite import exporting
from crystallite.baselines import command as bench
from crystallite.errors import CrystalliteError, InvalidOption
from crystallite.options import add_annealing
from crystallite.report import command as report
from crystallite.serving import command as serve
from crystallite.upgrading import command as upgrade
from crystallite.validation import command as validate

__all__ = ["main"]

_ANALYZE_EXAMPLE = """\
example:
  crystallite analyze model.safetensors
  crystallite analyze ./my-hf-model --level percolation --rule neyman --json > analysis.json
  crystallite analyze big-model/ --fast --resume done.jsonl
"""
_REORGANIZE_EXAMPLE = """\
example:
  crystallite reorganize ./my-hf-model --out small --level 0.001 --rule neyman
  crystallite reorganize my_package.models:build --weights trained.pt --out small --ignore "head*"
  crystallite reorganize ./my-hf-model --budget 0.5 --calibration tokens.safetensors --out small
  crystallite reorganize my_package.models:build --tolerance 0.05 --calibration inputs.npz --out small

MODEL is a transformers folder, a folder that crystallite saved, or an import path to a function (or a module class)
that returns an nn.Module when called without arguments. An import path runs that code, which is yours: a file of
weights alone does not say how a model computes.

Without --budget, --blocks or --tolerance: exact, by the paper's tests, and without data. With one of them: smaller
operators are fitted to the calibration file, which holds `inputs`, or the model's keyword arguments by name; the first
axis counts samples.
"""
_ANNEALING = {"level": 0.01, "null": "auto", "correction": None, "random_walk": "calibrated", "rule": "both"}
_FITTED = ("budget", "blocks", "joint", "tolerance", "confidence", "risk", "objective", "calibration", "polish_steps",
           "checkpoint", "seed")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 2 with one line on standard error when the input is bad.

    1 when there was nothing to do: no layer to write, or the reader of our output has left.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CrystalliteError, OSError) as error:
        print(f"crystallite: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
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
    add_annealing(analyze)
    analyze.add_argument("--fast", action="store_true", help="blocks at the one level only: no profile, no hubs")
    analyze.add_argument("--include", action="append", metavar="PATTERN", help="only layers whose name matches")
    analyze.add_argument("--exclude", action="append", metavar="PATTERN", help="not the layers whose name matches")
    analyze.add_argument("--resume", metavar="FILE", help="keep finished matrices here and go on after an interruption")
    analyze.add_argument("--engine", choices=["local", "ray"], default="local", help="where to run")
    analyze.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    analyze.set_defaults(run=_analyze)

    reorganize = commands.add_parser(
        "reorganize",
        help="a model rebuilt from its blocks, or fitted to a budget",
        description="Save a model with its layers rebuilt from their blocks, or fitted smaller ones.",
        epilog=_REORGANIZE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reorganize.add_argument("model", metavar="MODEL", help="a folder, or package.module:factory")
    reorganize.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to save; must not exist")
    reorganize.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    add_annealing(reorganize)
    reorganize.add_argument(
        "--as-it-is", action="store_true", help="anneal nothing: weights that are zero are the gaps"
    )
    reorganize.add_argument(
        "--even-if-slower", action="store_true", help="blocks wherever they need fewer multiply-adds"
    )
    fitted = reorganize.add_argument_group("fitted to data")
    fitted.add_argument("--budget", type=float, metavar="SHARE", help="of the layers' multiply-adds to keep")
    fitted.add_argument(
        "--objective", choices=["macs", "parameters", "latency", "int8"], help="what the budget counts (default: macs)"
    )
    fitted.add_argument("--blocks", type=int, metavar="K", help="every layer as so many independent blocks")
    fitted.add_argument("--joint", action="store_true", help="with --blocks: one partition through consecutive layers")
    fitted.add_argument("--tolerance", type=float, help="the cheapest budget whose risk is at most this")
    fitted.add_argument("--confidence", type=float, help="of that (default: 0.95)")
    fitted.add_argument("--risk", choices=["deviation", "disagreement"], help="(default: deviation)")
    fitted.add_argument("--calibration", type=Path, metavar="FILE", help="inputs: .npz or .safetensors")
    fitted.add_argument("--batch", type=int, default=64, metavar="N", help="samples at once (default: 64)")
    fitted.add_argument("--polish-steps", type=int, metavar="N", help="of training inside the structure (default: 0)")
    fitted.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="keep the state of that training here")
    fitted.add_argument("--seed", type=int, help="(default: 0)")
    reorganize.add_argument("--targets", action="append", metavar="PATTERN", help="only layers whose name matches")
    reorganize.add_argument("--ignore", action="append", metavar="PATTERN", help="not the layers whose name matches")
    reorganize.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    reorganize.set_defaults(run=_reorganize)

    validate.add_parser(commands)
    upgrade.add_parser(commands)
    exporting.add_parser(commands)
    serve.add_parser(commands)
    bench.add_parser(commands)
    report.add_parser(commands)

    demo = commands.add_parser(
        "demo",
        help="a tour on a network trained on the spot, or on MiniLM",
        description="Take a real network apart, rebuild it smaller, judge, save and serve it, and write a report.",
        epilog="example:\n  crystallite demo --out demo-output\n  crystallite demo --model minilm",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument("--out", default="demo-output", type=Path, help="folder for what the demo writes")
    demo.add_argument(
        "--model", choices=["digits", "minilm"], default="digits", help="trained here, or a sentence encoder from PyPI"
    )
    demo.set_defaults(run=_demo)
    return parser


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


def _reorganize(options: argparse.Namespace) -> int:
    from crystallite.dispatch import reorganize
    from crystallite.opening import open_model, write_model
    from crystallite.reorganization.summary import summary
    from crystallite.validation.command import read_data

    if options.out.exists():  # before the work, not after it
        raise InvalidOption(f"{options.out}: exists already; choose another name or remove it")
    chosen = {name: getattr(options, name) for name in _ANNEALING}
    if options.as_it_is:
        chosen["level"] = None
    chosen["only_if_faster"] = not options.even_if_slower
    fitted = {name: v for name in _FITTED if (v := getattr(options, name)) is not None and v is not False}
    if fitted:  # what was left at its default is not meant
        chosen = {name: value for name, value in chosen.items() if value != _ANNEALING.get(name, True)} | fitted
    given = dict(chosen)
    if options.calibration is not None:
        given["calibration"] = read_data(options.calibration, options.batch)
    model = open_model(options.model, options.weights)
    small = reorganize(
        model,
        targets=options.targets or ("*",),
        ignore=options.ignore or (),
        progress=sys.stderr.isatty(),
        **given,
    )
    result = summary(small)
    replaced = any(c.macs_after != c.macs_before for c in result.changes)
    if replaced:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}
        write_model(small, options.out, model, Path(options.model), plain)
    if options.json:
        json.dump({**result.to_json(), "out": str(options.out) if replaced else None}, sys.stdout, indent=1)
        print()
    else:
        print(result)
        print(f"\nSaved in {options.out}." if replaced else "\nNothing saved: no layer became smaller.")
    return 0 if replaced else 1


def _demo(options: argparse.Namespace) -> int:
    from crystallite import demo, demo_minilm

    (demo if options.model == "digits" else demo_minilm).run(options.out)
    return 0
