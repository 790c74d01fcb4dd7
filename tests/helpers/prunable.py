"""Small networks with planted redundancy: some hidden neurons, channels or heads do nothing."""

import builtins

import torch
from torch import nn
from torch.nn import functional as F

from crystallite.data.batch import Batch


def perceptron(hidden=32, alive=8, seed=0):
    """8 inputs, two hidden layers, 4 outputs; only the first `alive` neurons of each hidden layer have weights."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    order = torch.randperm(hidden)
    with torch.no_grad():
        for writer, reader in ((net[0], net[2]), (net[2], net[4])):
            dead = order[alive:]
            writer.weight[dead] = writer.bias[dead] = reader.weight[:, dead] = 0
    return net.eval()


def convolutions(alive=4, seed=0):
    """A convolution with a batch norm, another one, and a linear layer behind `Flatten`; images of 6 × 6."""
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 12, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip
    with torch.no_grad():
        net[1].running_mean.normal_()
        net[1].running_var.uniform_(0.5, 2)
        net[1].bias.normal_()
        for channel in range(alive, 12):
            net[0].weight[channel] = net[0].bias[channel] = net[3].weight[:, channel] = 0
            net[3].weight[channel] = net[3].bias[channel] = 0
            net[6].weight[:, 4 * channel : 4 * channel + 4] = 0
    return net.eval()


class Attention(nn.Module):
    """An attention of 4 heads of 8 numbers and a feed-forward pair; 2 heads and half of the neurons do nothing."""

    def __init__(self, any_heads=True, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.query, self.key, self.value, self.output = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.place = nn.Parameter(torch.randn(9, 32))
        self.heads = -1 if any_heads else 4
        dead = torch.arange(32).view(4, 8)[[1, 3]].flatten()
        with torch.no_grad():
            for layer in (self.query, self.key, self.value):
                layer.weight[dead] = layer.bias[dead] = 0
            self.output.weight[:, dead] = 0
            self.up.weight[::2] = self.up.bias[::2] = self.down.weight[:, ::2] = 0
        self.eval()

    def forward(self, x):
        x = x + self.place[: x.shape[1]]
        q, k, v = (
            f(x).view(*x.shape[:2], self.heads, 8).transpose(1, 2) for f in (self.query, self.key, self.value)
        )  # fmt: skip
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def batch(*shape, seed=1):
    return Batch(0, shape[0], (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),))


def data(samples=64, seed=1):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return list(x.split(16))


def hidden_from(monkeypatch, *packages):
    """As if these packages were not installed."""
    real = builtins.__import__

    def without(name, *rest, **named):
        if name.partition(".")[0] in packages:
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
