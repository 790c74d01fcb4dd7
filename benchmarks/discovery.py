"""Are functional modules found where tasks were planted, and nowhere else?

    python -m benchmarks discovery
    python -m benchmarks.discovery split [SEED …]   # are networks split along the modules found as good as dense ones?
                                                    # seeds 0 to 2 unless others are given; measures what
                                                    # results/discovery_split.json does not have yet

Networks are trained on k tasks at once: k digits side by side, drawn independently, all pixels scrambled, a head for
each. The controls have a single task. MNIST (mnist.npz with Xtr, ytr) is taken from CRYSTALLITE_MNIST or
../shared/data/mnist.npz where there is one. The constants of discovery/coclustering.py were read off this table.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks.timing import MNIST, show, store, stored
from crystallite import subnetworks, summary
from crystallite.discovery import Modules, discover
from crystallite.partitioning.coclustering import agreement
from crystallite.separation import upgrade

Loss = Callable[[Tensor, Tensor], Tensor]
_DENSE_RATES, _SPLIT_RATES = (1e-3, 3e-3, 1e-2, 3e-2), (5e-3, 2e-2)


@dataclass(frozen=True)
class Tasks:
    """k images of one set side by side, scrambled; the target is a digit for each."""

    images: Tensor
    digits: Tensor
    k: int
    order: Tensor
    shared: int = 0  # pixels at the end of an image that lie on the first pixels of the next
    repeated: float = 0.0  # how often all images are the same one

    def draw(self, samples: int) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.images), (samples, self.k))
        index = torch.where(torch.rand(samples, 1) < self.repeated, index[:, :1], index)
        size = self.images.shape[1]
        x = torch.zeros(samples, self.k * size - (self.k - 1) * self.shared)
        for task in range(self.k):
            start = task * (size - self.shared)
            x[:, start : start + size] += self.images[index[:, task]]
        return x[:, self.order], self.digits[index]

    @property
    def truth(self) -> np.ndarray:
        """The task of every pixel; −1 for those of two."""
        size = self.images.shape[1] - self.shared
        task = np.minimum(np.arange(len(self.order)) // size, self.k - 1)
        double = (np.arange(len(self.order)) % size < self.shared) & (np.arange(len(self.order)) >= size)
        double &= np.arange(len(self.order)) < self.k * size
        return np.where(double, -1, task)[self.order.numpy()]


def tasks(images: Tensor, digits: Tensor, k: int, shared: int = 0, repeated: float = 0.0) -> Tasks:
    order = torch.randperm(k * images.shape[1] - (k - 1) * shared)
    return Tasks(images, digits, k, order, shared, repeated)


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def heads(logits: Tensor, digits: Tensor) -> Tensor:
    return cross_entropy(logits.unflatten(1, (digits.shape[1], -1)).flatten(0, 1), digits.flatten())


def train(
    model: nn.Module, source: Tasks, loss: Loss = heads, steps: int = 400, optimizer: str = "adam", l1: float = 0.0
) -> nn.Module:
    step = {
        "adam": lambda p: torch.optim.Adam(p, 1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    }[optimizer](model.parameters())
    for _ in range(steps):
        x, y = source.draw(128)
        total = loss(model(x), y) + l1 * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1)
        step.zero_grad()
        total.backward()
        step.step()
    return model


def row(name: str, model: nn.Module, source: Tasks, expected: int, outputs: np.ndarray | None = None) -> dict:
    x, _ = source.draw(1500)
    start = time.perf_counter()
    found = discover(model, x)
    seconds = time.perf_counter() - start
    result = {"network": name, "planted": expected, "found": found.k}
    result |= {f"sigma_{i + 1}": round(float(s), 3) for i, s in enumerate(found.spectrum[:6]) if i}
    result |= {"gap": round(found.gap, 2), "stability": round(found.stability, 3), "seconds": round(seconds, 2)}
    if expected > 1:
        of_one = (source.truth >= 0) & (found.inputs >= 0)
        result["purity"] = round(agreement(found.inputs[of_one], source.truth[of_one]), 4)
        truth = np.arange(len(found.outputs)) * expected // len(found.outputs) if outputs is None else outputs
        result["outputs_right"] = round(agreement(found.outputs, truth), 3)
        result |= sharing(found, source)
    shares = found.energy / found.energy.sum(1, keepdims=True)
    result["dormant"] = int((found.inputs < 0).sum())
    most = shares[:, found.inputs < 0].sum(1).max()  # for the output that they mean most to
    result["dormant_energy"] = float(f"{most:.1e}")
    print(f"  {name}: planted {expected}, found {found.k}", flush=True)
    return result


def sharing(found: Modules, source: Tasks) -> dict:
    """Inputs that were called shared, against those of two tasks: precision, recall, and recall by energy.

    The last is the share of what planted inputs explain of modules that are not theirs. A pixel of both tasks that one
    of them hardly reads counts little there.
    """
    called, double = found.shared.any(0), (source.truth < 0) & (found.inputs >= 0)
    right = called & double
    result = {"shared": int(called.sum()), "planted_shared": int(double.sum())}
    if called.any():
        result["precision"] = round(float(right.sum() / called.sum()), 3)
    if double.any():
        shares = found.energy / found.energy.sum(1, keepdims=True)
        foreign = np.where(found.outputs[:, None] == found.inputs, 0, shares).sum(0)
        result["recall"] = round(float(right.sum() / double.sum()), 3)
        result["recall_by_energy"] = round(float(foreign[right].sum() / foreign[double].sum()), 3)
    return result


def planted(images: Tensor, digits: Tensor, seeds: Iterable[int]) -> list[dict]:
    rows = []
    size = images.shape[1]
    for seed in seeds:
        torch.manual_seed(seed)
        for k in (2, 3, 4):
            for optimizer in ("adam", "sgd"):
                source = tasks(images, digits, k)
                model = train(mlp(k * size, 128, 128, 10 * k), source, optimizer=optimizer)
                rows.append(row(f"{k} tasks, {optimizer}", model, source, k))
        for shared in (size // 4, size // 2):
            source = tasks(images, digits, 2, shared=shared)
            model = train(mlp(2 * size - shared, 128, 128, 20), source)
            rows.append(row(f"2 tasks, {shared} pixels of both", model, source, 2))
        for repeated in (0.25, 0.5):
            source = tasks(images, digits, 2, repeated=repeated)
            rows.append(
                row(f"2 tasks, {repeated:.0%} the same image", train(mlp(2 * size, 128, 128, 20), source), source, 2)
            )
        source = tasks(images, digits, 2)
        one_each = train(mlp(2 * size, 128, 128, 2), source, lambda z, y: mse_loss(z, (y % 2).float()))
        rows.append(row("2 tasks, one output each", one_each, source, 2))
        uneven = train(
            mlp(2 * size, 128, 128, 12),
            source,
            lambda z, y: cross_entropy(z[:, :10], y[:, 0]) + cross_entropy(z[:, 10:], y[:, 1] % 2),
        )
        rows.append(row("10 outputs and 2", uneven, source, 2, np.repeat([0, 1], [10, 2])))
    return rows


def controls(images: Tensor, digits: Tensor, seeds: Iterable[int]) -> list[dict]:
    rows = []
    size = images.shape[1]
    side = int(size**0.5)
    for seed in seeds:
        torch.manual_seed(seed)
        source = tasks(images, digits, 1)
        straight = Tasks(images, digits, 1, torch.arange(size))
        noise = Tasks(images, torch.randint(10, digits.shape), 1, source.order)
        rows.append(row("untrained", mlp(size, 128, 128, 10), source, 1))
        for optimizer in ("adam", "adamw", "sgd"):
            rows.append(row(optimizer, train(mlp(size, 128, 128, 10), source, optimizer=optimizer), source, 1))
        rows.append(row("adam, L1", train(mlp(size, 128, 128, 10), source, l1=1e-4), source, 1))
        rows.append(row("adam, strong L1", train(mlp(size, 128, 128, 10), source, l1=1e-3), source, 1))
        rows.append(row("no hidden layer", train(mlp(size, 10), source), source, 1))
        rows.append(row("narrow", train(mlp(size, 16, 10), source), source, 1))
        rows.append(row("deep", train(mlp(size, 64, 64, 64, 64, 10), source), source, 1))
        rows.append(row("tanh", train(mlp(size, 128, 128, 10, activation=nn.Tanh), source), source, 1))
        rows.append(row("random labels", train(mlp(size, 128, 128, 10), noise), source, 1))
        parity = train(mlp(size, 128, 2), source, lambda z, y: cross_entropy(z, y[:, 0] % 2))
        rows.append(row("parity", parity, source, 1))
        several = train(
            mlp(size, 128, 128, 3),
            source,
            lambda z, y: mse_loss(z, torch.cat([y % 2, y % 3, y // 5], 1).float()),
        )
        rows.append(row("three questions about one digit", several, source, 1))
        convolution = nn.Sequential(
            nn.Unflatten(1, (1, side, side)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * (side - 4) ** 2, 10),
        )  # fmt: skip
        rows.append(row("convolutional", train(convolution, straight, steps=200), straight, 1))
        autoencoder = mlp(size, 64, 32, 64, size)
        for step in [torch.optim.Adam(autoencoder.parameters(), 1e-3)] * 500:
            x, _ = source.draw(128)
            step.zero_grad()
            mse_loss(autoencoder(x), x).backward()
            step.step()
        rows.append(row("autoencoder", autoencoder, source, 1))
    return rows


class Drawn:
    """So many batches of tasks, drawn anew each time."""

    def __init__(self, source: Tasks, batches: int) -> None:
        self.source, self.batches = source, batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.source.draw(128) for _ in range(self.batches))


def trained_on(model: nn.Module, source: Tasks, steps: int, rate: float) -> nn.Module:
    """A copy of the model after more steps, the rate falling linearly to zero."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for step in range(steps):
        x, y = source.draw(128)
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        heads(model(x), y).backward()
        optimizer.step()
    return model


