"""`crystallite bench`: beside `--serve`, `--baselines`: a fitted model beside other methods at the same cost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from crystallite.baselines.compare import LIKENESS, compare, table
from crystallite.cli import bench_serve as bench_command
from crystallite.compression.compress import compress
from crystallite.core.errors import InvalidOption
from crystallite.data.files import read_data
from crystallite.models.opening import open_model
from crystallite.reorganization.restore import restore
from crystallite.validation.metrics import METRICS

__all__ = ["add_parser"]

_EXAMPLE = """
  crystallite bench --baselines my_package.models:build --budget 0.5 --calibration inputs.npz --data held_out.npz
  crystallite bench --baselines ./my-hf-model --budget 0.5 --calibration a.npz --data b.npz --json > front.json
  crystallite report ./my-hf-model --front front.json

--baselines fits MODEL to the budget, without training, and prints it beside the dense model, magnitude and Wanda
pruning, Torch-Pruning, plain SVD and random blocks at the same multiply-adds, and beside what a CPU user would pick
instead: ONNX Runtime in fp32 and with dynamic int8. Methods that do not apply, or whose package is missing, are skipped
and say why. A narrow network trained anew needs labels and training: only benchmarks/fitted.py has it. Data files are
those of reorganize and validate. All models are timed in turns.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser, what = bench_command.add_parser(commands)
    what.add_argument("--baselines", metavar="MODEL", help="other methods on a model: a folder, or module:factory")
    group = parser.add_argument_group("with --baselines")
    group.add_argument("--budget", type=float, metavar="SHARE", help="of the layers' multiply-adds that all may keep")
    group.add_argument("--calibration", type=Path, metavar="FILE", help="inputs to fit to: .npz or .safetensors")
    group.add_argument("--data", type=Path, metavar="FILE", help="other inputs to judge by, with `labels` if there are")
    group.add_argument(
        "--metric", choices=sorted([*METRICS, *LIKENESS]), help="(default: accuracy with labels, else cosine to dense)"
    )
    group.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    group.add_argument("--targets", action="append", metavar="PATTERN", help="only layers whose name matches")
    group.add_argument("--ignore", action="append", metavar="PATTERN", help="not the layers whose name matches")
    group.add_argument("--seed", type=int, default=0, help="of random blocks and of fitting (default: 0)")
    parser.epilog = f"{parser.epilog}".replace("\n\n", f"{_EXAMPLE}\n", 1)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.baselines is None:
        return bench_command.run(options)
    for name in ("budget", "calibration", "data"):
        if getattr(options, name) is None:
            raise InvalidOption(f"--baselines needs --{name}")
    size = 32 if options.batch is None else options.batch
    calibration, data = (read_data(path, size) for path in (options.calibration, options.data))
    model = open_model(options.baselines, options.weights).eval()
    model = restore(model) if hasattr(model, "reorganization") else model
    layers: dict[str, Any] = {"targets": options.targets or ("*",), "ignore": options.ignore or ()}
    small = compress(model, budget=options.budget, calibration=calibration, seed=options.seed, **layers)
    rows = compare(model, small, data, options.metric, calibration=calibration, seed=options.seed, **layers)
    print(json.dumps([row.to_json() for row in rows], indent=1) if options.json else table(rows))
    return 0
