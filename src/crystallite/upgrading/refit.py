"""Blocks fitted in closed form, without labels, to what the dense layers compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.errors import InvalidOption
from crystallite.upgrading.partition import Partition
from crystallite.upgrading.running import call
from crystallite.validation.batches import Batch

__all__ = ["refit_", "seen"]

_RIDGE = 0.01  # of the mean of the Gram matrix's diagonal


@torch.no_grad()
def refit_(model: nn.Module, dense: nn.Module, partition: Partition, batches: Sequence[Batch]) -> None:
    """Give the layers of a partition the blocks that least squares finds, layer by layer, in place.

    Targets are the *dense* model's pre-activations; inputs come from the model as far as it is fitted already, so a
    layer makes good for what the ones before it have lost. Ridge of .01 of the mean diagonal. Weights between blocks
    become zero. Padded positions (an `attention_mask` of zeros) do not count. Both models must be in evaluation mode.

    Cost: a run of both models up to each layer, and a Gram matrix for each block. Raises where a block has more inputs
    than there are samples.
    """
    for name in partition.layers:
        layer, outputs, inputs = model.get_submodule(name), *partition.sides(name)
        assert isinstance(layer, nn.Linear)
        cells = [
            _Moments(torch.from_numpy((outputs == b).nonzero()[0]), torch.from_numpy((inputs == b).nonzero()[0]))
            for b in range(partition.blocks)
        ]
        count = 0
        for batch in batches:
            x, t = seen(model, name, batch)[0], seen(dense, name, batch)[1]
            rows = _real(batch, x)
            x, t = x.flatten(0, -2)[rows].double(), t.flatten(0, -2)[rows].double()
            count += len(x)
            for cell in cells:
                cell.add(x, t)
        widest = max(len(cell.columns) for cell in cells)
        if count < widest:
            raise InvalidOption(f"{name}: a block has {widest} inputs, but the data has {count} samples: pass more")
        layer.weight.zero_()
        for cell in cells:
            weight, bias = cell.solution(layer.bias is not None)
            layer.weight[cell.rows[:, None], cell.columns] = weight.to(layer.weight)
            if layer.bias is not None:
                layer.bias[cell.rows] = bias.to(layer.bias)


class _Moments:
    """Sums over samples that least squares needs, for one block."""

    def __init__(self, rows: Tensor, columns: Tensor) -> None:
        self.rows, self.columns, self.samples = rows, columns, 0
        self.x: Any = 0.0
        self.t: Any = 0.0
        self.xx: Any = 0.0
        self.xt: Any = 0.0

    def add(self, x: Tensor, t: Tensor) -> None:
        x, t = x[:, self.columns], t[:, self.rows]
        self.samples += len(x)
        self.x, self.t = self.x + x.sum(0), self.t + t.sum(0)
        self.xx, self.xt = self.xx + x.T @ x, self.xt + x.T @ t

    def solution(self, with_bias: bool) -> tuple[Tensor, Tensor]:
        """Weight (rows, columns) and bias (rows,)."""
        gram, cross = self.xx, self.xt
        if with_bias:
            gram = gram - torch.outer(self.x, self.x) / self.samples
            cross = cross - torch.outer(self.x, self.t) / self.samples
        diagonal = gram.diagonal()
        ridge = (_RIDGE * diagonal.mean()).clamp_min(torch.finfo(gram.dtype).tiny)  # inputs may all be constant
        weight = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), cross).T
        return weight, (self.t - weight @ self.x) / self.samples


def seen(model: nn.Module, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """What a layer reads and writes on a batch; the model is run no further than that."""

    def leave(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        raise _Seen(inputs[0], output)

    handle = model.get_submodule(name).register_forward_hook(leave)
    try:
        call(model, batch)
    except _Seen as found:
        return found.read, found.written
    finally:
        handle.remove()
    raise InvalidOption(f"{name}: the model does not run this layer on the data, so it cannot be fitted")


class _Seen(Exception):
    def __init__(self, read: Tensor, written: Tensor) -> None:
        super().__init__()
        self.read, self.written = read, written


def _real(batch: Batch, x: Tensor) -> Tensor | slice:
    """Positions that are no padding."""
    mask = batch.named.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == x.shape[:-1]:
        return mask.flatten().bool().to(x.device)
    return slice(None)