@torch.no_grad()
def head_accuracies(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).unflatten(1, (y.shape[1], -1)).argmax(2) == y).double().mean(0)


def split(
    model: nn.Module, found: Modules, source: Tasks, epochs: int, batches: int, seed: int
) -> dict[float, nn.Module]:
    """The model split along modules, by learning rate."""
    options = {"modules": found, "data": Drawn(source, batches), "loss": heads, "epochs": epochs, "seed": seed}
    return {rate: upgrade(model, learning_rate=rate, **options) for rate in _SPLIT_RATES}


def splits(
    data: str, images: Tensor, digits: Tensor, seeds: Iterable[int], most: int, known: Container[tuple]
) -> Iterator[dict]:
    """Networks split along what `discover` finds, and dense ones after the same steps, each at its own best rate.

    Rates are chosen by images that neither train nor judge. After the tasks that share nothing come two whose images
    overlap, so that pixels matter to both, or often agree. Where inputs are found that several modules read, the split
    without copies of them is measured too. What is known already, by data, network and seed, is left out.
    """
    epochs, batches, size = 10, 60, images.shape[1]
    cases = [(f"{k} tasks", k, 0, 0.0) for k in range(2, most + 1)]
    cases += [(f"2 tasks, {shared} pixels of both", 2, shared, 0.0) for shared in (size // 4, size // 2)]
    cases += [(f"2 tasks, {repeated:.0%} the same image", 2, 0, repeated) for repeated in (0.25, 0.5)]
    for seed in seeds:
        for network, k, shared, repeated in cases:
            if (data, network, seed) in known:
                continue
            torch.manual_seed(seed)
            order = torch.randperm(len(images))
            own, choosing, judging = order.split([len(order) - 2 * (len(order) // 5), *[len(order) // 5] * 2])
            source = tasks(images[own], digits[own], k, shared, repeated)
            model = train(mlp(len(source.order), 128, 128, 10 * k), source)
            found = discover(model, source.draw(1500)[0])
            result = {"data": data, "network": network, "seed": seed, "planted": k, "found": found.k}
            if found.k == k:
                chosen_by, judged_by = (
                    replace(source, images=images[some], digits=digits[some]).draw(5000) for some in (choosing, judging)
                )
                dense = {rate: trained_on(model, source, epochs * batches, rate) for rate in _DENSE_RATES}
                kinds = {"dense": dense, "split": split(model, found, source, epochs, batches, seed)}
                if found.shared.any():
                    apart = replace(found, shared=np.zeros_like(found.shared))
                    kinds["no copies"] = split(model, apart, source, epochs, batches, seed)
                scores, best = {}, {}
                for kind, models in kinds.items():
                    by_rate = {rate: float(head_accuracies(m, *chosen_by).mean()) for rate, m in models.items()}
                    rate = max(by_rate, key=lambda rate: by_rate[rate])
                    best[kind], scores[kind] = models[rate], head_accuracies(models[rate], *judged_by)
                    result |= {kind: float(scores[kind].mean()), f"{kind}, rate": rate}
                result["worst_head_difference"] = float((scores["split"] - scores["dense"]).min())
                result["parts"] = len(subnetworks(best["split"]).parts)
                for kind in [*kinds][1:]:
                    before, after = summary(best[kind]).macs
                    result[f"{kind}, multiply-adds"] = round(after / before, 3)
                result |= sharing(found, source)
            print(f"  {result}", flush=True)
            yield result


def mnist() -> tuple[Tensor, Tensor] | None:
    if not MNIST.exists():
        return None
    with np.load(MNIST) as data:
        return torch.tensor(data["Xtr"].reshape(-1, 784) / 255).float(), torch.tensor(data["ytr"]).long()


def main() -> None:
    data = load_digits()
    images, digits = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    if sys.argv[1:2] == ["split"]:
        rows, large, seeds = stored("discovery_split"), mnist(), [*map(int, sys.argv[2:])] or range(3)
        known = {(row["data"], row["network"], row["seed"]) for row in rows}
        found = [splits("digits", images, digits, seeds, 4, known)]
        found += [splits("MNIST", *large, seeds, 3, known)] if large else []
        for result in chain(*found):
            rows.append(result)
            store("discovery_split", rows)
        show("networks split along the modules found, accuracy of the heads", rows)
        return
    rows = [{"data": "digits", **r} for r in [*planted(images, digits, range(2)), *controls(images, digits, range(2))]]
    large = mnist()
    if large:
        torch.manual_seed(0)
        for k in (1, 2, 3):
            source = tasks(*large, k)
            model = train(mlp(784 * k, 256, 256, 10 * k), source, steps=2000)
            rows.append({"data": "MNIST", **row(f"{k} tasks, adam", model, source, k)})
    wrong = [r for r in rows if r["found"] != r["planted"]]
    show("functional modules", rows)
    single = [r["found"] > 1 for r in rows if r["planted"] == 1]
    print(f"\n{len(wrong)} of {len(rows)} wrong; single tasks that were split: {sum(single)} of {len(single)}")
    store("discovery", rows)


if __name__ == "__main__":
    main()
