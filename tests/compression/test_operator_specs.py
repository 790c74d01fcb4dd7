"""The modules that stand for a form compute it, for whatever neurons are left."""

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.compression.operator_specs import FittedOperator, OperatorSpec, approximate, block_weights
from crystallite.operators.linear import BlockLinear
from crystallite.operators.low_rank import LowRankLinear
from tests.helpers.tolerance import assert_close

SHARED = (  # outputs 9 to 11 read all inputs, all outputs read input 8
    (np.array([0, 2, 4, 6]), np.array([0, 1, 2, 3, 8])),
    (np.array([1, 3, 5, 7, 8]), np.array([4, 5, 6, 7, 8])),
    (np.array([9, 10, 11]), np.arange(9)),
)
CELLS = tuple((np.arange(i, 12, 3), np.arange(i, 9, 3)) for i in range(3))


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (OperatorSpec(), nn.Linear),
        (OperatorSpec(rank=3), LowRankLinear),
        (OperatorSpec(blocks=CELLS), BlockLinear),
        (OperatorSpec(blocks=SHARED), BlockLinear),
    ],
)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(range(12), range(9)), ([0, 1, 5, 7, 11], [0, 3, 4, 6, 8]), ([4], [4])])
def test_an_operator_computes_its_form(spec, kind, with_bias, rows, columns):
    torch.manual_seed(0)
    weight, factor = torch.randn(12, 9, dtype=torch.float64), torch.randn(9, 20, dtype=torch.float64)
    whole, up, down = approximate(weight, factor @ factor.T, spec)
    form = FittedOperator(spec, whole, torch.randn(12, dtype=torch.float64) * with_bias, 0.0, up, down)
    rows, columns = torch.tensor([*rows]), torch.tensor([*columns])
    operator = form.build(rows, columns, nn.Linear(9, 12, with_bias, dtype=torch.float64))
    assert type(operator) is kind
    x = torch.randn(4, len(columns), dtype=torch.float64)
    assert_close(operator(x), x @ whole[rows][:, columns].T + form.bias[rows])
    whole_size = torch.randn(4, 9, dtype=torch.float64)
    embedded = form.build(rows, columns, nn.Linear(9, 12, with_bias, dtype=torch.float64), embedded=True)
    assert_close(embedded(whole_size)[:, rows], whole_size[:, columns] @ whole[rows][:, columns].T + form.bias[rows])
    if (len(rows), len(columns)) == (12, 9):
        assert sum(p.numel() for p in operator.parameters() if p.ndim > 1) == spec.macs(12, 9, (12, 9))


def positive_definite(size: int) -> torch.Tensor:
    factor = torch.randn(size, 2 * size, dtype=torch.float64)
    return factor @ factor.T / size


@pytest.mark.parametrize(
    "cells",
    [
        CELLS,
        SHARED,
        ((np.array([0, 1]), np.array([2, 3])), (np.array([5]), np.arange(9))),  # most outputs are in no block
        ((np.arange(6), np.arange(9)), (np.arange(6, 12), np.array([], int))),  # nothing is missing, and everything
    ],
)
def test_blocks_under_a_metric_of_the_outputs_solve_the_normal_equations(cells):
    torch.manual_seed(0)
    weight, metric, output_metric = torch.randn(12, 9).double(), positive_definite(9), positive_definite(12)
    inside = torch.zeros(12, 9, dtype=torch.bool)
    for rows, columns in cells:
        inside[torch.from_numpy(rows)[:, None], torch.from_numpy(columns)] = True
    entries = inside.flatten()
    whole = torch.kron(output_metric, metric)  # of all weights, row after row
    expected = torch.zeros(12 * 9).double()
    expected[entries] = torch.linalg.solve(whole[entries][:, entries], (whole @ weight.flatten())[entries])

    def away(found: torch.Tensor) -> float:
        """From the best one, as what it costs."""
        off = found - expected.view(12, 9)
        return float((output_metric @ off @ metric * off).sum())

    found = block_weights(weight, metric, cells, output_metric)
    assert bool((found[~inside] == 0).all())
    assert away(found) <= 1e-5 * away(block_weights(weight, metric, cells))


def test_outputs_that_count_alone_are_fitted_alone():
    torch.manual_seed(0)
    weight, metric = torch.randn(12, 9).double(), positive_definite(9)
    found = block_weights(weight, metric, CELLS, torch.diag(torch.rand(12) + 0.1).double())
    assert_close(found, block_weights(weight, metric, CELLS))
