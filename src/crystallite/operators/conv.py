"""`BlockConv`: a convolution as the independent blocks of its channel graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from crystallite.core.compiling import REGISTER_BITS
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.runtime.conv_engine import Convolving
from crystallite.operators.runtime.engine import can_run_compiled
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose

__all__ = ["MOST_POSITIONS", "BlockConv", "Convolution", "channel_structure", "check_reach", "kernel_fits"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Block = tuple[np.ndarray, np.ndarray]  # output and input channels
MOST_POSITIONS = 1 << 20  # that a description may ask for in each channel, beside those of the input
_CHANGING = ("stride", "padding", "dilation")  # that a convolution may be given between calls
# inputs of a block, on average, below which our kernel is faster than a grouped convolution
_FEW_CHANNELS = 64 if REGISTER_BITS == 512 else 32
_SETTINGS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_KINDS: dict[str, type[Convolution]] = {kind.__name__: kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}


def channel_structure(conv: Convolution, name: str = "conv.weight") -> BipartiteStructure:
    """Blocks of output and input channels, joined by an edge where any position of their kernel is not zero.

    >>> channel_structure(nn.Conv2d(4, 6, 3, groups=2))
    BipartiteStructure(6×4: 2 blocks, largest 3×2, dormant 0 rows and 0 columns)
    """
    _check_kind(conv)
    largest = conv.weight.detach().abs().flatten(2).amax(2)  # (out_channels, in_channels / groups); NaN stays NaN
    # groups of equal shapes: each decomposes alone, and labels of different groups never meet
    rows, cols, used = [], [], 0
    for group in largest.chunk(conv.groups):
        inside = decompose(group, name=name)
        rows.append(np.where(inside.row_block < 0, -1, inside.row_block + used))
        cols.append(np.where(inside.col_block < 0, -1, inside.col_block + used))
        used += inside.n_blocks
    return BipartiteStructure.from_labels(np.concatenate(rows), np.concatenate(cols))


class BlockConv(nn.Module):
    """A convolution computed as channel gather → grouped convolutions → channel gather, plus the bias.

    Consecutive blocks with equally many channels are one grouped convolution. Blocks of few channels run in one
    compiled call where it can: along one or two axes, stride 1, zeros around, on the CPU without gradients. Dormant
    output channels emit their bias, dormant input channels are not read. A table that would say 0, 1, 2, … is not held,
    and nothing is moved for it. Stride, padding, dilation and padding mode are the original's.

    >>> conv = nn.Conv2d(4, 4, 3, padding=1)
    >>> with torch.no_grad():
    ...     conv.weight[::2, 1::2] = conv.weight[1::2, ::2] = 0
    >>> layer = BlockConv.from_dense(conv)
    >>> layer
    BlockConv(4, 4, kernel_size=(3, 3), blocks=2, 72 of 144 multiply-adds per position)
    >>> torch.equal(layer.to_dense().weight, conv.weight)
    True
    """

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int  # of the original
    padding_mode: str
    empty: Tensor
    inputs: Tensor | None  # (inputs of the parts,) the channel each one reads; None: the first ones, in order
    outputs: Tensor | None  # (out_channels,) place of each channel among the parts' outputs, past them: dormant;
    # None: in order, dormant ones last

    def __init__(
        self, conv: Convolution, parts: list[Convolution], inputs: Tensor | None, outputs: Tensor | None
    ) -> None:
        """Takes the settings, the bias and the dtype of `conv`, and the weights from the parts."""
        super().__init__()
        self.kind = type(conv).__name__
        for name, value in _settings(conv).items():
            setattr(self, name, value)
        self.parts = nn.ModuleList(parts)
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach().clone())
        # dtype and device, even without blocks
        self.register_buffer("empty", conv.weight.detach().new_empty(0), persistent=False)
        self.register_buffer("inputs", inputs)
        self.register_buffer("outputs", outputs)
        self._convolving = Convolving()

    @classmethod
    def from_dense(cls, conv: Convolution, structure: BipartiteStructure | None = None) -> BlockConv:
        """The blocks of a convolution, by default those of its nonzero kernels; what lies outside them is dropped.

        The structure is one of all output and all input channels. Its blocks may not join groups that the convolution
        keeps apart.
        """
        _check_kind(conv)
        structure = channel_structure(conv) if structure is None else structure
        expected = (conv.out_channels, conv.in_channels)
        if structure.shape != expected:
            raise InvalidMatrix(f"structure: expected shape {expected} (out, in channels), got {structure.shape}")
        blocks = _arranged([block for block in structure.blocks if len(block[1])])  # what reads nothing emits its bias
        parts = []
        for (height, width), run in groupby(blocks, key=_shape):
            kernels = [conv.weight.detach()[r][:, _columns_in_group(conv, r, c)] for r, c in run]
            count = len(kernels)
            part = _like(conv, in_channels=width * count, out_channels=height * count, groups=count, bias=False)
            part.weight = nn.Parameter(torch.cat(kernels))
            parts.append(part)
        rows, cols = (_joined(blocks, side) for side in (0, 1))
        outputs = np.full(conv.out_channels, len(rows))
        outputs[rows] = np.arange(len(rows))
        device = conv.weight.device
        return cls(
            conv,
            parts,
            None if _in_order(cols) else torch.from_numpy(cols).to(device),
            None if _in_order(rows) else torch.from_numpy(outputs).to(device),
        )

    def kernels(self) -> list[Tensor]:
        """Of each block (output channels, input channels, …)."""
        return [kernel.detach() for part in self._convolutions for kernel in part.weight.chunk(part.groups)]

    def part(self, blocks: Sequence[int], bias: Tensor | None) -> BlockConv:
        """Some blocks, by number, as a convolution of their channels alone, in this order; others are not read."""
        kernels, parts = self.kernels(), []
        for (height, width), run in groupby((kernels[block] for block in blocks), key=lambda kernel: kernel.shape[:2]):
            stack = torch.cat(list(run))
            count = len(stack) // height
            made = _like(self, in_channels=width * count, out_channels=len(stack), groups=count, bias=False)
            made.weight = nn.Parameter(stack)
            parts.append(made)
        sizes = {name: sum(getattr(part, name) for part in parts) for name in ("in_channels", "out_channels")}
        conv = _like(self, **sizes, groups=1, bias=bias is not None).to_empty(device=self.empty.device)
        if bias is not None:
            conv.bias = nn.Parameter(bias)
        return BlockConv(conv, parts, None, None)

    def describe(self) -> dict[str, Any]:
        """Sizes and settings, without weights and tables."""
        settings = {name: list(v) if isinstance(v, tuple) else v for name, v in _settings(self).items()}
        return {
            "kind": self.kind,
            "settings": settings | {"bias": self.bias is not None},
            "parts": [[part.in_channels, part.out_channels, part.groups] for part in self._convolutions],
            "tables": [self.inputs is not None, self.outputs is not None],
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BlockConv:
        """A convolution of these sizes, not filled."""
        given = description["settings"].items()
        settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given}
        if settings.keys() != {*_SETTINGS, "bias"}:
            came = ", ".join(settings)[:200]
            raise InvalidOption(f"expected the settings {', '.join(_SETTINGS)} and bias, got {came}")
        conv = _KINDS[description["kind"]](**settings, device="meta")
        check_reach(conv)
        parts = [
            _like(conv, in_channels=inputs, out_channels=outputs, groups=groups, bias=False)
            for inputs, outputs, groups in description["parts"]
        ]
        sizes = zip((sum(part.in_channels for part in parts), conv.out_channels), description["tables"], strict=True)
        return cls(conv, parts, *(torch.empty(size, dtype=torch.int64) if held else None for size, held in sizes))

    def index_limits(self) -> dict[str, int]:
        """What the entries of each index table must stay below."""
        limits = {"inputs": self.in_channels, "outputs": self._placed + (self._placed < self.out_channels)}
        return {name: limit for name, limit in limits.items() if getattr(self, name) is not None}

    @property
    def _placed(self) -> int:
        """Output channels that belong to a block."""
        return sum(part.out_channels for part in self._convolutions)

    @property
    def _convolutions(self) -> list[Convolution]:
        return [part for part in self.parts if isinstance(part, Convolution)]

    @property
    def n_blocks(self) -> int:
        return sum(part.groups for part in self._convolutions)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per output position."""
        return sum(part.weight.numel() for part in self._convolutions)

    @property
    def weight(self) -> Tensor:
        """The original's weight, built when asked; gradients flow back to the blocks."""
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        dense = self.empty.new_zeros(shape)
        everything = torch.arange(max(self.in_channels, self.out_channels), device=self.empty.device)
        placed = (
            everything if self.outputs is None else torch.argsort(self.outputs)
        )  # of the parts' outputs; dormant last
        reads = everything if self.inputs is None else self.inputs
        row = column = 0
        for part in self._convolutions:
            for block in part.weight.chunk(part.groups):
                rows = placed[row : row + block.shape[0]]
                cols = reads[column : column + block.shape[1]] % shape[1]  # a block lies in one group
                dense[rows[:, None], cols[None, :]] = block
                row, column = row + block.shape[0], column + block.shape[1]
        return dense

    def to_dense(self) -> Convolution:
        """The original convolution with zeros between the blocks, bit for bit what they were cut from."""
        dense = _like(self, bias=self.bias is not None).to_empty(device=self.empty.device)
        with torch.no_grad():
            dense.weight.copy_(self.weight)
            if self.bias is not None and dense.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        spatial = len(self.kernel_size)
        channel = x.ndim - spatial - 1  # 0 without a batch
        if channel not in (0, 1) or x.shape[channel] != self.in_channels:
            raise InvalidMatrix(f"expected {self.in_channels} channels and {spatial} axes, got shape {tuple(x.shape)}")
        if channel and can_run_compiled(x, self) and x.is_contiguous():
            convolving = self._convolving
            if convolving.key != self._key(x) or not convolving.unchanged(self.outputs):
                kept = Convolving(self, self._key(x), outputs=self.outputs)  # that PyTorch is to do it
                convolving = self._convolving = self._planned(x) if self._runs_compiled(x) else kept
            if convolving.ready:
                y = convolving.run(x)
                return y.squeeze(2) if spatial == 1 else y
        made, column, row = [], 0, 0
        for part in self._convolutions:  # each gathers its own channels: a slice of all would be copied again
            given = self._given(x, channel, column, part.in_channels)
            for name in _CHANGING:
                if getattr(part, name) != getattr(self, name):
                    setattr(part, name, getattr(self, name))
            made.append(part._conv_forward(given, part.weight, self._bias_in_order(row, part.out_channels)))
            column, row = column + part.in_channels, row + part.out_channels
        dormant = self.out_channels - row
        if dormant:
            positions = made[0].shape[channel + 1 :] if made else self._positions(x.shape[channel + 1 :])
            count = dormant if self.outputs is None else 1
            silent, bias = x.new_zeros(*x.shape[:channel], count, *positions), self._bias_in_order(row, dormant)
            made.append(silent if bias is None else silent + bias.view(-1, *[1] * spatial))
        y = made[0] if len(made) == 1 else torch.cat(made, channel)
        if self.outputs is None:
            return y
        y = y.index_select(channel, self.outputs)
        return y if self.bias is None else y + self.bias.to(y.dtype).view(-1, *[1] * spatial)

    def _runs_compiled(self, x: Tensor) -> bool:
        """Whether the kernel can compute this, and is expected to be faster than PyTorch's grouped convolutions.

        For several samples at a time those are faster from half as many channels of a block on.
        """
        tensors = [x, *(part.weight for part in self._convolutions), *([] if self.bias is None else [self.bias])]
        inputs = sum(part.in_channels for part in self._convolutions)
        return (
            self.n_blocks > 0
            and inputs <= (self.in_channels if self.inputs is None else len(self.inputs))  # else PyTorch refuses it
            and self._placed <= self.out_channels
            and kernel_fits(self, inputs / self.n_blocks * (1 if len(x) == 1 else 2))
            and not any(is_parametrized(part) for part in self._convolutions)  # their weights are made at each call
            and all(t.is_contiguous() and t.dtype == x.dtype and t.device == x.device for t in tensors)
            and min(*x.shape, *self._positions(x.shape[2:])) > 0
        )

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        """What a plan to convolve depends on, beside tensors."""
        return x.shape, x.dtype, self.padding, self.dilation, self.stride, self.padding_mode

    def _planned(self, x: Tensor) -> Convolving:
        """How the kernel computes `forward` of inputs like this one."""
        same = tuple(d * (k - 1) // 2 for k, d in zip(self.kernel_size, self.dilation, strict=True))
        named = {"same": same, "valid": (0,) * len(same)}
        padding = named[self.padding] if isinstance(self.padding, str) else self.padding
        weights, key, dilation = [part.weight for part in self._convolutions], self._key(x), self.dilation
        if len(self.kernel_size) == 1:  # an image of one row
            x, weights = x.unsqueeze(2), [weight.unsqueeze(2) for weight in weights]
            padding, dilation = (0, *padding), (1, *dilation)
        order = torch.arange(max(self.in_channels, self.out_channels))
        return Convolving(
            self, key, x, weights, [part.groups for part in self._convolutions],
            order if self.inputs is None else self.inputs,
            order[: self.out_channels] if self.outputs is None else torch.argsort(self.outputs, stable=True),
            self.outputs, self.bias, self.out_channels, padding, dilation,
        )  # fmt: skip

    def _given(self, x: Tensor, channel: int, first: int, count: int) -> Tensor:
        if self.inputs is None:
            return x if count == self.in_channels else x.narrow(channel, first, count)
        return x.index_select(channel, self.inputs[first : first + count])

    def _bias_in_order(self, first: int, count: int) -> Tensor | None:
        """The bias of some channels where they come in order; otherwise all of it is added at the end."""
        return None if self.bias is None or self.outputs is not None else self.bias[first : first + count]

    def _positions(self, size: torch.Size) -> list[int]:
        """Output positions along each axis, for a convolution without a block to ask."""
        if self.padding == "same":
            return list(size)
        padding = (0,) * len(size) if isinstance(self.padding, str) else self.padding  # "valid"
        axes = zip(size, padding, self.dilation, self.kernel_size, self.stride, strict=True)
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in axes]

    def extra_repr(self) -> str:
        channels = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        dense_macs = self.in_channels // self.groups * self.out_channels * math.prod(self.kernel_size)
        return f"{channels}, blocks={self.n_blocks}, {self.macs} of {dense_macs} multiply-adds per position"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


