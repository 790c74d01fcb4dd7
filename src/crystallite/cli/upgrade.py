"""`crystallite upgrade`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from crystallite.cli.running import open_data, open_dense, print_result
from crystallite.core.errors import InvalidOption
from crystallite.discovery import discover
from crystallite.models.opening import write_model
from crystallite.models.record import record
from crystallite.models.summary import summary
from crystallite.separation.upgrade import upgrade

__all__ = ["run"]

_LOSSES: dict[str, Any] = {"cross-entropy": F.cross_entropy, "mse": F.mse_loss, "match": None}


class _Shuffled:
    """Batches of a file in a new order for every epoch."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.samples, self.batch = list(open_data(options, options.model, 1)), options.batch

    def __iter__(self) -> Iterator[Any]:
        for some in torch.randperm(len(self.samples)).split(self.batch):
            yield _joined([_alone(self.samples[i]) for i in some.tolist()])


def _joined(samples: list[Any]) -> Any:
    """Samples as one batch; texts differ in length, and are padded."""
    if isinstance(samples[0], dict) and len({value.shape for sample in samples for value in sample.values()}) > 1:
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        return {name: pad([sample[name] for sample in samples]) for name in samples[0]}
    return torch.utils.data.default_collate(samples)


def _alone(sample: Any) -> Any:
    """A batch of one without its axis."""
    if isinstance(sample, dict):
        return {name: value[0] for name, value in sample.items()}
    return (sample[0][0], sample[1][0]) if isinstance(sample, tuple) else sample[0]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Upgrade and save; 0."""
    if options.batch < 1:
        raise InvalidOption(f"--batch must be at least 1, got {options.batch}")
    model = open_dense(options.model, options.weights, options.original)
    if options.modules:
        given["modules"] = discover(model, open_data(options, options.model, options.batch))
    data, loss = _Shuffled(options), _LOSSES[options.loss]
    held_out = None
    if options.held_out is not None:
        held_out = open_data(options, options.model, options.batch, "held_out")
    small = upgrade(model, data=data, held_out=held_out, loss=loss, progress=sys.stderr.isatty(), **given)
    found = record(small)
    upgraded: Any = found.options
    write_model(small, options.out, model, Path(options.model), {"blocks": upgraded.blocks, "level": upgraded.level})
    result = summary(small)
    plain = {**result.to_json(), "upgrade": found.to_plain()["options"], "out": str(options.out)}
    print_result(f"{result}\n\n{upgraded}\nSaved in {options.out}.", plain, options, options.model)
    return 0
