"""Layers that baselines make smaller, and the search for the largest model under a limit of multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.models.layers import find_units
from crystallite.statistics.watching import watching
from crystallite.validation.cost import count_macs

__all__ = ["find_layers", "input_norms", "largest"]

_HALVINGS = 8  # of the share that is kept


def find_layers(
    model: nn.Module, targets: str | Sequence[str] = ("*",), ignore: str | Sequence[str] = (), recurrent: bool = False
) -> tuple[str, ...]:
    """Names of the linear layers and ungrouped convolutions that match, in the order of the model; tied ones do not.

    recurrent: also those of recurrent networks.

    >>> find_layers(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)), ignore="3")
    ('0',)
    """
    patterns = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    return tuple(
        unit.name
        for unit in find_units(model, *patterns)
        if not unit.reason
        and (
            isinstance(unit.module, nn.Linear)
            or getattr(unit.module, "groups", 0) == 1
            or (recurrent and unit.kind == "recurrent")
        )
    )


@torch.no_grad()
def input_norms(model: nn.Module, names: Sequence[str], batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The root of the sum of squares of each input feature (channel) of the layers that run, over all samples."""
    sums: dict[str, Tensor] = {}
    for batch in batches:
        with watching(model, names) as calls:
            batch.run(model)
        for name, call in ((name, call) for name, own in calls.items() for call in own):
            x = call.inputs[0]
            x = x if isinstance(model.get_submodule(name), nn.Linear) else x.movedim(1, -1)
            squares = x.reshape(-1, x.shape[-1]).double().square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares
    return {name: value.sqrt().float() for name, value in sums.items()}


def largest(made: Callable[[float], nn.Module], batch: Batch, limit: int) -> nn.Module:
    """Of the models made with shares between 0 and 1, the one of the largest whose multiply-adds keep to the limit.

    >>> x = Batch(0, 1, (torch.zeros(1, 8),))
    >>> largest(lambda share: nn.Linear(8, max(1, round(100 * share))), x, 400)
    Linear(in_features=8, out_features=50, bias=True)
    """
    low, high, best, least = 0.0, 1.0, None, math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        small = made(middle)
        macs = count_macs(small, batch)
        least = min(least, macs)
        if macs <= limit:
            low, best = middle, small
        else:
            high = middle
    if best is None:
        raise InvalidOption(f"cannot be made so small: {least:,} multiply-adds are left, {limit:,} are allowed")
    return best
