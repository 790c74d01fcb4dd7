"""What a feed-forward matrix falls into: blocks of rows and columns with nothing between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crystallite.core.drawing import Drawing
from crystallite.core.maps import Permutation
from crystallite.core.tables import Table
from crystallite.structure.channels import Array, Channels
from crystallite.structure.figures import bipartite_figure

__all__ = ["BipartiteStructure"]


@dataclass(frozen=True, eq=False, repr=False)
class BipartiteStructure(Channels):
    """Blocks of a feed-forward matrix (eq. 4.6), numbered by their first row; −1 marks dormant rows and columns.

    >>> s = BipartiteStructure.from_labels(np.array([7, -1, 7, 2]), np.array([2, 7, -1]))
    >>> s
    BipartiteStructure(4×3: 2 blocks, largest 2×1, dormant 1 row and 1 column)
    >>> s.blocks[0]
    (array([0, 2]), array([1]))
    """

    row_block: np.ndarray  # (rows,) block of each row
    col_block: np.ndarray  # (cols,)
    n_blocks: int

    @classmethod
    def from_labels(cls, row_label: np.ndarray, col_label: np.ndarray) -> BipartiteStructure:
        """From any labels that rows and columns of a block share (negative: dormant)."""
        rows, cols = np.asarray(row_label), np.asarray(col_label)
        most = int(max(rows.max(initial=-1), cols.max(initial=-1))) + 1
        first = np.full(most + 1, len(rows))  # the first row of each label; written backwards, so the first stays
        first[rows[::-1]] = np.arange(len(rows))[::-1]
        first[-1] = len(rows)  # where −1 points: dormant
        names = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(rows))]
        number = np.full(most + 1, -1, np.intp)
        number[names] = np.arange(len(names))
        row_block, col_block = number[rows], number[cols]
        row_block.flags.writeable = col_block.flags.writeable = False
        return cls(row_block, col_block, len(names))

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.row_block), len(self.col_block)

    @cached_property
    def P(self) -> Permutation:
        """Row permutation: blocks in order, then the dormant rows."""
        return Permutation(_grouped(self.row_block, self.n_blocks))

    @cached_property
    def Q(self) -> Permutation:
        """Column permutation: blocks in order, then the dormant columns. `P @ W @ Q.T` is block diagonal."""
        return Permutation(_grouped(self.col_block, self.n_blocks))

    @property
    def channel_shapes(self) -> np.ndarray:
        """(m, 2): the blocks are the sub-operators."""
        return self.block_shapes

    @cached_property
    def block_shapes(self) -> np.ndarray:
        """(n_blocks, 2): rows and columns of each block."""
        return np.column_stack(
            [np.bincount(side[side >= 0], minlength=self.n_blocks) for side in (self.row_block, self.col_block)]
        )

    @cached_property
    def blocks(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Row and column indices of each block, ascending."""
        ends = self.block_shapes.cumsum(0)
        rows = np.split(self.P.source.copy(), ends[:, 0])[: self.n_blocks]  # copies: torch warns of read-only indices
        cols = np.split(self.Q.source.copy(), ends[:, 1])[: self.n_blocks]
        return list(zip(rows, cols, strict=True))

    @property
    def R_Y(self) -> np.ndarray:
        """(n_blocks, rows) Boolean: which rows are in each co-source class (definition 7.2), zero classes left out."""
        return self.row_block == np.arange(self.n_blocks)[:, None]

    @property
    def D_Y(self) -> np.ndarray:
        """(n_blocks, cols) Boolean: Dom(Y_s), the columns that each class reads (theorem 7.2): R_Y ⊙ M."""
        return self.col_block == np.arange(self.n_blocks)[:, None]

    @cached_property
    def dormant_rows(self) -> np.ndarray:
        """Rows without an edge: they emit their bias only."""
        return np.flatnonzero(self.row_block < 0)

    @cached_property
    def dormant_cols(self) -> np.ndarray:
        """Columns without an edge: inputs that nothing reads."""
        return np.flatnonzero(self.col_block < 0)

    @property
    def largest_share(self) -> float:
        """Rows and columns in the largest block as a share of all; 0 where there is no block."""
        return float(self.block_shapes.sum(1).max(initial=0)) / max(1, sum(self.shape))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the blocks as dense products (the whole matrix costs rows · cols)."""
        return int(self.block_shapes.prod(1).sum())

    def tables(self) -> tuple[Table, Table]:
        """The paper's tables Y and X ⟨Index, SubGroup, NewIndex⟩ (section 7.2), sorted by NewIndex, counted from 1.

        A row without an edge is a co-source class of its own, so it takes a number before it joins the zero
        block k + 1; SubGroup labels may therefore skip (1, 3, 5, 6 in the paper's example).
        """
        starts_class = self.row_block < 0
        first_of_block = np.array([rows[0] for rows, _ in self.blocks], np.intp)
        starts_class[first_of_block] = True
        class_number = starts_class.cumsum()
        label = np.append(class_number[first_of_block], class_number[-1:].sum() + 1)  # last: the zero block
        return tuple(  # type: ignore[return-value]
            Table(
                ("Index", "SubGroup", "NewIndex"),
                np.column_stack([order.source + 1, label[side[order.source]], np.arange(1, len(side) + 1)]),
            )
            for side, order in ((self.row_block, self.P), (self.col_block, self.Q))
        )

    def plot(self, w: Array | None = None) -> Drawing:
        """A picture of PWQᵀ: the blocks on its diagonal, the zero block last, new and old numbers of small matrices.

        Args:
            w: The matrix, for the shades of its entries; without it only the blocks are outlined.

        Returns:
            A drawing with `svg()`, `png()`, `save(path)` and a text alternative; notebooks show it.
        """
        return bipartite_figure(self, w)

    def _repr_html_(self) -> str:
        return self.plot().svg()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BipartiteStructure):
            return NotImplemented
        return np.array_equal(self.row_block, other.row_block) and np.array_equal(self.col_block, other.col_block)

    @property
    def _size(self) -> str:
        return f"{self.shape[0]}×{self.shape[1]}"

    def __repr__(self) -> str:
        blocks = f"{self.n_blocks} block{'s' * (self.n_blocks != 1)}"
        if self.n_blocks:
            rows, cols = self.block_shapes[self.block_shapes.sum(1).argmax()]
            blocks += f", largest {rows}×{cols}"
        r, c = len(self.dormant_rows), len(self.dormant_cols)
        dormant = f"dormant {r} row{'s' * (r != 1)} and {c} column{'s' * (c != 1)}"
        return f"BipartiteStructure({self._size}: {blocks}, {dormant})"


def _grouped(block: np.ndarray, n_blocks: int) -> np.ndarray:
    """Positions by block, dormant last, ascending inside."""
    return np.argsort(np.where(block < 0, n_blocks, block), kind="stable")
