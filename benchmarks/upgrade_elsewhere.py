"""`upgrade` with nothing but defaults on data its recipe was not tuned on: images, text and tables.

`python -m benchmarks.upgrade_elsewhere FOLDER [--sets …] [--seeds 0 1 2] [--only-blocks | --only-shared]`;
`elsewhere_data.py` says what FOLDER holds. An MLP of two hidden layers of 512 is trained for five epochs and then
upgraded for five (the output layer left out), beside five more epochs of dense training, and beside
`compress(blocks=4)` of the first five. Dense training has the best of three learning rates, with plain and with
smoothed labels, each tried at full length by a network that was trained on four fifths of the data and is judged by the
others; `upgrade` finds its partition and its rate itself ("now"). "before" is `upgrade` as it was: rate 5e-3, block
loss 1, no smoothing, regions; or `compress` with every output of a layer fitted by itself. A seed draws the split into
training and test samples too. Test samples choose nothing.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crystallite as cx
from benchmarks.elsewhere_data import DEVELOPMENT, JUDGES, LAST_JUDGES, LATER_JUDGES, Split, load
from benchmarks.timing import show, store, stored
from benchmarks.upgrade import Shuffled, accuracy, train

_EPOCHS, _HELD_OUT = 5, 5  # every fifth sample judges dense training
_RATES, _SMOOTHINGS = (1e-3, 3e-3, 1e-2), (0.0, 0.1)
_BEFORE = {"learning_rate": 5e-3, "block_loss": 1.0, "smoothing": 0.0, "partition": "regions"}
_CALIBRATION = 4096
_INFLUENCE = "crystallite.compression.model_fit.influence"  # by which outputs of blocks make good for each other


def network(inputs: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)
    )  # fmt: skip


def first_epochs(x: Tensor, y: Tensor, sizes: tuple[int, int], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return train(network(*sizes), Shuffled(x, y), _EPOCHS, 1e-3, decay=False)


def more_epochs(model: nn.Module, x: Tensor, y: Tensor, rate: float, smoothing: float, seed: int) -> nn.Module:
    torch.manual_seed(seed + 1)
    return train(copy.deepcopy(model), Shuffled(x, y), _EPOCHS, rate, True, smoothing)


def best_dense(data: Split, seed: int) -> tuple[float, float]:
    """Learning rate and smoothing of dense training, by accuracy on a fifth of the training samples."""
    judges = torch.arange(len(data.x)) % _HELD_OUT == 0
    x, y = data.x[~judges], data.y[~judges]
    start = first_epochs(x, y, data.sizes, seed + 1000)
    scores = {
        (rate, smoothing): accuracy(more_epochs(start, x, y, rate, smoothing, seed), data.x[judges], data.y[judges])
        for rate in _RATES
        for smoothing in _SMOOTHINGS
    }
    return max(scores, key=lambda tried: scores[tried])


def measured(name: str, data: Split, seed: int, dense: tuple[float, float]) -> dict:
    """A row of the table."""
    trained = first_epochs(data.x, data.y, data.sizes, seed)
    again = more_epochs(trained, data.x, data.y, *dense, seed)
    row = {
        "data": name, "seed": seed, "samples": len(data.x), "inputs, classes": data.sizes,
        "rate, smoothing": dense, "5 epochs": accuracy(trained, data.test_x, data.test_y),
        "dense": accuracy(again, data.test_x, data.test_y),
    }  # fmt: skip
    for k in (4, 8):
        for title, given in (("before", _BEFORE), ("now", {})):
            began = time.perf_counter()
            small = cx.upgrade(
                trained, data=Shuffled(data.x, data.y), blocks=k, loss=F.cross_entropy, ignore="4", seed=seed, **given
            )
            row[f"{k} {title}"] = accuracy(small, data.test_x, data.test_y) - row["dense"]
            row[f"{k} {title}, s"] = time.perf_counter() - began
            if title == "now":
                found = cx.record(small).options
                row[f"{k} recipe"] = str(found.recipe)
                row[f"{k} search"] = found.search.cost + (found.search.partition.cost if found.search.partition else 0)
    return {**row, **in_blocks(trained, data)}


def in_blocks(trained: nn.Module, data: Split) -> dict[str, float]:
    """`compress(blocks=4)` minus the network that it was made from."""
    batches, whole = list(data.x[:_CALIBRATION].split(256)), accuracy(trained, data.test_x, data.test_y)

    def lost() -> float:
        return accuracy(cx.compress(trained, batches, blocks=4), data.test_x, data.test_y) - whole

    with mock.patch(_INFLUENCE, return_value={}):
        before = lost()
    return {"compress(blocks=4) before": before, "compress(blocks=4)": lost()}


def only_blocks(name: str, data: Split, seed: int) -> dict:
    """The part of a row that needs no upgrade."""
    trained = first_epochs(data.x, data.y, data.sizes, seed)
    row = {"data": name, "seed": seed, "samples": len(data.x), "inputs, classes": data.sizes,
           "5 epochs": accuracy(trained, data.test_x, data.test_y)}  # fmt: skip
    return {**row, **in_blocks(trained, data)}


def only_shared(name: str, data: Split, seed: int) -> dict:
    """What an upgrade at rate 5e-3 gains where every block reads all inputs; the start is that of the table."""
    trained = first_epochs(data.x, data.y, data.sizes, seed)
    row: dict = {"data": name, "seed": seed, "samples": len(data.x), "inputs, classes": data.sizes}
    for k in (4, 8):
        for title, shared in ((f"{k} blocks", ()), (f"{k} blocks, inputs shared", "0")):
            small = cx.upgrade(
                trained, data=Shuffled(data.x, data.y), blocks=k, loss=F.cross_entropy, ignore="4", seed=seed,
                learning_rate=5e-3, shared_inputs=shared,
            )  # fmt: skip
            before, after = cx.summary(small).macs
            row |= {title: accuracy(small, data.test_x, data.test_y), f"{title}, multiply-adds": after / before}
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    known = [*DEVELOPMENT, *JUDGES, *LATER_JUDGES, *LAST_JUDGES]
    parser.add_argument("--sets", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--only-blocks", action="store_true", help="compress(blocks=4) alone, which takes seconds")
    parts.add_argument("--only-shared", action="store_true", help="blocks that read all inputs, beside others")
    options = parser.parse_args(arguments)
    again = {(name, seed) for name in options.sets for seed in options.seeds}
    part: Callable[..., dict] | None = None
    where = "upgrade_elsewhere"
    if options.only_blocks:
        part, where = only_blocks, "blocks_elsewhere"
    elif options.only_shared:
        part, where = only_shared, "shared_elsewhere"
    rows = [row for row in stored(where) if (row["data"], row["seed"]) not in again]
    for name in options.sets:
        measure = part or partial(
            measured, dense=best_dense(load(name, options.folder, options.seeds[0]), options.seeds[0])
        )
        for seed in options.seeds:
            rows.append(measure(name, load(name, options.folder, seed), seed))
            store(where, rows)
            print(rows[-1], flush=True)
    figures = [key for key, value in rows[-1].items() if isinstance(value, float) and all(key in row for row in rows)]
    table = []
    for name in dict.fromkeys(row["data"] for row in rows):
        own = [row for row in rows if row["data"] == name]
        means = {key: f"{sum(row[key] for row in own) / len(own):.2f}" for key in figures}
        table.append({"data": name, "seeds": len(own), **means})
    show("test accuracy in %; upgrades minus dense, compressed minus 5 epochs", table)


if __name__ == "__main__":
    main()
