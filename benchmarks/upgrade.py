"""`upgrade` on MNIST: an MLP 784-512-512-10 brought to exact blocks, against the same extra epochs of dense training.

`python -m benchmarks.upgrade DATA.npz [--seeds 0 1 2] [--blocks 2 4 8] [--outputs out in] [--epochs 5]`. Recipe and
learning rates are chosen on 10,000 of the training images; the test images choose nothing. Upgrades are trained with
smoothed labels, so dense training is shown both ways: with plain cross-entropy, and with the same loss as the upgrade,
each at its own best learning rate. Where the output layer is separated too, a class is judged by the pixels of one
block: what a dense network makes of the pixels of the first block, all other ones black, is shown beside for the first
seed. Stored rows of other seeds, blocks and outputs are kept.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import crystallite as cx
from benchmarks.timing import show, store, stored
from crystallite.separation import upgrade
from crystallite.structure.levels import chain_labels

_BATCH, _HELD_OUT, _FIRST_EPOCHS = 128, 10_000, 5
_RATES = (3e-4, 1e-3, 3e-3)  # of dense training
_UPGRADE_RATES = {("out", 4): 1e-2, ("out", 8): 1e-2}  # where better than the default on the images held out
_SMOOTHING = 0.1
_LEVELS = (0.05, 0.01, 0.001)


class Shuffled:
    """Batches in an order that follows PyTorch's random numbers."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for some in torch.randperm(len(self.x)).split(_BATCH):
            yield self.x[some], self.y[some]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def train(model: nn.Module, data: Shuffled, epochs: int, rate: float, decay: bool, smoothing: float = 0.0) -> nn.Module:
    """Adam, with a rate that falls linearly to zero if asked."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    total, step = epochs * -(-len(data.x) // _BATCH), 0
    for _ in range(epochs):
        for x, y in data:
            optimizer.param_groups[0]["lr"] = rate * (1 - step / total) if decay else rate
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, label_smoothing=smoothing).backward()
            optimizer.step()
            step += 1
    return model


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, label_smoothing=_SMOOTHING)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


def dense_again(
    model: nn.Module, data: Shuffled, epochs: int, rate: float, seed: int, smoothing: float = 0.0
) -> nn.Module:
    copy = network()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(seed + 1)
    return train(copy, data, epochs, rate, True, smoothing)


def on_one_block(inputs: np.ndarray, data: Shuffled, test: Shuffled, epochs: int, rate: float, seed: int) -> float:
    """Accuracy of a dense network, trained as long and with the loss of the upgrade, that sees the first block only."""
    own = torch.from_numpy(inputs == 0).float()
    part = Shuffled(data.x * own, data.y)
    torch.manual_seed(seed)
    start = train(network(), part, _FIRST_EPOCHS, 1e-3, decay=False)
    return accuracy(dense_again(start, part, epochs, rate, seed, _SMOOTHING), test.x * own, test.y)


def best_rate(x: Tensor, y: Tensor, epochs: int, smoothing: float) -> float:
    """The learning rate of dense training, by accuracy on the images held out, with one seed."""
    part = Shuffled(x[:-_HELD_OUT], y[:-_HELD_OUT])
    torch.manual_seed(1000)
    start = train(network(), part, _FIRST_EPOCHS, 1e-3, decay=False)
    scores = {
        rate: accuracy(dense_again(start, part, epochs, rate, 0, smoothing), x[-_HELD_OUT:], y[-_HELD_OUT:])
        for rate in _RATES
    }
    best = max(scores, key=lambda rate: scores[rate])
    print(f"dense, smoothing {smoothing}, held out: {scores} → {best}", flush=True)
    return best


def blocks_found(small: nn.Module, level: float) -> int:
    """Blocks of the whole graph after annealing at a level; −1 if annealing takes any weight away."""
    record = cx.record(small).options
    state = cx.restore(small).state_dict()
    masks = []
    for name in record.layers:
        w = state[f"{name}.weight"]
        mask = cx.anneal(w, record.nulls[f"{name}.weight"], level, rule="neyman").mask
        if not torch.equal(mask, w != 0):
            return -1
        masks.append(mask)
    return int(max(labels.max() for labels in chain_labels(masks))) + 1


def measured(
    seed: int, data: Shuffled, test: Shuffled, cases: list[tuple[str, int]], epochs: int,
    dense_rates: list[float], bound: bool,
) -> Iterator[dict]:  # fmt: skip
    """A row for each upgrade of the network that this seed gives; bound: what the pixels of one block allow, too."""
    torch.manual_seed(seed)
    trained = train(network(), data, _FIRST_EPOCHS, 1e-3, decay=False)
    before = accuracy(trained, test.x, test.y)
    plain, same = (
        accuracy(dense_again(trained, data, epochs, own, seed, smoothing), test.x, test.y)
        for own, smoothing in zip(dense_rates, (0.0, _SMOOTHING), strict=True)
    )
    for outputs, k in cases:
        rate, began = _UPGRADE_RATES.get((outputs, k), 5e-3), time.perf_counter()
        small = upgrade(
            trained, blocks=k, data=data, loss=smoothed, epochs=epochs, learning_rate=rate, smoothing=0.0,
            block_loss=1.0, partition="spread" if outputs == "in" else "regions",
            ignore=() if outputs == "in" else ("4",), seed=seed,
        )  # fmt: skip
        seconds = time.perf_counter() - began
        found = accuracy(small, test.x, test.y)
        pixels = np.array(cx.record(small).options.labels[0]["in"])
        yield {
            "seed": seed, "blocks": k, "output layer": outputs, "rate": rate, "before": before,
            "dense": plain, "dense, same loss": same, "upgraded": found,
            "difference": found - plain, "difference, same loss": found - same,
            **{f"blocks at {x:.1%}": blocks_found(small, x) for x in _LEVELS},
            "acting": cx.record(small).options.history[-1].acting, "seconds": seconds,
            "smallest, largest block": [int(n) for n in np.sort(np.bincount(pixels))[[0, -1]]],
            "dense, one block's pixels":
                on_one_block(pixels, data, test, epochs, dense_rates[1], seed) if bound and outputs == "in" else None,
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="mnist.npz: Xtr, ytr, Xte, yte")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--outputs", choices=["out", "in"], nargs="+", default=["out", "in"], help="the output layer")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dense-rates", type=float, nargs=2, help="plain and smoothed; searched if not given")
    options = parser.parse_args(arguments)
    data, test = load(options.data)
    rates = options.dense_rates or [best_rate(data.x, data.y, options.epochs, s) for s in (0.0, _SMOOTHING)]
    cases = [(outputs, k) for outputs in options.outputs for k in options.blocks]
    again = {(seed, *case) for seed in options.seeds for case in cases}
    rows = [row for row in stored("upgrade") if (row["seed"], row["output layer"], row["blocks"]) not in again]
    for seed in options.seeds:
        for row in measured(seed, data, test, cases, options.epochs, rates, seed == options.seeds[0]):
            rows.append(row)
            rows.sort(key=lambda row: (row["seed"], row["output layer"] == "in", row["blocks"]))
            show("MNIST, 784-512-512-10, test accuracy in %", [_rounded(row) for row in rows])
            store("upgrade", rows)


def load(path: str) -> tuple[Shuffled, Shuffled]:
    """Training and test images."""
    stored = np.load(path)
    images = [torch.from_numpy(stored[name]).float().flatten(1) / 255 for name in ("Xtr", "Xte")]
    digits = [torch.from_numpy(stored[name]).long() for name in ("ytr", "yte")]
    return Shuffled(images[0], digits[0]), Shuffled(images[1], digits[1])


def _rounded(row: dict) -> dict:
    return {key: f"{v:.4g}" if isinstance(v, float) else v for key, v in row.items()}


if __name__ == "__main__":
    main()
