"""`upgrade` on MNIST: an MLP 784-512-512-10 brought to exact blocks, against the same extra epochs of dense training.

`python -m benchmarks.upgrade DATA.npz [--seeds 0 1 2] [--blocks 2 4 8] [--epochs 5]`. Recipe and learning rates are
chosen on 10,000 of the training images; the test images are looked at once, by the final models. Upgrades are trained
with smoothed labels, so dense training is shown both ways: with plain cross-entropy, and with the same loss as the
upgrade, each at its own best learning rate. Stored rows of other seeds are kept.
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
from crystallite.structure.levels import chain_labels
from crystallite.upgrading import upgrade

_BATCH, _HELD_OUT, _FIRST_EPOCHS = 128, 10_000, 5
_RATES = (3e-4, 1e-3, 3e-3)
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
    """Adam, as `upgrade` has it: with a rate that falls linearly to zero if asked."""
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
    record = small.upgrading
    state = cx.restore(small).state_dict()
    masks = []
    for name in record.partition.layers:
        w = state[f"{name}.weight"]
        mask = cx.anneal(w, record.nulls[f"{name}.weight"], level, rule="neyman").mask
        if not torch.equal(mask, w != 0):
            return -1
        masks.append(mask)
    return int(max(labels.max() for labels in chain_labels(masks))) + 1


def measured(
    seed: int, data: Shuffled, test: Shuffled, blocks: list[int], epochs: int, rate: float, dense_rates: list[float]
) -> Iterator[dict]:
    """A row for each upgrade of the network that this seed gives."""
    torch.manual_seed(seed)
    trained = train(network(), data, _FIRST_EPOCHS, 1e-3, decay=False)
    before = accuracy(trained, test.x, test.y)
    plain, same = (
        accuracy(dense_again(trained, data, epochs, own, seed, smoothing), test.x, test.y)
        for own, smoothing in zip(dense_rates, (0.0, _SMOOTHING), strict=True)
    )
    for outputs in (False, True):
        for k in blocks:
            began = time.perf_counter()
            small = upgrade(
                trained, blocks=k, data=data, loss=smoothed, epochs=epochs, learning_rate=rate,
                ignore=() if outputs else ("4",), seed=seed,
            )  # fmt: skip
            found = accuracy(small, test.x, test.y)
            yield {
                "seed": seed, "blocks": k, "output layer": "in" if outputs else "out", "before": before,
                "dense": plain, "dense, same loss": same, "upgraded": found,
                "difference": found - plain, "difference, same loss": found - same,
                **{f"blocks at {x:.1%}": blocks_found(small, x) for x in _LEVELS},
                "acting": small.upgrading.history[-1].acting, "seconds": time.perf_counter() - began,
            }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="mnist.npz: Xtr, ytr, Xte, yte")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=3e-3, help="of the upgrade, chosen on the held-out images")
    parser.add_argument("--dense-rates", type=float, nargs=2, help="plain and smoothed; searched if not given")
    options = parser.parse_args(arguments)
    data, test = load(options.data)
    rates = options.dense_rates or [best_rate(data.x, data.y, options.epochs, s) for s in (0.0, _SMOOTHING)]
    rows = [row for row in stored("upgrade") if row["seed"] not in options.seeds]
    for seed in options.seeds:
        for row in measured(seed, data, test, options.blocks, options.epochs, options.rate, rates):
            rows.append(row)
            show("MNIST, 784-512-512-10, test accuracy in %", [_rounded(row) for row in rows])
            store("upgrade", rows)


def load(path: str) -> tuple[Shuffled, Shuffled]:
    """Training and test images."""
    stored = np.load(path)
    images = [torch.from_numpy(stored[name]).float().flatten(1) / 255 for name in ("Xtr", "Xte")]
    digits = [torch.from_numpy(stored[name]).long() for name in ("ytr", "yte")]
    return Shuffled(images[0], digits[0]), Shuffled(images[1], digits[1])


def _rounded(row: dict) -> dict:
    return {key: f"{v:.2f}" if isinstance(v, float) else v for key, v in row.items()}


if __name__ == "__main__":
    main()
