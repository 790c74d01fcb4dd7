"""Fine-tuning while the threshold of the Neyman test rises from nothing to what the null asks for."""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, batches
from crystallite.data.running import call, device_of, moved, real_positions
from crystallite.models.record import Epoch
from crystallite.separation.partition import Chain
from crystallite.separation.readouts import Readouts
from crystallite.separation.straight_through import Gate
from crystallite.separation.weights import owner, weight_of
from crystallite.statistics.checkpoints import Checkpoints, State

__all__ = ["Schedule", "ends_of", "share_of_rate", "train_"]

_WARM_UP = 0.1  # share of the steps
_SECONDS = 30.0  # between two checkpoints inside an epoch
Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Schedule:
    """Learning rate and threshold over time: the rate rises and falls again, the threshold rises, then stays.

    >>> [tuple(round(x, 3) for x in Schedule(1, 0.01).at(step, 10)) for step in (0, 1, 9)]
    [(0.005, 0.0), (0.01, 0.25), (0.0, 1.0)]
    """

    epochs: int
    learning_rate: float  # the highest
    rise: float = 0.4  # share of the steps after which the threshold is the final one
    block_loss: float = 0.0  # weight of the mean loss of what blocks alone would say

    def at(self, step: int, total: int) -> tuple[float, float]:
        """The learning rate, and the threshold as a share of the final one."""
        return self.learning_rate * share_of_rate((step + 0.5) / total), min(1.0, step / (self.rise * total))


def share_of_rate(time: float) -> float:
    """Share of the highest learning rate after a share of the steps: it rises over the first tenth, then is a cosine.

    >>> [round(share_of_rate(t), 2) for t in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if time < _WARM_UP:
        return time / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (time - _WARM_UP) / (1 - _WARM_UP)))


class _Run:
    """A model while it is trained: all that changes is in `state`."""

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        gates: Mapping[str, Gate],
        thresholds: Mapping[str, float],
        readouts: Readouts | None,
    ):
        self.model, self.schedule, self.gates, self.thresholds = model, schedule, gates, thresholds
        self.readouts: nn.Module = nn.Identity() if readouts is None else readouts
        self.parameters = [p for m in (model, self.readouts) for p in m.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, schedule.learning_rate)
        self.step, self.sum = 0, 0.0  # steps taken, loss of this epoch so far
        self.history: list[Epoch] = []

    def set_time(self, step: int, total: int) -> float:
        rate, share = self.schedule.at(step, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for name, gate in self.gates.items():
            gate.threshold = share * self.thresholds[name]
        return share

    def state(self) -> State:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors |= {f"readouts.{name}": value for name, value in self.readouts.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in state.items()}
        tensors["random"] = torch.get_rng_state()
        return State(tensors, {"step": self.step, "sum": self.sum, "history": [asdict(e) for e in self.history]})

    def load(self, state: State) -> None:
        for module, kind in ((self.model, "model."), (self.readouts, "readouts.")):
            own = {name.removeprefix(kind): t for name, t in state.tensors.items() if name.startswith(kind)}
            module.load_state_dict(own)
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                moments.setdefault(int(number), {})[key] = tensor
        stored = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": moments, "param_groups": stored["param_groups"]})
        self.step, self.sum = int(state.record["step"]), float(state.record["sum"])
        self.history = [Epoch(**epoch) for epoch in state.record["history"]]
        torch.set_rng_state(state.tensors["random"])


def train_(
    model: nn.Module,
    dense: nn.Module,
    gates: Mapping[str, Gate],
    thresholds: Mapping[str, float],
    ends: Sequence[str],
    data: Any,
    loss: Loss | None,
    metric: Metric | None,
    schedule: Schedule,
    readouts: Readouts | None,
    seed: int,
    checkpoints: Checkpoints | None,
    progress: bool,
) -> list[Epoch]:
    """Train the model in place, by a loss or without labels by likeness to the dense model; returns the history.

    gates, thresholds: of the layers that separate; ends: modules whose outputs are compared where there are no labels
    (`ends_of`); readouts: of what blocks alone would say, which has the same loss.
    Batches come in the same order for the same seed, if their order depends on nothing but PyTorch's random numbers,
    which are seeded here.
    Without labels the model runs in evaluation mode: dropout would be noise in what is to be matched.
    """
    length = sum(1 for _ in batches(data))
    total = length * schedule.epochs
    run = _Run(model, schedule, gates, thresholds, readouts)
    saved = None if checkpoints is None else checkpoints.latest()
    if saved is not None:
        run.load(saved)
    bar = tqdm(total=total, initial=run.step, unit="batch", disable=not progress)
    written = time.monotonic()
    for epoch in range(run.step // length, schedule.epochs):
        for batch in _rest(data, seed * 1_000_003 + epoch, length, run.step % length):
            model.train(loss is not None)
            share = run.set_time(run.step, total)
            alone = torch.zeros(())
            if loss is None:
                error = _similarity(model, dense, ends, batch)
            else:
                error, alone = _loss(model, loss, readouts, batch)
            run.optimizer.zero_grad()
            (error + schedule.block_loss * alone).backward()
            run.optimizer.step()
            run.step, run.sum = run.step + 1, run.sum + float(error.detach())
            bar.update()
            if run.step % length == 0:
                run.set_time(run.step, total)
                model.eval()
                found = None if metric is None else float(metric(model))
                acting = sum(_acting(model, *gate) for gate in gates.items())
                acting /= sum(int(gate.mask.sum()) for gate in gates.values())
                run.history.append(Epoch(epoch + 1, run.sum / length, found, share, acting))
                run.sum = 0.0
            if checkpoints and (run.step % length == 0 or time.monotonic() - written > _SECONDS):
                checkpoints.write(run.step, run.state())
                written = time.monotonic()
    bar.close()
    run.set_time(total, total)
    model.eval()
    return run.history


def _rest(data: Any, seed: int, length: int, done: int) -> Iterator[Batch]:
    """The batches of an epoch after those that are done, with the random numbers as they were then."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    number = -1
    for number, batch in enumerate(batches(data)):
        if number == done and done:
            torch.set_rng_state(state)
        if number >= done:
            yield batch
    if number + 1 != length:
        raise InvalidOption(f"data: expected {length} batches in every epoch, got {number + 1}")


