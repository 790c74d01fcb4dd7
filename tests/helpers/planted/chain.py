"""A chain of linear layers whose neurons fall into groups."""

from itertools import pairwise

import numpy as np
import torch
from torch import nn


def planted(sizes, groups, seed=0, dead=0.0, bias=True, dtype=torch.float64, shared=True):
    """Linear layers whose neurons fall into `groups`, shuffled; a share of them without edges.

    shared: consecutive layers agree on the groups of the neurons between them; otherwise each draws its own.
    """
    rng = np.random.default_rng(seed)

    def draw(depth):
        n = sizes[depth]
        return np.where(rng.random(n) < dead, -1 - depth, rng.permutation(np.arange(n) % groups))

    layers, label = [], draw(0)
    for depth, (n, m) in enumerate(pairwise(sizes)):
        cols = label if shared else draw(depth)
        label = draw(depth + 1)
        layer = nn.Linear(n, m, bias, dtype=dtype)
        with torch.no_grad():
            layer.weight *= torch.from_numpy(label[:, None] == cols)
        layers.append(layer)
    return layers


def dense(layers, activations):
    stages = [layers[0]]
    for activation, layer in zip(activations, layers[1:], strict=True):
        stages += [activation, layer]
    return nn.Sequential(*stages)
