"""The modules that stand for a form compute it, for whatever neurons are left."""

import numpy as np
import pytest
import torch
from torch import nn

from crystallite.operators.coupling import CoupledLinear
from crystallite.operators.linear import BlockLinear
from crystallite.refitting.forms import Form, Shape, approximate
from tests.operators.tolerance import assert_close

CELLS = tuple((np.arange(i, 12, 3), np.arange(i, 9, 3)) for i in range(3))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        (Shape(), nn.Linear),
        (Shape(rank=3), nn.Sequential),
        (Shape(cells=CELLS), BlockLinear),
        (Shape(2, CELLS), CoupledLinear),
    ],
)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(range(12), range(9)), ([0, 1, 5, 7, 11], [0, 3, 4, 6, 8]), ([4], [4])])
def test_an_operator_computes_its_form(shape, kind, with_bias, rows, columns):
    torch.manual_seed(0)
    weight, factor = torch.randn(12, 9, dtype=torch.float64), torch.randn(9, 20, dtype=torch.float64)
    whole, up, down = approximate(weight, factor @ factor.T, shape)
    form = Form(shape, whole, torch.randn(12, dtype=torch.float64) * with_bias, 0.0, up, down)
    rows, columns = torch.tensor([*rows]), torch.tensor([*columns])
    operator = form.operator(rows, columns, nn.Linear(9, 12, with_bias, dtype=torch.float64))
    assert type(operator) is kind
    x = torch.randn(4, len(columns), dtype=torch.float64)
    assert_close(operator(x), x @ whole[rows][:, columns].T + form.bias[rows])
    if (len(rows), len(columns)) == (12, 9):
        assert sum(p.numel() for p in operator.parameters() if p.ndim > 1) == shape.macs(12, 9, (12, 9))
