"""Whether there is enough calibration data for every layer, before anything is fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from crystallite.compression.experts import expert_of
from crystallite.compression.session import Session
from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.positions import count_positions, real_positions
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.watching import LayerCall, watching

__all__ = ["check_positions"]

_MINOR = 0.01  # of the multiply-adds of all layers that can be fitted: without them a budget is reached as well


def check_positions(session: Session, example: Batch, blocks: int = 1) -> dict[str, str]:
    """Layers that fewer positions of the data reach than they, or a block of them, have inputs, and that in words.

    Refused where they compute more than a hundredth of what can be fitted. Less than that is what a pooler does, which
    reads one position of each text, and is left alone.

    One run on the example says what a layer reads: a row for each sample, for each token, or a fixed number. Layers of
    which it does not say so (experts, sequences of several lengths without a mask) are looked at when they are fitted.
    """
    routed = session.plan.routed
    names = [name for name in session.units if name not in routed and not expert_of(name, session.dense)]
    with watching(session.dense, names) as calls:
        example.run(session.dense)
    short: dict[str, tuple[int, int]] = {}  # layer → positions that it needs, and those that there are
    for name in names:
        outputs, inputs = matrix_of(session.units[name].module).shape
        rows = [_rows(session, name, call, example) for call in calls[name]]
        if rows and None not in rows and min(outputs, inputs) >= blocks:
            needed, there = -(-inputs // blocks), sum(row for row in rows if row is not None)
            if there < needed:
                short[name] = needed, there
    costs = {name: unit.macs * (session.call_counts.get(name) or 1) for name, unit in session.units.items()}
    if any(name in session.uncut for name in short) or sum(costs[n] for n in short) > _MINOR * sum(costs.values()):
        raise InvalidOption(_message(short))
    return {
        name: f"{there} positions of the calibration data reach it, and it reads {needed} inputs"
        for name, (needed, there) in short.items()
    }


def _rows(session: Session, name: str, call: LayerCall, example: Batch) -> int | None:
    """How many rows of the data a layer that is called so will be fitted on, at most; None: the call does not say."""
    read, written = call.inputs[0] if call.inputs else None, call.returned
    if not isinstance(read, Tensor) or not isinstance(written, Tensor):
        return None
    module, fitted = session.units[name].module, session.data.fitted
    if isinstance(module, Convolution):
        leading = torch.Size([written.numel() // module.out_channels])
    else:
        leading = read.shape[:-1]
    samples, tokens = sum(batch.size for batch in fitted), sum(map(count_positions, fitted))
    if isinstance(real_positions(example, leading), Tensor):
        return tokens
    count, found = math.prod(leading), []
    if count == count_positions(example):
        found.append(tokens)
    if count == example.size:
        found.append(samples)
    if count % example.size == 0 and len({_sizes(batch) for batch in fitted}) == 1:
        found.append(count // example.size * samples)
    return max(found, default=None)


def _sizes(batch: Batch) -> tuple[torch.Size, ...]:
    """Of a sample."""
    return tuple(value.shape[1:] for value in batch.values if isinstance(value, Tensor))


def _message(short: Mapping[str, tuple[int, int]]) -> str:
    name = max(short, key=lambda each: short[each][0] / max(short[each][1], 1))
    needed, there = short[name]
    times = math.ceil(needed / max(there, 1))
    others = len(short) - 1
    also = f"; {others} other layer{'s have' if others > 1 else ' has'} too few as well" if others else ""
    return (
        f"{name}: expected at least {needed} positions of calibration data, as it reads {needed} inputs, got {there} "
        f"in the part that is fitted on{also}; pass at least {times} times as much data, or name "
        f"{'these layers' if others else 'the layer'} in ignore="
    )
