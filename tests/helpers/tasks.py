"""Small networks trained on planted tasks: k digits side by side, drawn independently, pixels scrambled."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


@cache
def digits():
    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def draw(k, order, samples):
    images, labels = digits()
    index = torch.randint(len(images), (samples, k))
    return images[index].flatten(1)[:, order], labels[index]


def mlp(inputs, outputs, width=64, activation=nn.ReLU):
    return nn.Sequential(
        nn.Linear(inputs, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, outputs)
    )


def steps(model, k, order, count, optimizer=None, target=None):
    """Train for some steps, and say after each that it is done."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(count):
        x, y = draw(k, order, 128)
        if target is None:
            logits = model(x).unflatten(1, (k, 10))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        else:
            loss = nn.functional.mse_loss(model(x), target(y).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step


def trained(k, seed, count=300, width=64):
    """(model, samples, true task of every pixel)"""
    torch.manual_seed(seed)
    order = torch.randperm(64 * k)
    model = mlp(64 * k, 10 * k, width)
    for _ in steps(model, k, order, count):
        pass
    return model, draw(k, order, 1500)[0], (order // 64).numpy()


def block_network(sizes, rng):
    """A random two-layer network of separate parts with all neurons scrambled; the part of every neuron, by layer."""
    parts = [np.repeat(np.arange(len(sizes)), [size[layer] for size in sizes]) for layer in range(3)]
    parts = [rng.permutation(part) for part in parts]
    model = nn.Sequential(nn.Linear(len(parts[0]), len(parts[1])), nn.Tanh(), nn.Linear(len(parts[1]), len(parts[2])))
    for layer, before, after in ((model[0], parts[0], parts[1]), (model[2], parts[1], parts[2])):
        weight = rng.uniform(0.5, 1, layer.weight.shape) * rng.choice([-1, 1], layer.weight.shape)
        layer.weight.data = torch.tensor(weight * (after[:, None] == before), dtype=torch.float32)
    return model, parts
