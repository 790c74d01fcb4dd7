"""Blocks that are joined by hubs: a few outputs that read all inputs, and a few inputs that all outputs read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from crystallite.compression.operator_specs import Blocks, OperatorSpec, block_weights
from crystallite.statistics.regression import Regression
from crystallite.structure.decompose import decompose
from crystallite.structure.hubs import hubs

__all__ = ["own_shape", "with_hubs"]

_ROUNDS = 4
_FULL = 0.9  # of the weights nonzero: no blocks worth looking for

Sides = tuple[np.ndarray, np.ndarray]  # of outputs and of inputs


def own_shape(weight: Tensor) -> OperatorSpec | None:
    """The blocks that the nonzeros of a weight already form, maybe once a few hubs are set aside; None: they are one.

    >>> [(rows.tolist(), columns.tolist()) for rows, columns in own_shape(torch.eye(2)).blocks]
    [([0], [0]), ([1], [1])]
    >>> weight = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)); weight[0] = 1
    >>> print(own_shape(weight))
    2 blocks + 1 hub output
    """
    if torch.count_nonzero(weight) > _FULL * weight.numel():
        return None
    structure = decompose(weight, name="weight")
    if structure.n_blocks > 1:
        return OperatorSpec(0, tuple(structure.blocks))
    found = hubs(weight, name="weight")
    inner = found.structure
    return _bordered((inner.row_block, inner.col_block), (found.hub_rows, found.hub_cols)) if found.n_hubs else None


def with_hubs(
    regression: Regression, cells: Blocks, macs: float, rounds: int = _ROUNDS, most: tuple[int, int] | None = None
) -> OperatorSpec:
    """Blocks and those hubs that save most error for their multiply-adds, as many as there is room for.

    macs: of the blocks and the hubs; rounds: in which hubs are chosen, each after the layer has been fitted with those
    chosen before; most: hub outputs and hub inputs that there may be. O(rounds · inputs³ / blocks).
    """
    outputs, inputs = regression.weight.shape
    most = (outputs, inputs) if most is None else most
    labels = np.full(outputs, -1), np.full(inputs, -1)
    for block, cell in enumerate(cells):
        for label, members in zip(labels, cell, strict=True):
            label[members] = block
    left = [np.bincount(label + 1, minlength=len(cells) + 1) for label in labels]  # by block; the first: in none
    chosen: tuple[list[int], list[int]] = ([], [])
    blocks_alone = int(left[0][1:] @ left[1][1:])
    for part in range(1, rounds + 1):
        limit = blocks_alone + (macs - blocks_alone) * part / rounds
        for side, number in _by_worth(regression, _bordered(labels, _sorted(chosen)).blocks):
            if len(chosen[side]) < most[side]:
                chosen[side].append(number)
                left[side][labels[side][number] + 1] -= 1
                rows, columns = map(len, chosen)
                if rows * inputs + (outputs - rows) * columns + left[0][1:] @ left[1][1:] > limit:
                    chosen[side].pop()
                    left[side][labels[side][number] + 1] += 1
                    break
    return _bordered(labels, _sorted(chosen))


def _sorted(chosen: Sequence[list[int]]) -> Sides:
    rows, columns = (np.array(sorted(side), np.intp) for side in chosen)
    return rows, columns


def _bordered(labels: Sides, hubs: Sides) -> OperatorSpec:
    """Blocks by the label of each output and input (−1: in none), and hubs, which leave their blocks."""
    rows, columns = (label.copy() for label in labels)
    rows[hubs[0]] = columns[hubs[1]] = -2
    cells = [
        (np.flatnonzero(rows == block), np.flatnonzero((columns == -2) | ((columns == block) & (block >= 0))))
        for block in range(-1, int(labels[0].max(initial=-1)) + 1)
    ]
    cells.append((hubs[0], np.arange(len(columns))))
    return OperatorSpec(0, tuple(cell for cell in cells if len(cell[0])), hubs=(len(hubs[0]), len(hubs[1])))


def _by_worth(regression: Regression, cells: Blocks) -> Iterator[tuple[int, int]]:
    """(0, output) or (1, input): what would lessen the error most as a hub, for what it costs, before what does less.

    A hub output has no error. A hub input j lessens the error e of an output that reads the columns c by
    (eᵀx_j)² / (M_jj − M_jc M_cc⁻¹ M_cj), where M is the metric.
    """
    own, metric = regression.own, regression.metric
    missing = own - block_weights(own, metric, cells)
    product = missing @ metric
    matters = torch.ones_like(own[:, 0]) if regression.output_factor is None else (regression.output_factor**2).sum(1)
    saved = [matters * (product * missing).sum(1), torch.zeros_like(metric[0])]
    for rows, columns in cells:
        r, c = torch.from_numpy(rows).to(own.device), torch.from_numpy(columns).to(own.device)
        known = torch.linalg.solve_triangular(torch.linalg.cholesky(metric[c][:, c]), metric[c], upper=False)
        new = (metric.diagonal() - (known**2).sum(0)).clamp_min(torch.finfo(torch.float64).tiny)
        gained = (matters[r, None] * product[r] ** 2).sum(0) / new
        gained[c] = 0
        saved[1] += gained
    outputs, inputs = own.shape
    worth = torch.cat([saved[0] / inputs, saved[1] / outputs]).cpu().numpy()
    for number in np.argsort(-worth, kind="stable")[: np.count_nonzero(worth > 0)].tolist():
        yield (0, number) if number < outputs else (1, number - outputs)
