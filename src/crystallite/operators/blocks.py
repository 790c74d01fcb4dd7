"""What every layer of blocks holds, and how it is stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.operators.runtime.engine import empty_blocks

__all__ = ["Blocks", "block_lines", "chosen_blocks"]


def block_lines(stacks: Iterable[Tensor], side: int) -> list[np.ndarray]:
    """For each block of stacks (blocks, rows, columns) which of all blocks' rows (side 0) or columns (1) are its own.

    >>> block_lines([torch.zeros(2, 3, 1), torch.zeros(1, 2, 2)], 0)
    [array([0, 1, 2]), array([3, 4, 5]), array([6, 7])]
    """
    sizes = [stack.shape[1 + side] for stack in stacks for _ in range(len(stack))]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if sizes else []


def chosen_blocks(stacks: Iterable[Tensor], blocks: Sequence[int]) -> list[Tensor]:
    """Copies of some blocks of stacks, consecutive ones of equal shape as one stack; others are not read.

    >>> [tuple(s.shape) for s in chosen_blocks([torch.zeros(2, 3, 1), torch.zeros(1, 2, 2)], [0, 1, 2])]
    [(2, 3, 1), (1, 2, 2)]
    """
    views = [block.detach() for stack in stacks for block in stack]
    runs = groupby((views[block] for block in blocks), key=lambda view: view.shape)
    return [torch.stack(list(run)) for _, run in runs]


class Blocks(nn.Module):
    """The blocks of one matrix, its bias, what the columns read, and a table that says what the rows are."""

    rows_table: ClassVar[str]  # its name; (out_features,) indices

    empty: Tensor
    columns: Tensor | None  # what each column of the blocks reads, block after block; None: the first, in order

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weights: list[Tensor],
        columns: Tensor | None,
        rows: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weights = nn.ParameterList(weights)  # (blocks, rows, columns) for each run of equal blocks
        self.bias = None if bias is None else nn.Parameter(bias)
        # dtype and device, even without blocks
        empty = weights[0].detach().new_empty(0) if weights else torch.empty(0, dtype=dtype, device=device)
        self.register_buffer("empty", empty, persistent=False)
        self.register_buffer("columns", columns)
        self.register_buffer(self.rows_table, rows)

    @property
    def n_blocks(self) -> int:
        return sum(len(w) for w in self.weights)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(w.numel() for w in self.weights)

    @property
    def reads(self) -> int:
        """Columns of all blocks."""
        return sum(w.shape[0] * w.shape[2] for w in self.weights)

    @property
    def copies(self) -> int:
        """Columns that read an input which an earlier column reads too."""
        return 0 if self.columns is None else len(self.columns) - len(self.columns.unique())

    @property
    def writes(self) -> int:
        """Rows of all blocks."""
        return sum(w.shape[0] * w.shape[1] for w in self.weights)

    def describe(self) -> dict[str, Any]:
        """All that is needed to rebuild the layer around its tensors, as plain values."""
        return {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "stacks": [list(w.shape) for w in self.weights],
            "columns": self.columns is not None,
            self.rows_table: getattr(self, self.rows_table) is not None,
            "bias": self.bias is not None,
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Self:
        """A layer of that shape whose tensors are not filled."""
        columns, rows = int(description["in_features"]), int(description["out_features"])
        stacks = empty_blocks(description["stacks"], rows, None if description["columns"] else columns)
        reads = sum(w.shape[0] * w.shape[2] for w in stacks)
        return cls(
            columns,
            rows,
            stacks,
            torch.empty(reads, dtype=torch.long) if description["columns"] else None,
            torch.empty(rows, dtype=torch.long) if description[cls.rows_table] else None,
            torch.empty(rows) if description["bias"] else None,
        )

    def index_limits(self) -> dict[str, int]:
        """What the values of each index table must stay below."""
        limits = {"columns": self.in_features, self.rows_table: self._most_rows}
        return {name: limit for name, limit in limits.items() if getattr(self, name) is not None}

    @property
    def _most_rows(self) -> int:
        return self.out_features
