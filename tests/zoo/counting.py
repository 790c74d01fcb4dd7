"""Multiply-adds of a model as PyTorch executes them: an oracle that knows nothing of our operators and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from crystallite.data.batch import Batch

__all__ = ["Count", "count"]


@dataclass(frozen=True)
class Count:
    """Multiply-adds of one batch."""

    weights: int  # products of activations with parameters
    others: int  # products of activations with each other, and with weights that are computed on the way

    @property
    def total(self) -> int:
        return self.weights + self.others


class _Counter(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self.held = {t.untyped_storage().data_ptr() for t in held if t.ndim > 1 and t.device.type == "cpu"}
        self.weights = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            macs = flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2
        elif packet is torch.ops.aten.mkldnn_rnn_layer:  # one direction of one layer of an LSTM
            steps = args[0].shape[0] * args[0].shape[1]
            macs = steps * (args[1].numel() + args[2].numel())
        elif packet is getattr(torch.ops.aten, "_grouped_mm", None):
            macs = args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
        else:
            return out
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim > 1]
        if any(t.untyped_storage().data_ptr() in self.held for t in operands):
            self.weights += macs
        else:
            self.others += macs
        return out


def count(model: nn.Module, batch: Batch) -> Count:
    """Multiply-adds that a model needs for a batch, counted where they happen.

    With gradients, because without them block operators run in compiled kernels that PyTorch does not see.
    """
    with _Counter(model) as counter:
        batch.run(model, gradients=True)
    return Count(counter.weights, counter.others)
