"""Models with planted blocks, and the oracle: the same model with every weight masked by `anneal`."""

import copy

import numpy as np
import torch
from torch import nn

import crystallite as cx


def labels(size, groups, seed):
    return np.random.default_rng(seed).permutation(np.arange(size) % groups)


def mask(outputs, inputs):
    """True where an output and an input have the same label."""
    return torch.from_numpy(outputs[:, None] == inputs)


@torch.no_grad()
def keep_(weight, kept):
    weight *= kept.view(*kept.shape, *[1] * (weight.ndim - 2))


def block_linear(inputs, outputs, groups, seed, **options):
    """A linear layer of shuffled blocks."""
    layer = nn.Linear(inputs, outputs, **options)
    keep_(layer.weight, mask(labels(outputs, groups, seed), labels(inputs, groups, seed + 100)))
    return layer


def block_convolution(kind, inputs, outputs, groups, seed, **options):
    conv = kind(inputs, outputs, 3, **options)
    keep_(conv.weight, mask(labels(outputs, groups, seed), labels(inputs, groups, seed + 100)))
    return conv


def block_recurrent(kind, inputs, hidden, groups, **options):
    """A recurrent network of independent parts, those of every direction and layer alike."""
    module = kind(inputs, hidden, **options)
    unit = labels(hidden, groups, 3)
    for name, weight in module.named_parameters():
        if name.startswith("weight"):
            gates, width = len(weight) // hidden, weight.shape[1]
            reads = np.tile(unit, width // hidden) if width % hidden == 0 else labels(width, groups, 4)
            keep_(weight, mask(unit, reads).repeat(gates, 1))
    return module


class Gated(nn.Module):
    """A SwiGLU pair; its layers have names that say nothing."""

    def __init__(self, width=16, hidden=32, groups=4, bias=True, strangers=False):
        super().__init__()
        self.one = nn.Linear(width, hidden, bias)
        self.two = nn.Linear(hidden, width, bias)
        self.three = nn.Linear(width, hidden, bias)
        outer, inner = labels(width, groups, 1), labels(hidden, groups, 2)
        for layer in (self.one, self.three):
            keep_(layer.weight, mask(inner, outer))
        keep_(self.two.weight, mask(outer, labels(hidden, groups, 5) if strangers else inner))

    def forward(self, x):
        return self.two(nn.functional.silu(self.three(x)) * self.one(x))


class Fused(nn.Module):
    """A SwiGLU pair whose gate and value are one layer, as in Phi-3 and ModernBERT."""

    def __init__(self, width=16, hidden=32):
        super().__init__()
        self.both, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        gate, value = self.both(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


@torch.no_grad()
def annealed(model, names=None, **options):
    """A copy whose weights are masked by `cx.anneal`, the layers of these names or all of them."""
    result = copy.deepcopy(model)
    masks = {}
    for name, found in cx.anneal(result, **options).items():
        masks.setdefault(name.partition("[")[0], []).append(found.mask)
    for name, parts in masks.items():
        owner = name.rpartition(".")[0]
        module = result.get_submodule(owner)
        if (names is None or owner in names) and not isinstance(module, nn.Embedding):
            kept = torch.cat(parts)
            weight = result.get_parameter(name)
            weight *= (kept.T if type(module).__name__ == "Conv1D" else kept).reshape(weight.shape)
    return result


def outputs_and_gradients(model, *inputs):
    """What a model returns, and the gradient of its squares by the first input."""
    first = inputs[0].detach().clone().requires_grad_()
    result = model(first, *inputs[1:])
    result = result[0] if isinstance(result, tuple) else result
    result.square().sum().backward()
    return result.detach(), first.grad


def assert_same_state(found, expected):
    """The same names in the same order, and the same numbers bit for bit."""
    assert list(found.state_dict()) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
