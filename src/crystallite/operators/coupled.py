"""Blocks with a coupling channel: what joins the blocks runs beside them, as a low-rank product or a border of hubs."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.arrays import as_matrix
from crystallite.core.errors import InvalidMatrix
from crystallite.operators.linear import BlockLinear
from crystallite.structure.hubs import BorderedStructure

__all__ = ["BorderedLinear", "CoupledLinear"]


class CoupledLinear(nn.Module):
    """y = Bx + U(Vx) + b: independent blocks B, and a channel of rank r through which they hear of each other.

    >>> from crystallite import decompose
    >>> blocks = BlockLinear.from_dense(torch.eye(3), None, decompose(torch.eye(3)))
    >>> layer = CoupledLinear.from_parts(blocks, up=torch.ones(3, 1), down=torch.tensor([[0.0, 0.0, 2.0]]))
    >>> layer
    CoupledLinear(in_features=3, out_features=3, bias=False, blocks=3, rank=1, 9 of 9 multiply-adds)
    >>> layer(torch.tensor([1.0, 2.0, 3.0])).tolist()
    [7.0, 8.0, 9.0]
    """

    def __init__(self, blocks: BlockLinear, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.blocks = blocks  # which also hold the bias
        self.up = nn.Parameter(up)  # (out_features, rank)
        self.down = nn.Parameter(down)  # (rank, in_features)

    @classmethod
    def from_parts(cls, blocks: BlockLinear, up: Tensor, down: Tensor) -> CoupledLinear:
        """Blocks and the two factors; `up` is (out_features, rank), `down` (rank, in_features)."""
        as_matrix(up, "up")
        as_matrix(down, "down")
        rank = up.shape[1]
        if tuple(up.shape) != (blocks.out_features, rank):
            raise InvalidMatrix(f"up: expected {blocks.out_features} rows, as the blocks have, got {tuple(up.shape)}")
        if tuple(down.shape) != (rank, blocks.in_features):
            raise InvalidMatrix(f"down: expected shape {(rank, blocks.in_features)}, got {tuple(down.shape)}")
        dtypes = {t.dtype for t in (up, down, *blocks.parameters())}
        if len(dtypes) > 1:
            raise InvalidMatrix(f"up, down and the blocks: expected one dtype, got {sorted(map(str, dtypes))}")
        return cls(blocks, up.detach().clone(), down.detach().clone())

    def describe(self) -> dict[str, Any]:
        """The blocks and the rank, without weights."""
        return {"blocks": self.blocks, "rank": self.rank}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> CoupledLinear:
        """A layer of these sizes, not filled."""
        blocks, rank = description["blocks"], description["rank"]
        return cls(blocks, torch.empty(blocks.out_features, rank), torch.empty(rank, blocks.in_features))

    def index_limits(self) -> dict[str, int]:
        """Nothing: the blocks have the only index tables, and know their limits."""
        return {}

    @property
    def in_features(self) -> int:
        return self.blocks.in_features

    @property
    def out_features(self) -> int:
        return self.blocks.out_features

    @property
    def bias(self) -> nn.Parameter | None:
        return self.blocks.bias

    @property
    def n_blocks(self) -> int:
        return self.blocks.n_blocks

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return self.blocks.macs + self.up.numel() + self.down.numel()

    @property
    def weight(self) -> Tensor:
        """B + UV, built when asked; gradients flow back to the parts."""
        return self.blocks.weight.to(self.up) + self.up @ self.down

    def to_dense(self) -> nn.Linear:
        """The layer as one `nn.Linear`."""
        with torch.no_grad():
            weight = self.weight
            dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, weight.device, weight.dtype)
            dense.weight.copy_(weight)
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y + F.linear(F.linear(x, self.down), self.up)

    def __repr__(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        cost = f"{self.macs} of {self.in_features * self.out_features} multiply-adds"
        return f"CoupledLinear({size}, blocks={self.n_blocks}, rank={self.rank}, {cost})"


class BorderedLinear(BlockLinear):
    """y = Wx + b for a matrix of blocks once its hubs are set aside.

    A hub column reaches all outputs, so every block reads it too; hub rows read all inputs, and are one more block.

    >>> from crystallite import hubs
    >>> w = torch.zeros(7, 6)
    >>> w[:3, :3] = w[3:6, 3:] = w[6] = 1
    >>> layer = BorderedLinear.from_dense(w, None, hubs(w))
    >>> layer
    BorderedLinear(in_features=6, out_features=7, bias=False, blocks=2, 24 of 42 multiply-adds, hubs=1 row + 0 columns)
    >>> layer(torch.ones(6)).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 6.0]
    >>> torch.equal(layer.to_dense().weight, w)
    True
    """

    inner = 0  # blocks inside the border
    hub_rows = 0
    hub_columns = 0

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None, bordered: BorderedStructure) -> BorderedLinear:  # type: ignore[override]
        """The blocks and the border of a weight matrix; what lies outside both is dropped."""
        inner, rows, columns = bordered.structure, bordered.hub_rows, bordered.hub_cols
        if tuple(weight.shape) != inner.shape:
            raise InvalidMatrix(
                f"weight: expected shape {inner.shape}, as the structure has, got {tuple(weight.shape)}"
            )
        for side, hubs, block in (("row", rows, inner.row_block), ("column", columns, inner.col_block)):
            inside = hubs[block[hubs] >= 0]
            if len(inside):  # its weights would count twice
                raise InvalidMatrix(f"bordered: hub {side} {inside[0]} must be dormant in the inner structure")
        cells = [(own, np.union1d(read, columns)) for own, read in inner.blocks]
        alone = np.setdiff1d(np.flatnonzero(inner.row_block < 0), rows)  # rows that hear of hubs only
        cells += [(some, read) for some, read in ((alone, columns), (rows, np.arange(weight.shape[1]))) if len(some)]
        layer = cls.from_blocks(weight, bias, cells)
        assert isinstance(layer, BorderedLinear)
        layer.inner, layer.hub_rows, layer.hub_columns = inner.n_blocks, len(rows), len(columns)
        return layer

    def describe(self) -> dict[str, Any]:
        """The blocks, and how many of their rows and columns are hubs."""
        hubs = {"inner": self.inner, "hub_rows": self.hub_rows, "hub_columns": self.hub_columns}
        return {**super().describe(), **hubs}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Self:
        """A layer of that shape whose tensors are not filled."""
        layer = super().from_description(description)
        for name in ("inner", "hub_rows", "hub_columns"):
            setattr(layer, name, int(description[name]))
        return layer

    @property
    def n_blocks(self) -> int:
        """Blocks inside the border."""
        return self.inner

    @property
    def n_hubs(self) -> int:
        return self.hub_rows + self.hub_columns

    def extra_repr(self) -> str:
        rows, columns = self.hub_rows, self.hub_columns
        hubs = f"{rows} row{'s' * (rows != 1)} + {columns} column{'s' * (columns != 1)}"
        return f"{super().extra_repr()}, hubs={hubs}"
