"""The `crystallite` command."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from crystallite.cli import bench, report, serve, upgrade, validate
from crystallite.cli import export as exporting
from crystallite.cli.options import add_annealing
from crystallite.core.errors import CrystalliteError, InvalidOption

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

MODEL is a transformers folder, a folder that crystallite saved, or an import path to a function (or a module class)
that returns an nn.Module when called without arguments. An import path runs that code, which is yours: a file of
weights alone does not say how a model computes.

Exact, by the paper's tests, and without data; `crystallite compress` fits smaller layers to data instead.
"""
_COMPRESS_EXAMPLE = """\
example:
  crystallite compress ./my-hf-model --budget 0.5 --calibration tokens.safetensors --out small
  crystallite compress my_package.models:build --tolerance 0.05 --calibration inputs.npz --out small

MODEL as for `crystallite reorganize`. Smaller layers are fitted to the calibration file, which holds `inputs`, or the
model's keyword arguments by name; the first axis counts samples.
"""
_ANNEALING = ("level", "null", "correction", "random_walk", "rule", "alpha", "delta0", "tau")
_FITTED = ("budget", "blocks", "joint", "tolerance", "confidence", "risk", "objective", "polish_steps",
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
    reorganize.add_argument("--channels", type=int, metavar="N", help="of feed-forward pairs (default: hidden / d)")
    reorganize.add_argument(
        "--feed-forward", choices=["pair", "layers", "channels"], help="force this form of feed-forward pairs"
    )
    reorganize.add_argument(
        "--even-if-slower", action="store_true", help="blocks wherever they need fewer multiply-adds"
    )
    reorganize.add_argument("--targets", action="append", metavar="PATTERN", help="only layers whose name matches")
    reorganize.add_argument("--ignore", action="append", metavar="PATTERN", help="not the layers whose name matches")
    reorganize.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    reorganize.set_defaults(run=_reorganize)

    compress = commands.add_parser(
        "compress",
        help="a model fitted to a budget: smaller layers that keep its function",
        description="Save a model whose layers are smaller ones, fitted to data in closed form and without labels.",
        epilog=_COMPRESS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    compress.add_argument("model", metavar="MODEL", help="a folder, or package.module:factory")
    compress.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to save; must not exist")
    compress.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    compress.add_argument("--budget", type=float, metavar="SHARE", help="of the layers' multiply-adds to keep")
    compress.add_argument(
        "--objective", choices=["macs", "parameters", "latency", "int8"], help="what the budget counts (default: macs)"
    )
    compress.add_argument("--blocks", type=int, metavar="K", help="every layer as so many independent blocks")
    compress.add_argument(
        "--joint", action="store_true", help="with --blocks: one partition through consecutive layers"
    )
    compress.add_argument("--tolerance", type=float, help="the cheapest budget whose risk is at most this")
    compress.add_argument("--confidence", type=float, help="of that (default: 0.95)")
    compress.add_argument("--risk", choices=["deviation", "disagreement"], help="(default: deviation)")
    compress.add_argument(
        "--calibration", required=True, type=Path, metavar="FILE", help="inputs: .npz or .safetensors"
    )
    compress.add_argument("--batch", type=int, default=64, metavar="N", help="samples at once (default: 64)")
    compress.add_argument("--polish-steps", type=int, metavar="N", help="of training inside the structure (default: 0)")
    compress.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="keep the state of that training here")
    compress.add_argument("--seed", type=int, help="(default: 0)")
    compress.add_argument("--targets", action="append", metavar="PATTERN", help="only layers whose name matches")
    compress.add_argument("--ignore", action="append", metavar="PATTERN", help="not the layers whose name matches")
    compress.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    compress.set_defaults(run=_compress)

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
    demo.add_argument("--paper", action="store_true", help="the paper's worked examples beside ours, and nothing else")
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
        alpha=options.alpha,
        delta0=options.delta0,
        tau=options.tau,
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
    from crystallite.reorganization.rewrite import reorganize

    chosen = {name: getattr(options, name) for name in _ANNEALING}
    if options.as_it_is:
        chosen["level"] = None
    chosen |= {"channels": options.channels, "feed_forward": options.feed_forward}
    chosen["only_if_faster"] = not options.even_if_slower
    return _made(options, reorganize, chosen, {})


def _compress(options: argparse.Namespace) -> int:
    from crystallite.compression.compress import compress
    from crystallite.data.files import read_data

    chosen = {name: v for name in _FITTED if (v := getattr(options, name)) is not None and v is not False}
    return _made(options, compress, chosen, {"calibration": read_data(options.calibration, options.batch)})


def _made(options: argparse.Namespace, make: Callable[..., Any], chosen: dict[str, Any], data: dict[str, Any]) -> int:
    """Make a smaller model, save it where it is smaller, and print what became of it; 0, or 1 if it is not."""
    from crystallite.models.opening import open_model, write_model
    from crystallite.models.summary import summary
    from crystallite.reorganization.restore import restore

    if options.out.exists():  # before the work, not after it
        raise InvalidOption(f"{options.out}: exists already; choose another name or remove it")
    model = open_model(options.model, options.weights)
    model = restore(model) if hasattr(model, "reorganization") else model
    small = make(
        model,
        targets=options.targets or ("*",),
        ignore=options.ignore or (),
        progress=sys.stderr.isatty(),
        **chosen,
        **data,
    )
    result = summary(small)
    replaced = any(c.macs_after != c.macs_before for c in result.changes)
    if replaced:
        given = chosen | ({"calibration": options.calibration} if data else {})
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        write_model(small, options.out, model, Path(options.model), plain)
    if options.json:
        json.dump({**result.to_json(), "out": str(options.out) if replaced else None}, sys.stdout, indent=1)
        print()
    else:
        print(result)
        print(f"\nSaved in {options.out}." if replaced else "\nNothing saved: no layer became smaller.")
    return 0 if replaced else 1


def _demo(options: argparse.Namespace) -> int:
    if options.paper:
        from crystallite.demo import paper

        return 0 if paper.run() else 1
    from crystallite.demo import digits, minilm

    (digits if options.model == "digits" else minilm).run(options.out)
    return 0
