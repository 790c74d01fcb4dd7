"""What a layer multiplies its weight with, row by row: vectors of a linear layer, patches of a convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.data.batch import Batch
from crystallite.data.weight_products import multiplied_rows
from crystallite.operators.conv import Convolution
from crystallite.operators.experts import active_experts
from crystallite.statistics.watching import LayerCall

__all__ = ["call_counts", "counts_and_unit", "matrix_of", "read_rows", "row_counts", "set_layer_", "written_rows"]

_TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Rows = Callable[[torch.Size], Tensor]  # which rows are looked at, by the shape of positions


def matrix_of(module: nn.Module) -> Tensor:
    """The weight of a layer as (outputs, inputs); of a convolution, inputs are channels × places of the kernel."""
    weight: Any = module.weight
    if isinstance(module, Convolution):
        return weight.detach().flatten(1)
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().T


@torch.no_grad()
def set_layer_(module: Any, weight: Tensor, bias: Tensor) -> None:
    """Give a layer other numbers, in place; weight: (outputs, inputs)."""
    transposed = not isinstance(module, (nn.Linear, Convolution))
    module.weight.copy_(weight.T if transposed else weight.view(module.weight.shape))
    if module.bias is not None:
        module.bias.copy_(bias)


def read_rows(module: nn.Module, value: Tensor, rows: Rows) -> Tensor:
    """(rows, inputs): what the layer multiplies its weight with at some of the positions that it writes.

    Of a convolution only the patches that are asked for are built.

    >>> x = torch.arange(4.0).view(1, 1, 4)
    >>> read_rows(nn.Conv1d(1, 1, 3, padding=1), x, lambda shape: torch.tensor([0, 2])).tolist()
    [[0.0, 0.0, 1.0], [1.0, 2.0, 3.0]]
    """
    if not isinstance(module, Convolution):
        return value.reshape(-1, value.shape[-1])[rows(value.shape[:-1]).to(value.device)]
    value = _batched(module, value)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(value, module._reversed_padding_repeated_twice, mode).movedim(1, -1)  # (samples, places…, channels)
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    sizes = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(padded.shape[1:-1], kernel, stride, dilation, strict=True)
    ]
    shape = torch.Size([len(value), *sizes])
    sample, *start = torch.unravel_index(rows(shape).to(value.device), shape)
    offsets = torch.tensor(
        list(itertools.product(*map(range, kernel))), device=value.device
    )  # (places of the kernel, …)
    along = [
        (first * s)[:, None] + offsets[:, i] * d
        for i, (first, s, d) in enumerate(zip(start, stride, dilation, strict=True))
    ]
    return padded[(sample[:, None], *along)].mT.flatten(1)


def written_rows(module: nn.Module, value: Tensor, rows: Rows) -> Tensor:
    """(rows, outputs): what the layer wrote at some positions."""
    if isinstance(module, Convolution):
        value = _batched(module, value).movedim(1, -1)
    return value.reshape(-1, value.shape[-1])[rows(value.shape[:-1]).to(value.device)]


def _batched(module: Convolution, value: Tensor) -> Tensor:
    return value if value.ndim == len(module.kernel_size) + 2 else value[None]


def call_counts(model: nn.Module, names: Iterable[str], batch: Batch) -> dict[str, int]:
    """How often each layer is used for one sample; 0: it does not run.

    Where some layers run once for a whole batch, the smallest whole numbers in the right proportion.

    A convolution is used at every place of what it writes, a transposed one at every place of what it reads, a
    recurrent layer at every step. Where the model's code multiplies a weight itself, that counts too.

    >>> net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 1), nn.Linear(1, 1))
    >>> call_counts(net, ["0", "2", "3"], Batch(0, 5, (torch.zeros(5, 1, 4),)))
    {'0': 2, '2': 1, '3': 1}
    """
    return counts_and_unit(model, names, batch)[0]


def counts_and_unit(model: nn.Module, names: Iterable[str], batch: Batch) -> tuple[dict[str, int], str]:
    """The same, and what these counts are of, in words."""
    found = row_counts(model, names, batch)
    found |= multiplied_rows(model, [name for name, rows in found.items() if not rows], batch)
    common, unit = batch.size, f"for one sample ({batch.sample})"
    if any(count % batch.size for count in found.values()):
        common = math.gcd(*found.values())
        unit = f"for {f'1/{common:,} of ' * (common > 1)}a batch of {batch.size:,} samples ({batch.sample})"
    return {name: count // common for name, count in found.items()}, unit


def row_counts(model: nn.Module, names: Iterable[str], batch: Batch) -> dict[str, int]:
    """How many rows each layer writes on a batch; of a stack of experts, as many as would take all of them.

    >>> row_counts(nn.Sequential(nn.Linear(4, 1)), ["0"], Batch(0, 5, (torch.zeros(5, 4),)))
    {'0': 5}
    """
    found = dict.fromkeys(names, 0)

    def count(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            found[name] += _positions(module, LayerCall(inputs, output))

        return hook

    with ExitStack() as hooks:
        for name in found:
            hooks.callback(model.get_submodule(name).register_forward_hook(count(name)).remove)
        batch.run(model)
    return found


def _positions(module: nn.Module, call: LayerCall) -> int:
    """How many rows a layer wrote in a call."""
    written = getattr(call.returned, "data", call.returned)  # of a packed sequence
    if not isinstance(written, Tensor):
        return 0
    if isinstance(module, _TRANSPOSED):  # its kernel is used for every place that it reads
        return int(call.inputs[0].numel()) // module.in_channels
    width = module.out_channels if isinstance(module, Convolution) else written.shape[-1]
    share = active_experts(module, call.inputs)
    return round(written.numel() // max(width, 1) * (1.0 if share is None else share))
