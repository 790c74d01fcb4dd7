"""`BlockLinear`: a linear layer as its independent blocks, behind the interface of `nn.Linear`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.arrays import as_matrix
from crystallite.core.errors import InvalidMatrix
from crystallite.operators.blocks import Blocks
from crystallite.operators.runtime.engine import (
    Block,
    Plan,
    Stage,
    array,
    as_rows,
    can_plan,
    can_run_compiled,
    cut,
    in_order,
    joined,
    products,
    run,
)
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.directed import DirectedStructure

__all__ = ["BlockLinear"]


class BlockLinear(Blocks):
    """y = Wx + b computed as permutation → projection → parallel sub-operators → embedding → inverse permutation.

    Holds the blocks, the bias in its original order and two index tables: O(rows + cols) beside the blocks. A table
    that would say 0, 1, 2, … is not held, and nothing is moved for it. Consecutive blocks of equal shape are one
    batched product. Dormant outputs emit their bias, dormant inputs are not read.

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

    rows_table = "outputs"
    outputs: Tensor | None  # (out_features,) place of each output among the rows of all blocks, past them: dormant

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weights: list[Tensor],
        columns: Tensor | None,
        outputs: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """See `Blocks` for what is held, and `from_dense` for how it is made."""
        super().__init__(in_features, out_features, weights, columns, outputs, bias, dtype, device)
        self._plan = Plan()

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None, structure: BipartiteStructure) -> BlockLinear:
        """The blocks of a weight matrix; what lies outside them is dropped, so pass the annealed weight."""
        as_matrix(weight, "weight")
        if tuple(weight.shape) != structure.shape:
            raise InvalidMatrix(
                f"weight: expected shape {structure.shape}, as the structure has, got {tuple(weight.shape)}"
            )
        return cls.from_blocks(weight, bias, structure.blocks)

    @classmethod
    def from_blocks(cls, weight: Tensor, bias: Tensor | None, blocks: Sequence[Block]) -> BlockLinear:
        """The given (rows, columns) of a weight matrix. No row may be in two blocks; a column may be in several."""
        as_matrix(weight, "weight")  # what reads nothing emits its bias: its block is left out
        return cls._in_this_order(weight, bias, _arranged([block for block in blocks if len(block[1])]))

    @classmethod
    def from_directed(cls, weight: Tensor, bias: Tensor | None, structure: DirectedStructure) -> BlockLinear:
        """Y = WX with a square W in Frobenius form (eq. 4.4): a row D_ii, U_ij, … for each SCC, in layer order.

        Each block reads its own nodes and those it hears, none twice; what the structure has no edge for is dropped.
        O(Σ |SCC|·(nodes it hears)) multiply-adds. Isolated nodes emit their bias.

        Args:
            weight: (nodes, nodes), annealed: W(i, j) ≠ 0 is the edge j → i.
            bias: (nodes,) or None.
            structure: What `decompose(weight, kind="directed")` found.

        Raises:
            InvalidMatrix: Shapes do not fit.

        Examples:
            >>> from crystallite import decompose
            >>> w = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 5.0, 0.0]])  # 0 ↔ 1 → 2
            >>> layer = BlockLinear.from_directed(w, None, decompose(w, kind="directed"))
            >>> layer, layer(torch.tensor([1.0, 2.0, 3.0])).tolist()
            (BlockLinear(in_features=3, out_features=3, bias=False, blocks=2, 5 of 9 multiply-adds), [2.0, 1.0, 10.0])
        """
        if tuple(weight.shape) != structure.shape:
            raise InvalidMatrix(
                f"weight: expected shape {structure.shape}, as the structure has, got {tuple(weight.shape)}"
            )
        edges = (weight.detach() != 0).cpu()
        blocks = []
        for nodes in structure.blocks:  # in the order of P: by component, then layer
            own = structure.scc[nodes[0]]
            heard = structure.condensation[own][structure.scc] | (structure.scc == own)
            heard &= edges[torch.from_numpy(nodes)].any(0).numpy()
            blocks.append((nodes, structure.P.source[heard[structure.P.source]]))
        return cls._in_this_order(weight, bias, [block for block in blocks if len(block[1])])

    @classmethod
    def _in_this_order(cls, weight: Tensor, bias: Tensor | None, blocks: list[Block]) -> BlockLinear:
        height, width = weight.shape
        if bias is not None and tuple(bias.shape) != (height,):
            raise InvalidMatrix(f"bias: expected shape {(height,)}, got {tuple(bias.shape)}")
        rows, columns = (joined([block[side] for block in blocks]) for side in (0, 1))
        if len(np.unique(rows)) < len(rows):
            raise InvalidMatrix("blocks: expected every row in at most one block")
        outputs = np.full(height, len(rows))
        outputs[rows] = np.arange(len(rows))
        tables = [
            None if in_order(rows) else torch.from_numpy(outputs).to(weight.device),
            None if in_order(columns) else torch.from_numpy(columns).to(weight.device),
        ]
        kept_bias = None if bias is None else bias.detach().clone()
        return cls(width, height, cut(weight, blocks), tables[1], tables[0], kept_bias, weight.dtype, weight.device)

    @property
    def weight(self) -> Tensor:
        """The dense weight these blocks stand for, built when asked; gradients flow back to the blocks."""
        dense = self.empty.new_zeros(self.out_features, self.in_features)
        everything = torch.arange(max(self.out_features, self.reads), device=self.empty.device)
        positions = everything if self.outputs is None else torch.argsort(self.outputs)  # dormant ones last
        reads = everything if self.columns is None else self.columns
        row = column = 0
        for stack in self.weights:
            count, height, width = stack.shape
            rows = positions[row : row + count * height].view(count, height, 1)
            cols = reads[column : column + count * width].view(count, 1, width)
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
        if can_run_compiled(x, self, halves=True):
            plan = self._plan if self._plan.valid() else self._planned(x)
            if plan.takes(x):
                return run(plan, x)
        flat = as_rows(x)
        read = flat.narrow(1, 0, self.reads) if self.columns is None else flat.index_select(1, self.columns)
        if self.outputs is None:  # the rows come in order, dormant ones last
            y = products(read.t(), self.weights, self.bias, self.out_features).t()
        else:
            rows = products(read.t(), self.weights, None, min(self.writes + 1, self.out_features))
            y = rows.t().index_select(1, self.outputs)
            y = y if self.bias is None else y + self.bias.to(y.dtype)  # autocast makes products of another dtype
        return y.reshape(*x.shape[:-1], self.out_features)

    def _planned(self, x: Tensor) -> Plan:
        self._plan = Plan()
        if can_plan(self, x):
            stage = Stage([array(w) for w in self.weights], array(None, self.empty), array(self.columns))
            ends = array(self.outputs), array(self.bias, self.empty), self.in_features, self.out_features
            self._plan = Plan(self, [stage], *ends)
        return self._plan

    @property
    def _most_rows(self) -> int:
        return self.writes + 1  # past them: dormant

    def extra_repr(self) -> str:
        cost = f"{self.macs} of {self.in_features * self.out_features} multiply-adds"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"blocks={self.n_blocks}, {cost}"
        )

    def __repr__(self) -> str:  # the blocks are tensors, not modules: one line says it all
        return f"{type(self).__name__}({self.extra_repr()})"


def _arranged(blocks: list[Block]) -> list[Block]:
    """In the order of their rows or columns where that saves a gather, else with blocks of equal shape together."""

    def gathers(order: list[Block]) -> int:
        return sum(not in_order(joined([block[side] for block in order])) for side in (0, 1))

    orders = [
        sorted(blocks, key=lambda b: (-len(b[0]), -len(b[1]))),
        sorted(blocks, key=lambda b: b[0][0]),
        sorted(blocks, key=lambda b: b[1][0]),
    ]
    return min(orders, key=gathers)
