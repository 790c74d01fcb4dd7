"""A feed-forward pair whose blocks are planted in each of the forms."""

import numpy as np
import torch
from torch import nn

from tests.helpers.planted.linear import planted

INPUTS, HIDDEN, OUTPUTS = 24, 96, 20


def end_to_end(groups, seed=0, dead=0.0):
    """Masks of both layers whose neurons fall into groups from inputs to outputs, some without any edge."""
    rng = np.random.default_rng(seed)
    sizes = (INPUTS, HIDDEN, OUTPUTS)
    x, h, y = (np.where(rng.random(n) < dead, -1 - i, rng.integers(0, groups, n)) for i, n in enumerate(sizes))
    if groups == 4 and not dead:  # equal subnetworks
        x, h, y = (rng.permutation(np.arange(n) % groups) for n in sizes)
    return h[:, None] == x, y[:, None] == h


def each_layer(first, second, seed=0):
    """Masks with blocks of their own kind in each layer."""
    mask = planted(first, HIDDEN, INPUTS, seed) != 0, planted(second, OUTPUTS, HIDDEN, seed + 1) != 0
    return tuple(m.numpy() for m in mask)


def channel_by_channel(seed=0):
    """Masks with blocks only inside each of the four channels of 24 hidden neurons."""
    parts = [each_layer("equal", "equal", seed + 10 * q) for q in range(4)]
    part = HIDDEN // 4
    return np.concatenate([a[:part] for a, _ in parts]), np.concatenate([b[:, :part] for _, b in parts], 1)


CASES = {
    "equal subnetworks": (end_to_end(4), "pair"),
    "ragged subnetworks": (end_to_end(7), "pair"),
    "dormant neurons": (end_to_end(3, dead=0.3), None),
    "one block": (each_layer("one block", "one block"), "pair"),
    "empty": (each_layer("empty", "empty"), "pair"),
    "empty first": (each_layer("empty", "equal"), None),
    "empty second": (each_layer("ragged", "empty"), None),
    "equal layers": (each_layer("equal", "equal"), "layers"),
    "ragged layers": (each_layer("ragged", "ragged"), "layers"),
    "dormant layers": (each_layer("dormant", "dormant"), "layers"),
    "channels": (channel_by_channel(), "channels"),
}


def dense_pair(case, dtype=torch.float64, gated=False, bias=True):
    torch.manual_seed(0)
    reads, writes = (torch.from_numpy(mask) for mask in CASES[case][0])
    first, second = nn.Linear(INPUTS, HIDDEN, bias, dtype=dtype), nn.Linear(HIDDEN, OUTPUTS, bias, dtype=dtype)
    gate = nn.Linear(INPUTS, HIDDEN, bias, dtype=dtype) if gated else None
    with torch.no_grad():
        second.weight *= writes
        if gate is None:
            first.weight *= reads
        else:  # neither holds all of the union
            chosen = torch.rand(reads.shape) < 0.7
            first.weight *= reads & chosen
            gate.weight *= reads & ~(chosen & (torch.rand(reads.shape) < 0.5))
    return first, nn.SiLU(), second, gate
