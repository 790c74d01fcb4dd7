"""Blocks with a coupling channel: what joins the blocks runs beside them, as a low-rank product or a border of hubs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.arrays import as_matrix
from crystallite.errors import InvalidMatrix
from crystallite.operators.linear import BlockLinear
from crystallite.structure.hubs import BorderedStructure

__all__ = ["BorderedLinear", "CoupledLinear"]


class _Coupled(nn.Module, ABC):
    """What both couplings share: blocks that also hold the bias, and the interface of `nn.Linear`."""

    def __init__(self, blocks: BlockLinear) -> None:
        super().__init__()
        self.blocks = blocks

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
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return self.blocks.macs + self._coupling_macs

    @property
    @abstractmethod
    def _coupling_macs(self) -> int: ...

    @property
    @abstractmethod
    def weight(self) -> Tensor: ...

    def to_dense(self) -> nn.Linear:
        """The layer as one `nn.Linear`."""
        with torch.no_grad():
            weight = self.weight
            dense = nn.Linear(self.in_features, self.out_features, self.bias is not None, weight.device, weight.dtype)
            dense.weight.copy_(weight)
            if self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    @abstractmethod
    def extra_repr(self) -> str: ...

    def __repr__(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        cost = f"{self.macs} of {self.in_features * self.out_features} multiply-adds"
        return f"{type(self).__name__}({size}, blocks={self.n_blocks}, {self.extra_repr()}, {cost})"


class CoupledLinear(_Coupled):
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
        super().__init__(blocks)
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
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def _coupling_macs(self) -> int:
        return self.up.numel() + self.down.numel()

    @property
    def weight(self) -> Tensor:
        """B + UV, built when asked; gradients flow back to the parts."""
        return self.blocks.weight.to(self.up) + self.up @ self.down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y + F.linear(F.linear(x, self.down), self.up)

    def extra_repr(self) -> str:
        return f"rank={self.rank}"


class BorderedLinear(_Coupled):
    """y = Wx + b for a matrix of blocks once its hubs are set aside: hub rows and hub columns run as dense borders.

    A hub row reads all inputs, a hub column reaches all outputs; where both meet, the row holds the weight.

    >>> from crystallite import hubs
    >>> w = torch.zeros(7, 6)
    >>> w[:3, :3] = w[3:6, 3:] = w[6] = 1
    >>> layer = BorderedLinear.from_dense(w, None, hubs(w))
    >>> layer
    BorderedLinear(in_features=6, out_features=7, bias=False, blocks=2, hubs=1 row + 0 columns, 24 of 42 multiply-adds)
    >>> layer(torch.ones(6)).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 6.0]
    >>> torch.equal(layer.to_dense().weight, w)
    True
    """

    hubs: Tensor  # (hub columns,) their input positions
    outputs: Tensor  # (out_features,) place of each output among the border's: the others first, then the hub rows

    def __init__(self, blocks: BlockLinear, rows: Tensor, columns: Tensor, hubs: Tensor, outputs: Tensor) -> None:
        super().__init__(blocks)
        self.rows = nn.Parameter(rows)  # (hub rows, in_features)
        self.columns = nn.Parameter(columns)  # (out_features − hub rows, hub columns)
        self.register_buffer("hubs", hubs)
        self.register_buffer("outputs", outputs)

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None, bordered: BorderedStructure) -> BorderedLinear:
        """The blocks and the border of a weight matrix; what lies outside both is dropped."""
        structure = bordered.structure
        for side, hubs, block in (
            ("row", bordered.hub_rows, structure.row_block),
            ("column", bordered.hub_cols, structure.col_block),
        ):
            inside = hubs[block[hubs] >= 0]
            if len(inside):  # its weights would count twice
                raise InvalidMatrix(f"bordered: hub {side} {inside[0]} must be dormant in the inner structure")
        blocks = BlockLinear.from_dense(weight, bias, structure)
        others = np.setdiff1d(np.arange(blocks.out_features), bordered.hub_rows)
        order = np.concatenate([others, bordered.hub_rows])
        hub_columns = torch.from_numpy(bordered.hub_cols.copy())
        rows = weight.detach()[torch.from_numpy(bordered.hub_rows.copy())]
        columns = weight.detach()[torch.from_numpy(others)][:, hub_columns]
        outputs = torch.from_numpy(np.argsort(order, kind="stable"))
        return cls(blocks, rows, columns, hub_columns.to(weight.device), outputs.to(weight.device))

    def describe(self) -> dict[str, Any]:
        """The blocks and the number of hubs, without weights and tables."""
        return {"blocks": self.blocks, "hub_rows": len(self.rows), "hub_columns": len(self.hubs)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BorderedLinear:
        """A layer of these sizes, not filled."""
        blocks, rows, columns = (description[name] for name in ("blocks", "hub_rows", "hub_columns"))
        return cls(
            blocks,
            torch.empty(rows, blocks.in_features),
            torch.empty(blocks.out_features - rows, columns),
            torch.empty(columns, dtype=torch.int64),
            torch.empty(blocks.out_features, dtype=torch.int64),
        )

    def index_limits(self) -> dict[str, int]:
        """What the entries of each index table must stay below; the blocks know the limits of their own."""
        return {"hubs": self.in_features, "outputs": self.out_features}

    @property
    def n_hubs(self) -> int:
        return len(self.rows) + len(self.hubs)

    @property
    def _coupling_macs(self) -> int:
        return self.rows.numel() + self.columns.numel()

    @property
    def weight(self) -> Tensor:
        """The dense weight these parts stand for, built when asked; gradients flow back to the parts."""
        order = torch.argsort(self.outputs)
        others, hub_rows = order[: len(self.columns)], order[len(self.columns) :]
        with_columns = self.blocks.weight.to(self.rows).index_put((others[:, None], self.hubs[None, :]), self.columns)
        return with_columns.index_put((hub_rows,), self.rows)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        border = F.linear(x.index_select(-1, self.hubs), self.columns)
        if len(self.rows):
            border = torch.cat([border, F.linear(x, self.rows)], -1).index_select(-1, self.outputs)
        return y + border

    def extra_repr(self) -> str:
        r, c = len(self.rows), len(self.hubs)
        return f"hubs={r} row{'s' * (r != 1)} + {c} column{'s' * (c != 1)}"
