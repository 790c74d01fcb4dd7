"""The modules that stand for a form compute it, for whatever neurons are left."""

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.compression.operator_specs import FittedOperator, OperatorSpec, approximate
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
