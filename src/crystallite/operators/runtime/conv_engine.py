"""Runs a convolution of blocks by compiled kernels: one or two axes, stride 1, zeros around the image."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.compiling import REGISTER_BITS
from crystallite.core.parallel import run_on_openmp_threads
from crystallite.operators.runtime import conv_kernels as kernels
from crystallite.operators.runtime.engine import Unchanged, array

__all__ = ["Convolving"]

_BUFFER_BYTES = 1 << 17  # of the padded channels a block reads at a time; they stay in the second-level cache
_RATE = 20e9  # multiply-adds per second of one core
_WORTH_A_TEAM = 40e-6  # seconds of work
_X, _Y = map(kernels.ARGUMENTS.index, ("x", "y"))
_Call = ctypes.c_int64 * len(kernels.ARGUMENTS)


class Convolving(Unchanged):
    """One convolution of blocks, for inputs of one shape, as long as its tensors stay what and where they are."""

    def __init__(
        self, module: nn.Module | None = None, key: tuple[Any, ...] = (), x: Tensor | None = None,
        weights: Sequence[Tensor] = (), groups: Sequence[int] = (), inputs: Tensor | None = None,
        places: Tensor | None = None, outputs: Tensor | None = None, bias: Tensor | None = None, out_channels: int = 0,
        padding: Sequence[int] = (), dilation: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """What does not depend on the values of the input; without `x`, nothing that could run.

        Args:
            module: whose parts these tensors are.
            key: what the shape and the settings were.
            x: (samples, channels, height, width), C-contiguous, as all other tensors.
            weights: of each stack of equal blocks, (groups × outputs, inputs, kernel height, kernel width).
            groups: blocks of each stack.
            inputs: the channels that the blocks read, block after block.
            places: the channels that they write, and then those that no block writes, which are their bias.
            outputs: the table that `places` was made from; another tensor may be read into its memory.
            bias: of the output channels.
            out_channels: how many they are.
            padding: zeros above and below, left and right.
            dilation: steps from one place of the kernel to the next.
        """
        super().__init__(module)
        self.key, self._outputs = key, None if outputs is None else outputs.clone()
        self.ready = x is not None and places is not None
        if x is None or places is None:
            return
        samples, channels, height, width = x.shape
        kernel = weights[0].shape[2:]
        sizes = [n + 2 * p - d * (k - 1) for n, p, d, k in zip((height, width), padding, dilation, kernel, strict=True)]
        stacks, column, row = [], 0, 0
        for weight, count in zip(weights, groups, strict=True):
            height_of_block, depth = weight.shape[0] // count, weight.shape[1]
            stacks.append((weight.data_ptr(), count, height_of_block, depth, column, row))
            column, row = column + count * depth, row + count * height_of_block
        deepest = max(stack[3] for stack in stacks)
        tall, pitch = (kernel[0] - 1) * dilation[0], width + 2 * padding[1]
        rows = _BUFFER_BYTES // (x.itemsize * deepest * pitch) - tall
        strip = min(sizes[0], max(rows, 4 * tall, 1))  # the rows that two strips share are read twice
        table = np.array(stacks, np.int64)
        inside = _inside(x, kernel, padding, dilation, sizes)
        self._arrays = (table, weights, inputs, places, bias, inside)  # stay alive
        ends = [end for tensor in (inputs, places, bias) for end in _ends(tensor)]
        self._template = bytes(_Call(
            table.ctypes.data, len(table), *ends, 0, 0, samples, channels, out_channels, height, width, *sizes,
            *kernel, *padding, *dilation, strip, deepest, max(stack[2] for stack in stacks), sum(groups),
            inside.ctypes.data, inside.shape[1], 0,
        ))  # fmt: skip
        self._shape, self._dormant, self._bias = (samples, out_channels, *sizes), places[row:], bias
        self._seconds = samples * sizes[0] * sizes[1] * sum(weight.numel() for weight in weights) / _RATE
        self._entry = _entry(x.dtype, inside.size > 0)

    def unchanged(self, outputs: Tensor | None = None) -> bool:
        """Whether the tensors are where they were, and this table is what it was."""
        same = outputs is self._outputs if outputs is None or self._outputs is None else outputs.equal(self._outputs)
        return same and super().unchanged()

    def run(self, x: Tensor) -> Tensor:
        """(samples, channels, height, width) → the same with the output channels."""
        y = torch.empty(self._shape, dtype=x.dtype)
        if len(self._dormant):
            y[:, self._dormant] = 0 if self._bias is None else self._bias[self._dormant, None, None]
        call = _Call.from_buffer_copy(self._template)
        call[_X], call[_Y] = x.data_ptr(), y.data_ptr()
        threads = torch.get_num_threads() if self._seconds > _WORTH_A_TEAM else 1
        run_on_openmp_threads(threads, self._entry, ctypes.addressof(call))
        return y


def _inside(
    x: Tensor, kernel: Sequence[int], padding: Sequence[int], dilation: Sequence[int], sizes: Sequence[int]
) -> np.ndarray:
    """(places of the kernel, registers): a bit for each output position says whether what it meets is in the image.

    Registers are so many that whole tiles of them hold all positions; none where the output has another size, or the
    processor cannot load what some bits name: then channels are padded.
    """
    shape = np.array(x.shape[2:])
    if REGISTER_BITS < 512 or list(shape) != list(sizes):
        return np.zeros((0, 0), np.uint8)
    lanes = REGISTER_BITS // 8 // x.itemsize
    count = -(-int(shape.prod()) // (kernels.TILE * lanes)) * kernels.TILE * lanes
    positions = np.stack(np.unravel_index(np.arange(shape.prod()), shape))  # (2, positions)
    bits = np.zeros((math.prod(kernel), count), bool)
    for place, step in zip(bits, np.ndindex(*kernel), strict=True):
        met = positions + (np.array(step) * dilation - padding)[:, None]
        place[: shape.prod()] = ((met >= 0) & (met < shape[:, None])).all(0)
    return np.packbits(bits, axis=1, bitorder="little").view(f"u{lanes // 8}")


def _ends(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else (tensor.data_ptr(), tensor.numel())


@functools.cache
def _entry(dtype: torch.dtype, in_place: bool) -> Any:
    number = array(None, torch.empty(0, dtype=dtype)).dtype.type
    return kernels.in_place_entry(number) if in_place else kernels.entry(number)
