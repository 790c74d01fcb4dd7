"""Fine-tuning while the threshold of the Neyman test rises from nothing to what the null asks for."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, batches
from crystallite.graph.chains import Chain
from crystallite.models.record import Epoch
from crystallite.partitioning.weights import owner, weight_of
from crystallite.separation.readouts import Readouts
from crystallite.separation.straight_through import Gate
from crystallite.statistics.checkpoints import Checkpoints
from crystallite.statistics.output_error import relative_error
from crystallite.statistics.trainer import Trainer
from crystallite.statistics.watching import watching

__all__ = ["Schedule", "ends_of", "similarity", "target_loss", "train_"]

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Schedule:
    """Learning rate and threshold over time: the rate rises and falls again, the threshold rises, then stays.

    >>> [Schedule(1, 0.01).threshold_at(step, 10) for step in (0, 1, 9)]
    [0.0, 0.25, 1.0]
    """

    epochs: int
    learning_rate: float  # the highest
    rise: float = 0.4  # share of the steps after which the threshold is the final one
    block_loss: float = 0.0  # weight of the mean loss of what blocks alone would say

    def threshold_at(self, step: int, total: int) -> float:
        """The threshold as a share of the final one."""
        return min(1.0, step / (self.rise * total))


class _Gates:
    """The gates of a model, whose thresholds rise together."""

    def __init__(self, model: nn.Module, gates: Mapping[str, Gate], thresholds: Mapping[str, float]) -> None:
        self.model, self.gates, self.thresholds = model, gates, thresholds

    def raise_to(self, share: float) -> None:
        """Set every threshold to a share of the final one."""
        for name, gate in self.gates.items():
            gate.threshold = share * self.thresholds[name]

    @torch.no_grad()
    def acting(self) -> float:
        """The share of the weights inside blocks that reach the threshold."""
        acting = sum(int(torch.count_nonzero(gate(weight_of(self.model, name)))) for name, gate in self.gates.items())
        return acting / sum(int(gate.mask.sum()) for gate in self.gates.values())


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
    state: Mapping[str, Any] | None = None,
) -> tuple[list[Epoch], float | None]:
    """Train the model in place, by a loss or without labels by likeness to the dense model.

    Returns the history, and the metric before the first step.

    gates, thresholds: of the layers that separate; ends: modules whose outputs are compared where there are no labels
    (`ends_of`); readouts: of what blocks alone would say, which has the same loss; state: plain values that were found
    out before and are kept in checkpoints, from before the first step on.
    Batches come in the same order for the same seed, if their order depends on nothing but PyTorch's random numbers,
    which are seeded here.
    Without labels the model runs in evaluation mode: dropout would be noise in what is to be matched.
    """
    length = sum(1 for _ in batches(data))
    total = length * schedule.epochs
    parts = [model] if readouts is None else [model, readouts]
    parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
    values = {f"{i}.{name}": value for i, part in enumerate(parts) for name, value in part.state_dict().items()}
    # loss of this epoch so far, epochs, metric at the start
    record: dict[str, Any] = {"sum": 0.0, "history": [], "start": None, **(state or {})}
    trainer = Trainer(parameters, values, record, schedule.learning_rate, total, checkpoints)
    if state and not trainer.step:
        trainer.save(now=True)
    raised = _Gates(model, gates, thresholds)
    if metric is not None and not trainer.step:
        model.eval()
        record["start"] = float(metric(model))
    bar = tqdm(total=total, initial=trainer.step, unit="batch", disable=not progress)
    for epoch in range(trainer.step // length, schedule.epochs):
        for batch in _rest(data, seed * 1_000_003 + epoch, length, trainer.step % length):
            model.train(loss is not None)
            share = schedule.threshold_at(trainer.step, total)
            raised.raise_to(share)
            alone = torch.zeros(())
            if loss is None:
                error = similarity(model, dense, ends, batch)
            else:
                error, alone = _loss(model, loss, readouts, batch)
            trainer.descend([error + schedule.block_loss * alone])
            record["sum"] += float(error.detach())
            bar.update()
            ended = trainer.step % length == 0
            if ended:
                raised.raise_to(schedule.threshold_at(trainer.step, total))
                model.eval()
                found = None if metric is None else float(metric(model))
                done = Epoch(epoch + 1, record["sum"] / length, found, share, raised.acting())
                record["history"].append(asdict(done))
                record["sum"] = 0.0
            trainer.save(now=ended)
    bar.close()
    raised.raise_to(1.0)
    model.eval()
    return [Epoch(**epoch) for epoch in record["history"]], record["start"]


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
    with watching(model, [] if readouts is None else [readouts.layer]) as calls:
        error = target_loss(loss, batch.call(model), batch)
    outputs = () if readouts is None else readouts(calls[readouts.layer][-1].returned)
    alone = [target_loss(loss, output, batch) for output in outputs]
    return error, torch.stack(alone).mean() if alone else torch.zeros_like(error)


def target_loss(loss: Loss, output: Tensor, batch: Batch) -> Tensor:
    """The loss of an output by the target that came with its batch."""
    if batch.target is None:
        raise InvalidOption("data: a loss needs batches (inputs, target); pass loss=None to match the dense model")
    return loss(output, batch.target.to(output.device))


def similarity(model: nn.Module, dense: nn.Module, ends: Sequence[str], batch: Batch) -> Tensor:
    """Squared error to the dense model relative to its variance: of the output, and on average of what ends return.

    Padded positions (an `attention_mask` of zeros) do not count.
    """
    with torch.no_grad(), watching(dense, ends) as expected:
        target = batch.call(dense)
    with watching(model, ends) as found:
        error = relative_error(batch.call(model), target, batch)
    pairs = [(found[name][-1].returned, expected[name][-1].returned) for name in ends]
    return error + torch.stack([relative_error(ours, theirs, batch) for ours, theirs in pairs]).mean()


@torch.no_grad()
def ends_of(model: nn.Module, chains: Sequence[Chain], batch: Batch) -> list[str]:
    """For each chain the innermost module around all of it, or its last one where that is the model or no such output.

    Around a feed-forward pair that is the layer of a transformer: what it returns, the residual stream, is what others
    read. To be like the dense model there is worth more than in what the pair adds to it.
    """
    modules = [[owner(name)[0] for name in chain.layers] for chain in chains]
    around = [posixpath.commonpath([name.replace(".", "/") for name in names]).replace("/", ".") for names in modules]
    with watching(model, [name for name in around if name]) as calls:
        batch.call(model)
    usable = {name for name, own in calls.items() if own and isinstance(own[-1].returned, Tensor)}
    return list(dict.fromkeys(one if one in usable else names[-1] for one, names in zip(around, modules, strict=True)))
