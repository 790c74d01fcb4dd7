"""Training that can be interrupted: Adam, a rate that rises and falls, and checkpoints of all that changes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.statistics.checkpoints import Checkpoints, State

__all__ = ["Trainer", "share_of_rate"]

_WARM_UP = 0.1  # share of the steps
_SECONDS = 30.0  # between two checkpoints


def share_of_rate(time: float) -> float:
    """Share of the highest learning rate after a share of the steps: it rises over the first tenth, then is a cosine.

    >>> [round(share_of_rate(t), 2) for t in (0.05, 0.1, 0.55, 1.0)]
    [0.5, 1.0, 0.5, 0.0]
    """
    if time < _WARM_UP:
        return time / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (time - _WARM_UP) / (1 - _WARM_UP)))


class Trainer:
    """Parameters under Adam, the number of steps taken, and what else a run needs to go on as if nothing had happened.

    values: all tensors that change, by name, restored in place; record: all other values that change, plain JSON. The
    state of PyTorch's random numbers is kept too. If there is a checkpoint, the run goes on from it.

    >>> weight = nn.Parameter(torch.ones(1))
    >>> trainer = Trainer([weight], {"weight": weight}, {"history": []}, 0.5, steps=10)
    >>> trainer.descend([(weight**2).sum()])
    >>> trainer.step, round(weight.item(), 2)  # half of the highest rate at the start
    (1, 0.75)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        values: Mapping[str, Tensor],
        record: dict[str, Any],
        rate: float,
        steps: int,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.values, self.record, self.rate, self.steps = values, record, rate, steps
        self.optimizer = torch.optim.Adam(parameters, rate)
        self.step, self.checkpoints = 0, checkpoints
        saved = None if checkpoints is None else checkpoints.latest()
        if saved is not None and checkpoints is not None:
            try:
                self._load(saved)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{checkpoints.folder}: expected the state of this run, got another or a damaged one "
                    f"({type(error).__name__}: {error!s:.200}); remove it to begin anew"
                ) from None
        self._written = time.monotonic()

    def descend(self, errors: Iterable[Tensor]) -> None:
        """Take a step that lessens the sum of errors; what each of them needs is freed before the next is asked for."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * share_of_rate((self.step + 0.5) / self.steps)
        self.optimizer.zero_grad()
        try:
            for error in errors:
                error.backward()
        except RuntimeError as reason:
            text = str(reason).partition("\n")[0]
            raise InvalidOption(f"no gradients can be taken through this model: {text:.200}") from reason
        self.optimizer.step()
        self.step += 1

    def save(self, now: bool) -> None:
        """Write a checkpoint, now or if the last one is half a minute old."""
        if self.checkpoints is not None and (now or time.monotonic() - self._written > _SECONDS):
            self.checkpoints.write(self.step, self._state())
            self._written = time.monotonic()

    def _state(self) -> State:
        tensors = {f"values.{name}": value for name, value in self.values.items()}
        for i, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{i}.{name}": value for name, value in moments.items()}
        tensors["random"] = torch.get_rng_state()
        return State(tensors, {"step": self.step, **self.record})

    @torch.no_grad()
    def _load(self, state: State) -> None:
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                moments.setdefault(int(number), {})[key] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        for name, value in self.values.items():
            value.copy_(state.tensors[f"values.{name}"])
        self.step = int(state.record["step"])
        self.record.update({name: state.record[name] for name in self.record})
        torch.set_rng_state(state.tensors["random"])