def kernel_fits(conv: Convolution | BlockConv, channels: float) -> bool:
    """Whether blocks that read so many channels each are best computed by our own kernel."""
    return (
        channels < _FEW_CHANNELS
        and len(conv.kernel_size) < 3
        and all(step == 1 for step in conv.stride)
        and conv.padding_mode == "zeros"
        and not (conv.padding == "same" and any(k % 2 == 0 for k in conv.kernel_size))  # more zeros on one side
    )


def check_reach(conv: nn.Module) -> None:
    """Refuse a described convolution that would pad a sample to more than a million positions: it would take gigabytes.

    >>> check_reach(nn.Conv2d(3, 4, 3, padding=3000))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: expected a convolution that pads to at most 1048576 positions, got padding
    (3000, 3000) and dilation (1, 1) of a kernel (3, 3)
    """
    assert isinstance(conv, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    padding = conv.padding if isinstance(conv.padding, tuple) else (0,) * len(conv.kernel_size)
    reach = [max(p, d * (k - 1)) for p, d, k in zip(padding, conv.dilation, conv.kernel_size, strict=True)]
    if math.prod(1 + 2 * each for each in reach) > MOST_POSITIONS:
        came = f"padding {conv.padding} and dilation {conv.dilation} of a kernel {conv.kernel_size}"
        raise InvalidOption(f"expected a convolution that pads to at most {MOST_POSITIONS} positions, got {came}")


def _check_kind(conv: object) -> None:
    if type(conv) not in _KINDS.values():  # a subclass may compute something else
        raise InvalidOption(f"conv: expected nn.{', nn.'.join(_KINDS)}, got {type(conv).__name__}")


def _settings(conv: Convolution | BlockConv) -> dict[str, Any]:
    return {name: getattr(conv, name) for name in _SETTINGS}


def _like(conv: Convolution | BlockConv, **changes: Any) -> Convolution:
    """The same convolution up to some settings, its weight not filled."""
    kind = _KINDS[conv.kind if isinstance(conv, BlockConv) else type(conv).__name__]
    dtype = conv.empty.dtype if isinstance(conv, BlockConv) else conv.weight.dtype
    return kind(**(_settings(conv) | changes), device="meta", dtype=dtype)


def _columns_in_group(conv: Convolution, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Where the input channels of a block lie in the rows of a grouped weight."""
    width = conv.in_channels // conv.groups
    groups = np.unique(np.concatenate([rows // (conv.out_channels // conv.groups), cols // width]))
    if len(groups) > 1:
        raise InvalidMatrix(
            f"structure: the block of output channel {rows[0]} joins the groups {groups.tolist()} of the convolution, "
            "which must stay apart"
        )
    return cols % width


def _shape(block: Block) -> tuple[int, int]:
    return len(block[0]), len(block[1])


def _arranged(blocks: list[Block]) -> list[Block]:
    """Blocks in the order that leaves the least to move: by shape, unless by first channel a table is not needed."""

    def moves(order: list[Block]) -> int:
        return sum(not _in_order(_joined(order, side)) for side in (0, 1))

    orders = [sorted(blocks, key=_shape, reverse=True), *(sorted(blocks, key=lambda b: b[s][0]) for s in (0, 1))]
    return min(orders, key=moves)


def _in_order(indices: np.ndarray) -> bool:
    return bool((indices == np.arange(len(indices))).all())


def _joined(blocks: list[Block], side: int) -> np.ndarray:
    """Rows (side 0) or columns (1), block after block."""
    return np.concatenate([block[side] for block in blocks]) if blocks else np.zeros(0, np.intp)
