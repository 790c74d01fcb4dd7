"""Saved models with planted blocks, and the dense models they were made from."""

import torch
from torch import nn

import crystallite as cx
from crystallite.models.manifest import attach_verdict
from crystallite.serving import Machine
from tests.operators.test_chain import planted

APART = Machine(hop=1e-12, macs_per_second=1e9, bytes_per_second=1e9)  # every part is worth a service
TOGETHER = Machine(hop=1e3, macs_per_second=1e9, bytes_per_second=1e9)  # none is


def network(sizes=(12, 24, 24, 8), groups=4, dtype=torch.float32, seed=0, dead=0.0, head=True):
    """A dense network that falls into `groups` from end to end."""
    torch.manual_seed(seed)
    modules = []
    for layer in planted(sizes, groups, seed=seed, dead=dead, dtype=dtype):
        modules += [layer, nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *modules[:-1], *([nn.Softmax(-1)] if head else [])).eval()


def small(model):
    """The model as the blocks that were planted in it."""
    return cx.reorganize(model, level=None, only_if_faster=False, fold=False)


def saved(model, path, passed=True):
    """The model, reorganized and saved, with a verdict; None: without one."""
    cx.save(small(model), path)
    if passed is not None:
        attach_verdict(path, {"passed": passed, "reasons": ["planted"]})
    return path