def _loss(model: nn.Module, loss: Loss, readouts: Readouts | None, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of the model, and on average of what its blocks alone say."""
    if batch.target is None:
        raise InvalidOption("data: a loss needs batches (inputs, target); pass loss=None to match the dense model")
    target = moved(batch.target, device_of(model))
    with _watched(model, [] if readouts is None else [readouts.layer]) as found:
        error = loss(call(model, batch), target)
    said = [] if readouts is None else [loss(one, target) for one in readouts(found[readouts.layer])]
    return error, torch.stack(said).mean() if said else torch.zeros_like(error)


def _similarity(model: nn.Module, dense: nn.Module, ends: Sequence[str], batch: Batch) -> Tensor:
    """Squared error to the dense model relative to its variance: of the output, and on average of what ends return.

    Padded positions (an `attention_mask` of zeros) do not count.
    """
    with torch.no_grad(), _watched(dense, ends) as expected:
        target = call(dense, batch)
    with _watched(model, ends) as found:
        error = _relative(call(model, batch), target, batch)
    return error + sum((_relative(found[name], expected[name], batch) for name in ends), torch.zeros(())) / len(ends)


@torch.no_grad()
def ends_of(model: nn.Module, chains: Sequence[Chain], batch: Batch) -> list[str]:
    """For each chain the innermost module around all of it, or its last one where that is the model or no such output.

    Around a feed-forward pair that is the layer of a transformer: what it returns, the residual stream, is what others
    read. To be like the dense model there is worth more than in what the pair adds to it.
    """
    modules = [[owner(name)[0] for name in chain.layers] for chain in chains]
    around = [posixpath.commonpath([name.replace(".", "/") for name in names]).replace("/", ".") for names in modules]
    with _watched(model, [name for name in around if name]) as found:
        call(model, batch)
    pairs = zip(around, modules, strict=True)
    return list(dict.fromkeys(one if isinstance(found.get(one), Tensor) else names[-1] for one, names in pairs))


def _relative(found: Tensor, expected: Tensor, batch: Batch) -> Tensor:
    if expected.ndim > 2:
        real = real_positions(batch, expected.shape[:-1])
        found, expected = (value.flatten(0, -2)[real] for value in (found, expected))
    return (found - expected).square().mean() / expected.var().clamp_min(1e-12)


@contextmanager
def _watched(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What some layers return while the model runs."""
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, __, output, name=name: found.update({name: output[0] if isinstance(output, tuple) else output})
        )
        for name in names
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _acting(model: nn.Module, name: str, gate: Gate) -> float:
    return float(torch.count_nonzero(gate(weight_of(model, name))))
