"""Saved models with planted blocks, and the dense models they were made from."""

import json

import torch
from torch import nn

import crystallite as cx
from crystallite.models.manifest import attach_verdict, write_manifest
from crystallite.serving import Machine
from tests.helpers.planted.chain import planted

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


def in_blocks(layer):
    return cx.BlockLinear.from_dense(layer.weight, layer.bias, cx.decompose(layer.weight.detach()))


def edit_manifest(**changes):
    """Change fields of a manifest and sign it anew, as somebody who wants us to trust it would."""

    def edit(folder):
        write_manifest(folder, json.loads((folder / "manifest.json").read_text()) | changes)

    return edit


def sequential_network():
    """A chain that swallowed two places, a norm and a layer of blocks."""
    chain = cx.BlockChain.from_dense(planted((16, 32, 8), 4, dtype=torch.float32), [nn.GELU("tanh")])
    (other,) = planted((8, 12), 2, seed=5, dtype=torch.float32)
    return nn.Sequential(chain, nn.Identity(), nn.Identity(), nn.LayerNorm(8), in_blocks(other), nn.Softmax(-1)).eval()
