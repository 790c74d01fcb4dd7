"""A linear layer whose weight falls into blocks of a named kind."""

import numpy as np
import torch
from torch import nn

import crystallite as cx

STRUCTURES = ["equal", "ragged", "one block", "dormant", "empty", "singletons", "wide and tall"]


def planted(kind, rows=60, cols=84, seed=0):
    """A masked weight whose blocks are of the given kind, neurons shuffled."""
    rng = np.random.default_rng(seed)
    some = [np.where(rng.random(n) < 0.3, dead, np.arange(n) % 3) for n, dead in ((rows, -1), (cols, -2))]
    labels = {
        "equal": (np.arange(rows) % 4, np.arange(cols) % 4),
        "ragged": (np.minimum(rng.geometric(0.3, rows), 7), np.minimum(rng.geometric(0.3, cols), 7)),
        "one block": (np.zeros(rows), np.zeros(cols)),
        "dormant": some,
        "empty": (np.full(rows, -1), np.full(cols, -2)),
        "singletons": (np.arange(rows), np.arange(cols)),
        "wide and tall": (np.repeat([0, 1], [rows - 5, 5]), np.repeat([0, 1], [5, cols - 5])),
    }  # fmt: skip
    row, col = labels[kind]
    row, col = rng.permutation(row), rng.permutation(col)
    return torch.from_numpy(rng.standard_normal((rows, cols)) * (row[:, None] == col))


def pair(kind, dtype=torch.float32, bias=True):
    weight = planted(kind).to(dtype)
    dense = nn.Linear(weight.shape[1], weight.shape[0], bias, dtype=dtype)
    with torch.no_grad():
        dense.weight.copy_(weight)
    return dense, cx.BlockLinear.from_dense(dense.weight, dense.bias, cx.decompose(weight))
