"""`polish_`: a fitted model trained a little inside its structure, to return what the dense one returns. No labels."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, evaluating
from crystallite.data.calibration import Calibration
from crystallite.models.manifest import source_sha256
from crystallite.models.record import Polish, record
from crystallite.statistics.checkpoints import Checkpoints
from crystallite.statistics.output_error import mean_output_error, output_error
from crystallite.statistics.trainer import Trainer

__all__ = ["Comparison", "WholeOutputs", "polish_", "polish_checkpoints"]

_BATCH = 32  # samples of a step
_INPUTS = 160  # that weights may read before the rate is lowered in proportion
_EVALUATIONS = 10  # of the held-out error
_PATIENCE = 7  # evaluations without a better one after which training ends: a high rate does harm before it helps


class Comparison(Protocol):
    """How what a model returns is compared with what the dense one does."""

    rate: ClassVar[float]  # of training by it, at the top of the schedule, where weights read few inputs

    def samples(self, batch: Batch) -> int:
        """Of a step that takes them from this batch."""
        ...

    def errors(self, batch: Batch) -> Iterator[Tensor]:
        """What adds up to the error of a batch, with gradients; each is taken back before the next is computed."""
        ...

    def mean_error(self, batches: Sequence[Batch]) -> float:
        """On average over some batches."""
        ...


@dataclass(frozen=True)
class WholeOutputs:
    """All that both models return for a batch, at once."""

    rate: ClassVar[float] = 1e-3

    model: nn.Module
    dense: nn.Module

    def samples(self, batch: Batch) -> int:
        return _BATCH

    def errors(self, batch: Batch) -> Iterator[Tensor]:
        yield output_error(batch.run(self.model, gradients=True), batch.run(self.dense), batch)

    def mean_error(self, batches: Sequence[Batch]) -> float:
        return mean_output_error(self.model, self.dense, batches)


def polish_(
    model: nn.Module,
    compared: Comparison,
    layers: Collection[str],
    data: Calibration,
    steps: int,
    seed: int,
    checkpoints: Checkpoints | None = None,
    progress: bool = False,
) -> Polish:
    """Train a fitted model in place towards what the dense one returns, and leave it in its best state.

    layers: names of the fitted layers; their parameters are trained, and all vectors of the model (biases, norms).
    Adam, whose rate rises and falls again as a cosine and is lower where weights read many inputs; both models run in
    evaluation mode. The best state is the one with the least error on the held-out batches, that before training
    included, so the error never grows; training ends early where it has not fallen for a while. Samples of a step
    depend on the seed and its number only: a run that was interrupted goes on from its checkpoint to the result it
    would have had.
    """
    with torch.random.fork_rng(devices=[]), evaluating(model), _trained(model, layers) as parameters:
        work = _Polishing(compared, parameters, data, steps, seed, checkpoints)
        trainer, every = work.trainer, max(1, steps // _EVALUATIONS)
        if not work.history:
            work.evaluate()
        for _ in tqdm(range(trainer.step, steps), "polishing", initial=trainer.step, total=steps, disable=not progress):
            if work.idle >= _PATIENCE:
                break
            work.take_step()
            evaluated = trainer.step % every == 0 or trainer.step == steps
            if evaluated:
                work.evaluate()
            trainer.save(now=evaluated)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(work.best[name])
    errors = [error for _, error in work.history]
    return Polish(trainer.step, errors[0], min(errors), tuple((step, error) for step, error in work.history))


def polish_checkpoints(folder: Path, model: nn.Module, result: nn.Module, data: Calibration, steps: int) -> Checkpoints:
    """Where the state of polishing a result is kept; that of another run is refused."""
    options = vars(record(result).options)
    run_identity = {
        "model": source_sha256(model), "steps": steps, "samples": [b.size for b in (*data.all, *data.more)],
        **{name: options[name] for name in ("budget", "blocks", "joint", "ridge", "seed")},
        "shapes": {name: list(p.shape) for name, p in result.named_parameters()},
    }  # fmt: skip
    return Checkpoints(folder, run_identity)


@contextmanager
def _trained(model: nn.Module, layers: Collection[str]) -> Iterator[dict[str, nn.Parameter]]:
    """The parameters to train, the only ones that ask for gradients; frozen ones are not among them."""
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    own = tuple(f"{name}." if name else "" for name in layers)
    chosen = {
        name: p
        for name, p in model.named_parameters()
        if p.requires_grad and p.is_floating_point() and (p.ndim < 2 or name.startswith(own))
    }
    if not chosen:
        raise InvalidOption("polish_steps: all parameters are frozen; call model.requires_grad_(True) first")
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in chosen)
        yield chosen
    finally:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


class _Polishing:
    """The model while it is trained, and the best state so far."""

    def __init__(
        self, compared: Comparison, parameters: Mapping[str, nn.Parameter], data: Calibration, steps: int, seed: int,
        checkpoints: Checkpoints | None,
    ) -> None:  # fmt: skip
        self.compared, self.parameters, self.seed = compared, parameters, seed
        self.batches, self.held_out = data.fitted + data.more, data.held_out
        self.best = {name: p.detach().clone() for name, p in parameters.items()}
        values: dict[str, Tensor] = {f"model.{name}": p for name, p in parameters.items()}
        values |= {f"best.{name}": value for name, value in self.best.items()}
        self.trainer = Trainer(
            list(parameters.values()), values, {"history": []}, _rate(compared.rate, parameters), steps, checkpoints
        )

    @property
    def history(self) -> list[tuple[int, float]]:
        """Step and held-out error of each evaluation."""
        found: list[tuple[int, float]] = self.trainer.record["history"]
        return found

    @property
    def idle(self) -> int:
        """Evaluations since the best one."""
        errors = [error for _, error in self.history]
        return len(errors) - 1 - errors.index(min(errors))

    def take_step(self) -> None:
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + self.trainer.step)
        sizes = torch.tensor([float(batch.size) for batch in self.batches])
        batch = self.batches[int(torch.multinomial(sizes, 1, generator=rng))]
        samples = self.compared.samples(batch)
        start = int(torch.randint(max(batch.size - samples, 0) + 1, (1,), generator=rng))
        self.trainer.descend(self.compared.errors(batch.slice(start, start + samples)))

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compare the state with the best one so far."""
        self.history.append((self.trainer.step, self.compared.mean_error(self.held_out)))
        if self.idle == 0:
            for name, value in self.best.items():
                value.copy_(self.parameters[name])


def _rate(top: float, parameters: Mapping[str, Tensor]) -> float:
    """At the top of the schedule: a step of each of n weights moves what they sum up to n times.

    >>> _rate(0.001, {"0.weight": torch.ones(4, 10), "0.bias": torch.ones(4)})
    0.001
    >>> _rate(0.001, {"0.weight": torch.ones(4, 20, 5, 5)})
    0.00032
    >>> _rate(0.001, {"0.weights.0": torch.ones(2, 4, 10)})  # blocks of the same size, each (outputs, inputs)
    0.001
    """
    matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
    inputs = {n: p.shape[-1] if "weights" in n.split(".") else p[0].numel() for n, p in matrices.items()}
    weights = sum(p.numel() for p in matrices.values())
    mean = sum(p.numel() * inputs[name] for name, p in matrices.items()) / max(weights, 1)
    return top * min(1.0, _INPUTS / max(mean, 1.0))
