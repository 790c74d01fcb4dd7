"""Runs a convolution of blocks by compiled kernels: one or two axes, stride 1, zeros around the image."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.core.parallel import run_on_openmp_threads
from crystallite.operators.runtime import conv_kernels as kernels
from crystallite.operators.runtime.engine import array

__all__ = ["convolve"]

_BUFFER_BYTES = 1 << 17  # of the padded channels a block reads at a time; they stay in the second-level cache
_RATE = 20e9  # multiply-adds per second of one core
_WORTH_A_TEAM = 40e-6  # seconds of work
_Call = ctypes.c_int64 * len(kernels.ARGUMENTS)


def convolve(
    x: Tensor, weights: Sequence[Tensor], groups: Sequence[int], inputs: Tensor, places: Tensor, bias: Tensor | None,
    out_channels: int, padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """(samples, channels, height, width) → the same with the output channels.

    Args:
        x: C-contiguous, as all other tensors.
        weights: of each stack of equal blocks, (groups × outputs, inputs, kernel height, kernel width).
        groups: blocks of each stack.
        inputs: the channels that the blocks read, block after block.
        places: the channels that they write, and then those that no block writes, which are their bias.
        bias: of the output channels.
        out_channels: how many they are.
        padding: zeros above and below, left and right.
        dilation: steps from one place of the kernel to the next.
    """
    samples, channels, height, width = x.shape
    kernel = weights[0].shape[2:]
    sizes = [n + 2 * p - d * (k - 1) for n, p, d, k in zip((height, width), padding, dilation, kernel, strict=True)]
    y = x.new_empty(samples, out_channels, *sizes)
    stacks, column, row = [], 0, 0
    for weight, count in zip(weights, groups, strict=True):
        outputs, depth = weight.shape[0] // count, weight.shape[1]
        stacks.append((weight.data_ptr(), count, outputs, depth, column, row))
        column, row = column + count * depth, row + count * outputs
    if row < out_channels:
        y[:, places[row:]] = 0 if bias is None else bias[places[row:], None, None]
    deepest = max(stack[3] for stack in stacks)
    tall, pitch = (kernel[0] - 1) * dilation[0], width + 2 * padding[1]
    rows = _BUFFER_BYTES // (x.itemsize * deepest * pitch) - tall
    strip = min(sizes[0], max(rows, 4 * tall, 1))  # the rows that two strips share are read twice
    table = np.array(stacks, np.int64)
    ends = [end for tensor in (inputs, places, bias) for end in _ends(tensor)]
    call = _Call(
        table.ctypes.data, len(table), *ends, x.data_ptr(), y.data_ptr(), samples, channels, out_channels, height,
        width, *sizes, *kernel, *padding, *dilation, strip, deepest, max(stack[2] for stack in stacks), sum(groups), 0,
    )  # fmt: skip
    seconds = samples * sizes[0] * sizes[1] * sum(weight.numel() for weight in weights) / _RATE
    threads = torch.get_num_threads() if seconds > _WORTH_A_TEAM else 1
    run_on_openmp_threads(threads, _entry(x.dtype), ctypes.addressof(call))
    return y


def _ends(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.numel())


@functools.cache
def _entry(dtype: torch.dtype) -> Any:
    return kernels.entry(array(None, torch.empty(0, dtype=dtype)).dtype.type)
