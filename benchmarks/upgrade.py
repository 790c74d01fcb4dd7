"""`upgrade` on MNIST: an MLP 784-512-512-10 brought to exact blocks, against the same extra epochs of dense training.

`python -m benchmarks.upgrade DATA.npz [--seeds 3] [--blocks 2 4 8] [--epochs 5]`. Recipe and learning rates are chosen
on 10,000 of the training images; the test images are looked at once, by the final models.
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
from benchmarks.timing import show, store
from crystallite.structure.levels import chain_labels
from crystallite.upgrading import upgrade

_BATCH, _HELD_OUT, _FIRST_EPOCHS = 128, 10_000, 5
_DENSE_RATES = (3e-4, 1e-3, 3e-3)
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


def train(model: nn.Module, data: Shuffled, epochs: int, rate: float, decay: bool) -> nn.Module:
    """Adam, as `upgrade` has it: with a rate that falls linearly to zero if asked."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    total, step = epochs * -(-len(data.x) // _BATCH), 0
    for _ in range(epochs):
        for x, y in data:
            optimizer.param_groups[0]["lr"] = rate * (1 - step / total) if decay else rate
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
    return model


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((model.eval()(x).argmax(1) == y).float().mean())


def dense_again(model: nn.Module, data: Shuffled, epochs: int, rate: float, seed: int) -> nn.Module:
    copy = network()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(seed + 1)
    return train(copy, data, epochs, rate, decay=True)


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="mnist.npz: Xtr, ytr, Xte, yte")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=5e-3, help="of the upgrade, chosen on the held-out images")
    parser.add_argument("--dense-rates", type=float, nargs="+", default=_DENSE_RATES)
    parser.add_argument("--without-outputs", action="store_true", help="leave out the runs with the output layer")
    options = parser.parse_args(arguments)
    stored = np.load(options.data)
    x, test = (torch.from_numpy(stored[name]).float() / 255 for name in ("Xtr", "Xte"))
    y, test_y = (torch.from_numpy(stored[name]).long() for name in ("ytr", "yte"))
    fitted = slice(0, len(x) - _HELD_OUT)
    held_x, held_y = x[-_HELD_OUT:], y[-_HELD_OUT:]
    everything = Shuffled(x, y)

    # the learning rate of dense training, by held-out accuracy, with one seed
    best = options.dense_rates[0]
    if len(options.dense_rates) > 1:
        torch.manual_seed(1000)
        part = Shuffled(x[fitted], y[fitted])
        start = train(network(), part, _FIRST_EPOCHS, 1e-3, decay=False)
        scores = {
            rate: accuracy(dense_again(start, part, options.epochs, rate, 0), held_x, held_y)
            for rate in options.dense_rates
        }
        best = max(scores, key=lambda rate: scores[rate])
        print("dense, held out:", {rate: round(score, 2) for rate, score in scores.items()}, "→", best)

    rows = []
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        trained = train(network(), everything, _FIRST_EPOCHS, 1e-3, decay=False)
        dense = accuracy(dense_again(trained, everything, options.epochs, best, seed), test, test_y)
        runs = [(k, outputs) for k in options.blocks for outputs in (False, True)]
        for k, outputs in runs:
            if outputs and options.without_outputs:
                continue
            began = time.perf_counter()
            small = upgrade(
                trained, blocks=k, data=everything, loss=F.cross_entropy, epochs=options.epochs,
                learning_rate=options.rate, ignore=() if outputs else ("4",), seed=seed,
                partition="spread" if outputs else "random",
            )  # fmt: skip
            found = accuracy(small, test, test_y)
            rows.append({
                "seed": seed, "blocks": k, "output layer": "in" if outputs else "out",
                "before": accuracy(trained, test, test_y), "dense": dense, "upgraded": found,
                "difference": found - dense, **{f"blocks at {x:.1%}": blocks_found(small, x) for x in _LEVELS},
                "seconds": time.perf_counter() - began,
            })  # fmt: skip
            show("MNIST, 784-512-512-10, test accuracy in %", [_rounded(row) for row in rows])
    store("upgrade", rows)


def _rounded(row: dict) -> dict:
    return {key: f"{v:.2f}" if isinstance(v, float) else v for key, v in row.items()}


if __name__ == "__main__":
    main()
