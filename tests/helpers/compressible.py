"""Networks whose structure is planted, and a small one that learned something."""

import itertools

import torch
from torch import nn

from tests.helpers import digits


def mlp(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def low_rank(rank=4):
    """40 → 40 → 8 whose first layer has a small rank."""
    model = mlp(40, 40, 8)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(40, rank) @ torch.randn(rank, 40) / 8)
    return model


def repeated(copies=4):
    """20 → 64 → 8 whose hidden neurons each stand there several times, in mixed order."""
    model = mlp(20, 64, 8)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(parameter[: 64 // copies].repeat(copies, *[1] * (parameter.ndim - 1))[order])
    return model


def blocks(count=4, width=32, seed=0):
    """Two layers of as many scrambled blocks, which do not fit each other."""
    model = mlp(width, width, width, seed=seed)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            rows, columns = (torch.randperm(width) % count for _ in range(2))
            layer.weight.masked_fill_(rows[:, None] != columns, 0)
            layer.weight.mul_(2)
    return model


class Gated(nn.Module):
    """x + down(silu(gate(x)) · up(x)), where only every fourth hidden neuron is listened to."""

    def __init__(self, width=16, hidden=64):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        with torch.no_grad():
            self.down.weight[:, torch.arange(hidden) % 4 > 0] = 0

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def trained_digits():
    """A network that reads digits, its training images, and the test set."""
    loader, x, y = digits.data()
    model = digits.train(digits.network(), loader, 12).eval()
    return model, loader.dataset.tensors[0], x, y


def relative_error(found, expected):
    return float((found - expected).detach().norm() / expected.detach().norm())


def samples(width, count=1200, seed=5):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
