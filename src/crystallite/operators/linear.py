"""`BlockLinear`: a linear layer as its independent blocks, behind the interface of `nn.Linear`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.arrays import as_matrix
from crystallite.errors import InvalidMatrix
from crystallite.structure.bipartite import BipartiteStructure

__all__ = ["BlockLinear"]


class BlockLinear(nn.Module):
    """y = Wx + b computed as permutation → projection → parallel sub-operators → embedding → inverse permutation.

    Holds the blocks, the bias in its original order and two index tables: O(rows + cols) beside the blocks. Blocks of
    equal shape are one batched product. Dormant outputs emit their bias, dormant inputs are not read.

    >>> from crystallite import decompose
    >>> w = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    >>> layer = BlockLinear.from_dense(w, torch.tensor([0.0, 0.0, 5.0]), decompose(w))
    >>> layer
    BlockLinear(in_features=3, out_features=3, bias=True, blocks=2, 3 of 9 multiply-adds)
    >>> layer(torch.tensor([1.0, 1.0, 1.0])).tolist()
    [2.0, 4.0, 5.0]
    >>> torch.equal(layer.to_dense().weight, w)
    True
    """

    empty: Tensor
    columns: Tensor  # (active columns,) input position of each column of the blocks, block after block
    outputs: Tensor  # (out_features,) place of each output among the rows of the blocks; the last place is zero

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weights: list[Tensor],
        columns: Tensor,
        outputs: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weights = nn.ParameterList(weights)  # one (blocks, rows, columns) for each shape of block
        self.bias = None if bias is None else nn.Parameter(bias)
        # dtype and device, even without blocks
        empty = torch.empty(0, dtype=weights[0].dtype if weights else dtype, device=columns.device)
        self.register_buffer("empty", empty, persistent=False)
        self.register_buffer("columns", columns)
        self.register_buffer("outputs", outputs)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None, structure: BipartiteStructure) -> BlockLinear:
        """The blocks of a weight matrix; what lies outside them is dropped, so pass the annealed weight."""
        as_matrix(weight, "weight")
        if tuple(weight.shape) != structure.shape:
            raise InvalidMatrix(
                f"weight: expected shape {structure.shape}, as the structure has, got {tuple(weight.shape)}"
            )
        if bias is not None and tuple(bias.shape) != (structure.shape[0],):
            raise InvalidMatrix(f"bias: expected shape {(structure.shape[0],)}, got {tuple(bias.shape)}")
        blocks = sorted(structure.blocks, key=lambda b: (len(b[0]), len(b[1])), reverse=True)
        weights = [
            torch.stack([weight.detach()[rows][:, cols] for rows, cols in equal])
            for _shape, equal in groupby(blocks, key=lambda b: (len(b[0]), len(b[1])))
        ]
        columns = _joined([cols for _, cols in blocks])
        rows = _joined([rows for rows, _ in blocks])
        outputs = torch.full((structure.shape[0],), len(rows))
        outputs[rows] = torch.arange(len(rows))
        columns, outputs = columns.to(weight.device), outputs.to(weight.device)
        kept_bias = None if bias is None else bias.detach().clone()
        return cls(structure.shape[1], structure.shape[0], weights, columns, outputs, kept_bias, weight.dtype)

    @property
    def n_blocks(self) -> int:
        return sum(len(w) for w in self.weights)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(w.numel() for w in self.weights)

    @property
    def weight(self) -> Tensor:
        """The dense weight these blocks stand for, built when asked; gradients flow back to the blocks."""
        dense = self.empty.new_zeros(self.out_features, self.in_features)
        row = column = 0
        positions = torch.argsort(self.outputs)  # the output of each row of the blocks; dormant ones last
        for stack in self.weights:
            count, height, width = stack.shape
            rows = positions[row : row + count * height].view(count, height, 1)
            cols = self.columns[column : column + count * width].view(count, 1, width)
            dense = dense.index_put((rows, cols), stack)
            row, column = row + count * height, column + count * width
        return dense

    def to_dense(self) -> nn.Linear:
        """The layer as one `nn.Linear` with zeros between the blocks, bit for bit what they were cut from."""
        dense = nn.Linear(
            self.in_features, self.out_features, self.bias is not None, self.empty.device, self.empty.dtype
        )
        with torch.no_grad():
            dense.weight.copy_(self.weight)
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise InvalidMatrix(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        flat = x.reshape(-1, self.in_features).index_select(1, self.columns)  # (batch, active columns)
        parts, start = [], 0
        for stack in self.weights:
            count, rows, cols = stack.shape
            piece = flat[:, start : start + count * cols]
            start += count * cols
            if count == 1:
                parts.append(F.linear(piece, stack[0]))
            else:  # (blocks, batch, cols) × (blocks, cols, rows)
                product = torch.bmm(piece.view(-1, count, cols).transpose(0, 1), stack.transpose(1, 2))
                parts.append(product.transpose(0, 1).reshape(-1, count * rows))
        if not parts or self._has_dormant:
            parts.append(flat.new_zeros(flat.shape[0], 1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        y = joined.index_select(1, self.outputs)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    @property
    def _has_dormant(self) -> bool:
        return sum(w.shape[0] * w.shape[1] for w in self.weights) < self.out_features

    def extra_repr(self) -> str:
        cost = f"{self.macs} of {self.in_features * self.out_features} multiply-adds"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"blocks={self.n_blocks}, {cost}"
        )

    def __repr__(self) -> str:  # the blocks are tensors, not modules: one line says it all
        return f"{type(self).__name__}({self.extra_repr()})"


def _joined(indices: list[np.ndarray]) -> Any:
    return torch.from_numpy(np.concatenate(indices) if indices else np.zeros(0, np.intp))
