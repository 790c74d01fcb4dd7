"""The commands that only show: the report, the demo, completion for shells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from crystallite.cli.options import Command, Option
from crystallite.cli.shared_options import ANNEALING, CHECKPOINT_FILE, IGNORE, JSON, ORIGINAL, TARGETS

__all__ = ["COMPLETION", "DEMO", "REPORT"]

REPORT = Command(
    "report",
    "write one HTML page that shows what was found",
    "Analyse a checkpoint and write one self-contained HTML page: verdict, layers, pictures, levels.",
    (
        CHECKPOINT_FILE,
        Option("out", "page to write", Path, Path("report.html"), metavar="FILE", own=True),
        Option("title", "what the page calls the model"),
        Option("force", "replace the page if it exists", takes="nothing", default=False, own=True),
        Option("reorganized", "folders that reorganize, compress or upgrade wrote; the verdicts in them are shown",
               Path, takes="many", metavar="FOLDER"),
        replace(ORIGINAL, needs="--reorganized"),
        Option("verdict", "file with what validate --json printed, of one folder", Path, metavar="FILE",
               must_be="there"),
        Option("front", "file with JSON rows: name, family, macs, latency_ms, quality", Path, metavar="FILE",
               must_be="there"),
        Option("monitor", "file with the JSON lines that training wrote", Path, metavar="FILE", must_be="there"),
        Option("figures", "folder to write each figure to as a file of its own", Path, metavar="FOLDER", own=True),
        Option("format", "format of these figures", default="svg", choices=("svg", "png"), own=True,
               needs="--figures"),
        *ANNEALING,
        TARGETS,
        IGNORE,
        replace(JSON, help="print what was written as JSON on standard output"),
    ),
    "crystallite.cli.report:run",
    ("crystallite.report.build:report",),
    example="""\
  crystallite report model.safetensors --out report.html
  crystallite report ./my-hf-model --out report.html --reorganized small smaller --figures figures
  crystallite validate original small --data held_out.npz --levels default --json > verdict.json
  crystallite report ./my-hf-model --force --reorganized small --verdict verdict.json
  crystallite report weights.safetensors --reorganized small --original my_model.py:build
""",
)  # fmt: skip
DEMO = Command(
    "demo",
    "take a tour on a network trained on the spot, or on MiniLM",
    "Take a real network apart, rebuild it smaller, judge, save and serve it, and write a report.",
    (
        Option("out", "folder for what the demo writes", Path, Path("demo-output"), metavar="FOLDER", own=True),
        Option("model", "network to take: one trained here, or a sentence encoder from PyPI", default="digits",
               choices=("digits", "minilm"), own=True),
        Option("paper", "print the paper's worked examples beside the results here, and nothing else", takes="nothing",
               default=False, own=True, excludes=("--model", "--out")),
    ),
    "crystallite.cli.demo:run",
    example="""\
  crystallite demo --out demo-output
  crystallite demo --model minilm
  crystallite demo --paper
""",
)  # fmt: skip
COMPLETION = Command(
    "completion",
    "print a script that completes commands and options in a shell",
    "Print a completion script; it knows commands, options and their choices.",
    (Option("shell", "shell that the script is for", choices=("bash", "zsh"), takes="argument", own=True),),
    "crystallite.cli.completion:run",
    example="""\
  crystallite completion bash >> ~/.bashrc
  crystallite completion zsh >> ~/.zshrc
""",
)
