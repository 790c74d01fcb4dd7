"""Layers of blocks inside a border of hubs, and beside a low-rank part."""

import numpy as np
import torch
from torch import nn

import crystallite as cx
from crystallite.operators.coupled import BorderedLinear, CoupledLinear
from tests.helpers.planted.linear import planted

HUBS = {"rows": (3, 0), "columns": (0, 4), "both": (3, 4), "none": (0, 0), "all rows": (60, 0), "all": (60, 84)}


def bordered(kind, n_hubs, dtype=torch.float64, bias=True):
    """A dense layer of planted blocks inside a border, and the same as BorderedLinear."""
    rng = np.random.default_rng(1)
    inner = planted(kind)
    rows, cols = (np.sort(rng.permutation(n)[:k]) for n, k in zip(inner.shape, n_hubs, strict=True))
    weight = torch.randn(inner.shape, generator=torch.Generator().manual_seed(2)).double()
    others = np.ix_(np.setdiff1d(np.arange(60), rows), np.setdiff1d(np.arange(84), cols))
    weight[others] = inner[others]
    inner[rows], inner[:, cols] = 0, 0
    dense = nn.Linear(84, 60, bias, dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(weight)
    structure = cx.BorderedStructure(rows, cols, cx.decompose(inner), True)
    return dense, BorderedLinear.from_dense(dense.weight, dense.bias, structure)


def coupled(kind, rank, dtype=torch.float64, bias=True):
    inner = planted(kind)
    dense = nn.Linear(84, 60, bias, dtype=dtype)
    up, down = torch.randn(60, rank).double(), torch.randn(rank, 84).double()
    with torch.no_grad():
        dense.weight.copy_(inner.to(dtype) + up.to(dtype) @ down.to(dtype))
    blocks = cx.BlockLinear.from_dense(inner.to(dtype), dense.bias, cx.decompose(inner))
    return dense, CoupledLinear.from_parts(blocks, up.to(dtype), down.to(dtype))
