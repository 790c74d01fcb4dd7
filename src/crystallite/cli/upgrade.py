"""`crystallite upgrade`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from crystallite.core.errors import InvalidOption
from crystallite.data.files import read_data
from crystallite.discovery import discover
from crystallite.models.opening import open_model, write_model
from crystallite.models.record import record
from crystallite.models.summary import summary
from crystallite.reorganization.restore import restore
from crystallite.separation.upgrade import upgrade

__all__ = ["add_parser", "run"]

_EXAMPLE = """\
example:
  crystallite upgrade my_package.models:build --weights trained.pt --data train.npz --blocks 4 --ignore head --out small
  crystallite upgrade my_package.models:build --weights trained.pt --data train.npz --modules --out small
  crystallite upgrade ./my-hf-model --data tokens.safetensors --blocks 4 --loss match --checkpoint state --out small

The data file holds `inputs`, or the model's keyword arguments by name, and `labels` if there is a loss; the first axis
counts samples. With --checkpoint, the same command goes on after an interruption. MODEL as for `reorganize`.
"""
_LOSSES: dict[str, Any] = {"cross-entropy": F.cross_entropy, "mse": F.mse_loss, "match": None}


class _Shuffled:
    """Batches of a file in a new order for every epoch."""

    def __init__(self, path: Path, batch: int) -> None:
        self.samples, self.batch = read_data(path, 1), batch

    def __iter__(self) -> Iterator[Any]:
        for some in torch.randperm(len(self.samples)).split(self.batch):
            yield torch.utils.data.default_collate([_alone(self.samples[i]) for i in some.tolist()])


def _alone(sample: Any) -> Any:
    """A batch of one without its axis."""
    if isinstance(sample, dict):
        return {name: value[0] for name, value in sample.items()}
    return (sample[0][0], sample[1][0]) if isinstance(sample, tuple) else sample[0]


def add_parser(commands: Any) -> None:
    """Add the command to the others."""
    parser = commands.add_parser(
        "upgrade",
        help="a model trained on until it separates exactly",
        description="Continue the training of a model until it consists of exactly k independent blocks, and save it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, or package.module:factory")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to save; must not exist")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help=".npz or .safetensors")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--blocks", type=int, metavar="K", help="make so many blocks")
    kind.add_argument("--modules", action="store_true", help="split along the functional modules found on the data")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="weights for what the factory returns")
    parser.add_argument(
        "--loss", choices=sorted(_LOSSES), default="cross-entropy", help="match: no labels, learn what MODEL returns"
    )
    parser.add_argument("--epochs", type=int, default=5, help="(default: 5)")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="at the start; falls to 0 (default: 0.005)")
    parser.add_argument("--batch", type=int, default=128, metavar="N", help="samples at once (default: 128)")
    parser.add_argument("--level", type=float, default=0.001, help="of the Neyman test (default: 0.001)")
    parser.add_argument(
        "--partition", choices=["auto", "regions", "spread", "random"], default="auto", help="of neurons to blocks"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="keep the state of the run here")
    parser.add_argument("--targets", action="append", metavar="PATTERN", help="only layers whose name matches")
    parser.add_argument("--ignore", action="append", metavar="PATTERN", help="not the layers whose name matches")
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Upgrade and save; 0 on success."""
    if options.out.exists():  # before the work, not after it
        raise InvalidOption(f"{options.out}: exists already; choose another name or remove it")
    if options.batch < 1:
        raise InvalidOption(f"--batch must be at least 1, got {options.batch}")
    model = open_model(options.model, options.weights)
    model = restore(model) if hasattr(model, "reorganization") else model
    modules = discover(model, read_data(options.data, options.batch)) if options.modules else None
    small: Any = upgrade(
        model,
        blocks=options.blocks,
        modules=modules,
        data=_Shuffled(options.data, options.batch),
        loss=_LOSSES[options.loss],
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        level=options.level,
        targets=options.targets,
        ignore=options.ignore or (),
        partition=options.partition,
        seed=options.seed,
        checkpoint=options.checkpoint,
        progress=sys.stderr.isatty(),
    )
    found = record(small)
    upgraded: Any = found.options
    chosen = {"blocks": upgraded.blocks, "level": options.level}
    write_model(small, options.out, model, Path(options.model), chosen)
    result = summary(small)
    if options.json:
        json.dump({**result.to_json(), "upgrade": found.to_plain()["options"], "out": str(options.out)}, sys.stdout)
        print()
    else:
        print(result)
        print(f"\n{upgraded}\nSaved in {options.out}.")
    return 0
