"""What a layer may become: dense, of low rank, or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.operators.conv import Convolution
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank import LowRankConv, LowRankLinear

__all__ = ["Blocks", "FittedOperator", "OperatorSpec", "approximate", "block_weights", "low_rank_factors"]

_STEPS = 40  # of conjugate gradients, at most
_SOLVED = 1e-6  # of what there was to gain at first: not worth another step

Blocks = tuple[tuple[np.ndarray, np.ndarray], ...]  # (rows, columns) of each block; a row is in one of them at most


@dataclass(frozen=True)
class OperatorSpec:
    """What a layer shall be: of a rank, or the blocks it keeps. Neither: dense."""

    rank: int = 0
    blocks: Blocks = ()

    def macs(self, outputs: int, inputs: int, total: tuple[int, int]) -> int:
        """Multiply-adds where this many of `total` (outputs, inputs) are left."""
        if self.rank:
            return self.rank * (outputs + inputs)
        if not self.blocks:
            return outputs * inputs
        inside = sum(len(rows) * len(columns) for rows, columns in self.blocks)
        return round(inside * outputs * inputs / (total[0] * total[1]))

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.rank else f"{len(self.blocks)} blocks" if self.blocks else "dense"


@dataclass(frozen=True)
class FittedOperator:
    """A fitted layer: its weight as one matrix and, for a low rank, the factors."""

    spec: OperatorSpec
    weight: Tensor  # (outputs, inputs) float64, the whole of it
    bias: Tensor  # (outputs,)
    error: float  # share of the variance that it gets wrong on held-out samples
    up: Tensor | None = None  # (outputs, rank)
    down: Tensor | None = None  # (rank, inputs)
    kept: Tensor | None = None  # inputs that it reads; None: all
    repairs: bool = False  # it was fitted to what the layers before it lost of a stream, too
    neurons: tuple[NeuronGroup, Tensor] | None = None  # what these are, and which are left

    def without_outputs(self, rows: Tensor) -> FittedOperator:
        """The same with nothing at some outputs."""
        weight, bias = self.weight.index_fill(0, rows, 0), self.bias.index_fill(0, rows, 0)
        return replace(self, weight=weight, bias=bias, up=None if self.up is None else self.up.index_fill(0, rows, 0))

    def build(self, rows: Tensor, columns: Tensor, like: nn.Module, embedded: bool = False) -> nn.Module:
        """The module that computes it for some outputs and from some inputs, with the dtype and bias of another.

        embedded: it has all outputs and inputs all the same; the others are its bias, and not read.
        """
        if isinstance(like, Convolution):
            return self._convolution(rows, columns, like)
        own: Tensor = like.weight  # type: ignore[assignment]
        bias = self.bias.to(own) if getattr(like, "bias", None) is not None else None
        if self.spec.blocks:
            return self._blocks(self.weight, rows, columns, bias, own, embedded)
        if self.up is None or self.down is None:
            return _part(self.weight.to(own), bias, rows, columns, embedded)
        ranks, mixed = torch.arange(self.spec.rank), _mixing(self.spec.rank).to(self.down)
        first = _part((mixed @ self.down).to(own), None, ranks, columns, embedded)
        return LowRankLinear(first, _part((self.up @ mixed.T).to(own), bias, rows, ranks, embedded))

    def _convolution(self, rows: Tensor, columns: Tensor, like: Convolution) -> nn.Module:
        """A convolution, or one to as many channels as the rank and one of single places after it."""
        bias = None if like.bias is None else self.bias.to(like.weight)[rows]

        def kernels(weight: Tensor) -> Tensor:
            return weight.to(like.weight).view(len(weight), -1, *like.kernel_size)

        settings = {name: getattr(like, name) for name in ("stride", "padding", "dilation", "padding_mode")}
        if self.up is None or self.down is None:
            return _conv(like, kernels(self.weight[rows][:, columns]), bias, settings)
        up = self.up[rows].to(like.weight).view(len(rows), -1, *[1] * len(like.kernel_size))
        return LowRankConv(_conv(like, kernels(self.down[:, columns]), None, settings), _conv(like, up, bias, {}))

    def _blocks(
        self, weight: Tensor, rows: Tensor, columns: Tensor, bias: Tensor | None, own: Tensor, embedded: bool
    ) -> BlockLinear:
        places = [np.full(n, -1) for n in weight.shape]
        for place, left in zip(places, (rows, columns), strict=True):
            numbers = left.cpu().numpy()
            place[numbers] = numbers if embedded else np.arange(len(left))
        cells = [
            tuple(p[side][p[side] >= 0] for p, side in zip(places, cell, strict=True)) for cell in self.spec.blocks
        ]
        kept = [(r, c) for r, c in cells if len(r) and len(c)]
        if not embedded:
            weight, bias = weight[rows][:, columns], None if bias is None else bias[rows]
        return BlockLinear.from_blocks(weight.to(own), bias, kept)


def _mixing(size: int) -> Tensor:
    """An orthogonal matrix: what is handed on in a low rank is mixed, so that no number is much larger than another.

    8-bit integers then have one scale that fits all; the components themselves would fall off by orders of magnitude.
    """
    rng = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64)).Q


def _part(weight: Tensor, bias: Tensor | None, rows: Tensor, columns: Tensor, embedded: bool) -> nn.Module:
    """Some rows and columns of a layer, as a smaller one or in their places."""
    if embedded and (len(rows), len(columns)) != weight.shape:
        return BlockLinear.from_blocks(weight, bias, [(rows.cpu().numpy(), columns.cpu().numpy())])
    return _linear(weight[rows][:, columns], None if bias is None else bias[rows])


def _conv(like: Any, weight: Tensor, bias: Tensor | None, settings: dict[str, Any]) -> Any:
    outputs, inputs, *kernel = weight.shape
    layer = type(like)(
        inputs,
        outputs,
        tuple(kernel),
        bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
        **settings,
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
        if layer.bias is not None and bias is not None:
            layer.bias.copy_(bias)
    return layer


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


def low_rank_factors(weight: Tensor, metric: Tensor, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """The factors (outputs, rank) and (rank, inputs) of what is closest to a weight under a metric, best first.

    Reduced-rank regression: the leading eigenvectors of W M Wᵀ, times what is left of W in them.

    >>> up, down = low_rank_factors(torch.diag(torch.tensor([1.0, 3.0])), torch.eye(2), 1)
    >>> (up @ down).tolist()
    [[0.0, 0.0], [0.0, 3.0]]
    """
    outputs, inputs = weight.shape
    if outputs <= inputs:
        _, vectors = torch.linalg.eigh(weight @ metric @ weight.T)
        up = vectors.flip(1)[:, :rank]
    else:  # the same vectors from the smaller side: the left singular ones of W L with M = LLᵀ
        rooted = weight @ torch.linalg.cholesky(metric)
        _, vectors = torch.linalg.eigh(rooted.T @ rooted)
        up = torch.linalg.qr(rooted @ vectors.flip(1)[:, :rank]).Q
    return up, up.T @ weight


def block_weights(
    weight: Tensor,
    metric: Tensor,
    cells: Sequence[tuple[np.ndarray, np.ndarray]],
    output_metric: Tensor | None = None,
) -> Tensor:
    """The weight with nothing outside its cells that is closest to another one under a metric.

    output_metric: (outputs, outputs) A. Without it every output is fitted by itself; with it tr A (W − V) M (W − V)ᵀ is
    least, so that an output makes good for what outputs of other blocks cannot see. A few steps of conjugate gradients,
    which are exact where A joins no blocks.

    >>> weight, cells = torch.ones(2, 2).double(), [(np.array([i]), np.array([i])) for i in (0, 1)]
    >>> only_sum_counts = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    >>> block_weights(weight, torch.eye(2).double(), cells, only_sum_counts).round(decimals=3).tolist()
    [[1.9, 0.0], [0.0, 1.9]]
    """
    product = weight @ metric
    found = torch.zeros_like(weight)
    factors = []
    for rows, columns in cells:
        r, c = torch.from_numpy(rows).to(weight.device), torch.from_numpy(columns).to(weight.device)
        if not len(r) or not len(c):
            continue
        factor = torch.linalg.cholesky(metric[c][:, c])
        found[r[:, None], c] = torch.cholesky_solve(product[r][:, c].T, factor).T
        if len(c) == len(metric):  # nothing is missing
            found[r] = weight[r]
        factors.append((r[:, None], c, factor))
    return found if output_metric is None else _joined(weight, metric, output_metric, found, factors)


def _joined(
    weight: Tensor, metric: Tensor, output_metric: Tensor, start: Tensor, cells: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """`block_weights` under a metric of the outputs, from the weight whose outputs are fitted one by one."""
    inside = torch.zeros_like(weight)
    for r, c, _ in cells:
        inside[r, c] = 1
    roots = [torch.linalg.cholesky(output_metric[r[:, 0]][:, r[:, 0]]) for r, _, _ in cells]

    def nearly_solved(slope: Tensor) -> Tensor:
        """The solution if the outputs of different blocks had nothing to do with each other."""
        step = torch.zeros_like(slope)
        for (r, c, factor), root in zip(cells, roots, strict=True):
            step[r, c] = torch.cholesky_solve(torch.cholesky_solve(slope[r, c], root).T, factor).T
        return step

    found, slope = start, inside * (output_metric @ (weight - start) @ metric)
    step = direction = nearly_solved(slope)
    size = first = float((slope * step).sum())
    for _ in range(_STEPS):
        if size <= _SOLVED * first or not first > 0:
            break
        change = inside * (output_metric @ direction @ metric)
        length = size / float((direction * change).sum())
        found, slope = found + length * direction, slope - length * change
        step = nearly_solved(slope)
        size, before = float((slope * step).sum()), size
        direction = step + size / before * direction
    return found


def approximate(
    weight: Tensor, metric: Tensor, spec: OperatorSpec, output_metric: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The closest weight of a shape under a metric, with its factors where it has some.

    output_metric: see `block_weights`; a low rank has its outputs whitened instead.

    >>> cells = ((np.array([0]), np.array([0])), (np.array([1]), np.array([1])))
    >>> approximate(torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.eye(2), OperatorSpec(blocks=cells))[0].tolist()
    [[3.0, 0.0], [0.0, 2.0]]
    """
    if not spec.blocks:
        if not spec.rank:
            return weight, None, None
        up, down = low_rank_factors(weight, metric, spec.rank)
        return up @ down, up, down
    return block_weights(weight, metric, spec.blocks, output_metric), None, None
