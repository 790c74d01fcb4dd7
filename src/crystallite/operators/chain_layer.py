"""One layer of a `BlockChain`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.operators.blocks import Blocks
from crystallite.operators.runtime.engine import Block, Stage, array, cut, in_order, products

__all__ = ["ChainLayer"]


class ChainLayer(Blocks):
    """One layer of a chain: (columns, samples) → (rows, samples), the dormant rows last."""

    rows_table = "neurons"
    neurons: Tensor | None  # the hidden neuron that each row is in the model; None: in order

    @classmethod
    def cut(cls, layer: nn.Linear, blocks: Sequence[Block], rows: np.ndarray, columns: np.ndarray) -> ChainLayer:
        """The blocks of a layer whose rows are these neurons and whose blocks read these lines."""
        weight, device = layer.weight.detach(), layer.weight.device

        def table(indices: np.ndarray) -> Tensor | None:
            return None if in_order(indices) else torch.from_numpy(indices).to(device)

        bias = None if layer.bias is None else layer.bias.detach()[torch.from_numpy(rows).to(device)]
        sizes = (layer.in_features, layer.out_features)
        made = cls(*sizes, cut(weight, blocks), table(columns), table(rows), bias, weight.dtype)
        return made.to(device)

    def forward(self, state: Tensor) -> Tensor:
        read = state.narrow(0, 0, self.reads) if self.columns is None else state.index_select(0, self.columns)
        return products(read, self.weights, self.bias, self.out_features)

    def stage(self, activation: str) -> Stage:
        weights = [array(w) for w in self.weights]
        if self.writes < self.out_features:
            weights.append(array(self.empty).reshape(1, self.out_features - self.writes, 0))
        return Stage(weights, array(self.bias, self.empty), array(self.columns), activation)

    def blocks_of_lines(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of the block that each row, and each column, of the blocks is in."""
        shapes = [w.shape[1:] for w in self.weights for _ in range(len(w))]
        heights, widths = ([shape[side] for shape in shapes] for side in (0, 1))
        return np.repeat(np.arange(len(shapes)), heights), np.repeat(np.arange(len(shapes)), widths)

    def to_dense(self, reads: Tensor, rows: Tensor) -> nn.Linear:
        """The layer whose blocks' columns read these neurons and whose rows are those."""
        return self._filled(reads, rows, self.in_features, self.out_features)

    def part(self, reads: Tensor, rows: Tensor, inputs: np.ndarray, outputs: np.ndarray) -> nn.Linear:
        """The layer between some of the neurons before and some of those after, which no block joins with others."""
        before, after = (torch.full((size,), -1) for size in (self.in_features, self.out_features))
        before[inputs], after[outputs] = torch.arange(len(inputs)), torch.arange(len(outputs))
        return self._filled(before[reads], after[rows], len(inputs), len(outputs))

    def _filled(self, reads: Tensor, rows: Tensor, in_features: int, out_features: int) -> nn.Linear:
        """A layer of that size; blocks of neurons numbered −1 are left out."""
        dense = nn.Linear(in_features, out_features, self.bias is not None, "meta", self.empty.dtype)
        dense = dense.to_empty(device=self.empty.device)
        with torch.no_grad():
            dense.weight.zero_()
            row = column = 0
            for stack in self.weights:
                for block in stack:
                    into, read = rows[row : row + block.shape[0]], reads[column : column + block.shape[1]]
                    if int(into[0]) >= 0:
                        dense.weight[into[:, None], read[None, :]] = block
                    row, column = row + block.shape[0], column + block.shape[1]
            if self.bias is not None:
                dense.bias[rows[rows >= 0]] = self.bias[rows >= 0]
        return dense
