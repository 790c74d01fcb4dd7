"""`polish_`: a fitted model trained a little inside its structure, to return what the dense one returns. No labels."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.groups import first_samples
from crystallite.compression.session import output_error
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, run
from crystallite.data.calibration import Calibration, real_rows
from crystallite.data.calls import evaluating
from crystallite.data.outputs import tensors
from crystallite.data.running import returned
from crystallite.models.record import Polish
from crystallite.separation.training import share_of_rate
from crystallite.statistics.checkpoints import Checkpoints, State

__all__ = ["polish_"]

_BATCH = 32  # samples of a step
_RATE = 1e-3  # at the top of the schedule, where weights read up to 160 inputs; lower in proportion to more
_INPUTS = 160
_LOOKS = 10  # how often the held-out error is looked at
_PATIENCE = 7  # looks without a better one after which training ends: a high rate does harm before it helps
_SECONDS = 30.0  # between two checkpoints


def polish_(
    model: nn.Module,
    dense: nn.Module,
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
    with evaluating(model), _trained(model, layers) as parameters:
        work, rate = _Run(model, dense, parameters, data), _rate(parameters)
        saved = None if checkpoints is None else checkpoints.latest()
        if saved is not None:
            work.load(saved)
        elif not work.history:
            work.evaluate()
        written, every = time.monotonic(), max(1, steps // _LOOKS)
        for step in tqdm(range(work.step, steps), "polishing", initial=work.step, total=steps, disable=not progress):
            if work.idle >= _PATIENCE:
                break
            work.take_step(rate * share_of_rate((step + 0.5) / steps), seed)
            looked = work.step % every == 0 or work.step == steps
            if looked:
                work.evaluate()
            if checkpoints is not None and (looked or time.monotonic() - written > _SECONDS):
                checkpoints.write(work.step, work.state())
                written = time.monotonic()
        with torch.no_grad():
            for parameter, value in zip(parameters.values(), work.best, strict=True):
                parameter.copy_(value)
    errors = [error for _, error in work.history]
    return Polish(work.step, errors[0], min(errors), tuple(work.history))


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


class _Run:
    """The model while it is trained: all that changes is in `state`."""

    def __init__(
        self, model: nn.Module, dense: nn.Module, parameters: dict[str, nn.Parameter], data: Calibration
    ) -> None:
        self.model, self.dense, self.parameters = model, dense, parameters
        self.batches, self.held_out = data.fitted + data.more, data.held_out
        self.optimizer = torch.optim.Adam(parameters.values(), _RATE)
        self.step, self.idle = 0, 0  # steps taken; looks since the best one
        self.history: list[tuple[int, float]] = []
        self.best = [p.detach().clone() for p in parameters.values()]

    def take_step(self, rate: float, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed * 1_000_003 + self.step)
        sizes = torch.tensor([float(batch.size) for batch in self.batches])
        batch = self.batches[int(torch.multinomial(sizes, 1, generator=rng))]
        start = int(torch.randint(max(batch.size - _BATCH, 0) + 1, (1,), generator=rng))
        some = _window(batch, start)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        _error(self.model, self.dense, some).backward()
        self.optimizer.step()
        self.step += 1

    def evaluate(self) -> None:
        """Compare the state with the best one so far."""
        errors = [output_error(run(self.model, batch), run(self.dense, batch), batch) for batch in self.held_out]
        error = sum(errors) / len(errors)
        better = not self.history or error < min(e for _, e in self.history)
        self.history.append((self.step, error))
        self.idle = 0 if better else self.idle + 1
        if better:
            self.best = [p.detach().clone() for p in self.parameters.values()]

    def state(self) -> State:
        tensors: dict[str, Tensor] = {f"model.{name}": value for name, value in self.parameters.items()}
        tensors |= {f"best.{name}": value for name, value in zip(self.parameters, self.best, strict=True)}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        return State(tensors, {"step": self.step, "idle": self.idle, "history": [list(each) for each in self.history]})

    def load(self, state: State) -> None:
        self.step, self.idle = int(state.record["step"]), int(state.record["idle"])
        self.history = [(int(step), float(error)) for step, error in state.record["history"]]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                moments.setdefault(int(number), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        with torch.no_grad():
            for place, (name, parameter) in enumerate(self.parameters.items()):
                parameter.copy_(state.tensors[f"model.{name}"])
                self.best[place].copy_(state.tensors[f"best.{name}"])


def _rate(parameters: Mapping[str, Tensor]) -> float:
    """At the top of the schedule: a step of each of n weights moves what they sum up to n times.

    >>> _rate({"0.weight": torch.ones(4, 10), "0.bias": torch.ones(4)}), _rate({"0.weight": torch.ones(4, 20, 5, 5)})
    (0.001, 0.00032)
    >>> _rate({"0.weights.0": torch.ones(2, 4, 10)})  # blocks of the same size, each (outputs, inputs)
    0.001
    """
    matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
    inputs = {n: p.shape[-1] if "weights" in n.split(".") else p[0].numel() for n, p in matrices.items()}
    weights = sum(p.numel() for p in matrices.values())
    mean = sum(p.numel() * inputs[name] for name, p in matrices.items()) / max(weights, 1)
    return _RATE * min(1.0, _INPUTS / max(mean, 1.0))


def _window(batch: Batch, start: int) -> Batch:
    """Consecutive samples of a batch."""

    def cut(value: Any) -> Any:
        return value[start:] if isinstance(value, Tensor) and value.shape[:1] == (batch.size,) else value

    named = {name: cut(value) for name, value in batch.named.items()}
    rest = Batch(batch.first + start, batch.size - start, tuple(map(cut, batch.positional)), named)
    return first_samples(rest, _BATCH)


def _error(model: nn.Module, dense: nn.Module, batch: Batch) -> Tensor:
    """What `damage` measures, with gradients."""
    expected, found = tensors(run(dense, batch)), tensors(returned(model, batch))
    shares = []
    for path, value in expected.items():
        if value.is_floating_point():
            rows = real_rows(batch, value.shape[:-1], value.numel(), 0).to(value.device)
            a, b = (v.reshape(-1, v.shape[-1] if v.ndim else 1)[rows] for v in (found[path], value))
            variance = ((b - b.mean(0)) ** 2).sum() if len(b) > 1 else (b**2).sum()
            shares.append(((a - b) ** 2).sum() / variance.clamp_min(torch.finfo(b.dtype).tiny))
    return torch.stack(shares).mean()
