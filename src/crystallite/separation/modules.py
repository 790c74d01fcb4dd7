"""A partition along the modules that were found in a network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.discovery.modules import Modules
from crystallite.graph.chains import Chain
from crystallite.partitioning.partition import Partition
from crystallite.partitioning.weights import owner
from crystallite.statistics.watching import layer_call

__all__ = ["module_partition"]


@torch.no_grad()
def module_partition(found: Modules, model: nn.Module, chains: Sequence[Chain], batch: Batch) -> Partition:
    """Every neuron in the block of its module.

    Hidden neurons have the labels of the layer that writes them; the first layer must read the model's inputs as they
    are or flattened, and a last layer write its outputs. Dormant neurons, which matter to no output, go to the modules
    that have fewest neurons of their group. Shared inputs are copied to every module that reads them, where linear
    layers do.
    """
    if found.k < 2:
        raise InvalidOption(f"modules: expected at least 2, got {found.k}: the network proposes no split of its own")
    labels = tuple(
        {group: _settled(_labels(found, model, chain, group, batch), found.k) for group in chain.sizes}
        for chain in chains
    )
    copies = tuple(
        {group: found.shared for group in chain.sizes if _copied(found, model, chain, group, batch)} for chain in chains
    )
    return Partition(found.k, tuple(chains), labels, copies if any(copies) else ())


def _copied(found: Modules, model: nn.Module, chain: Chain, group: str, batch: Batch) -> bool:
    """Whether a group is the model's inputs, some of which are shared, and linear layers read it."""
    if group in chain.writes.values() or not found.shared.any():
        return False
    readers = [name for name in chain.layers if chain.reads[name] == group]
    linear = all(type(model.get_submodule(owner(name)[0])) is nn.Linear for name in readers)
    return linear and _labels(found, model, chain, group, batch) is found.inputs


def _labels(found: Modules, model: nn.Module, chain: Chain, group: str, batch: Batch) -> np.ndarray:
    writers = [name for name in chain.layers if chain.writes[name] == group]
    readers = [name for name in chain.layers if chain.reads[name] == group]
    for name in writers:
        if name in found.hidden:
            return found.hidden[name]
        if _same(layer_call(model, owner(name)[0], batch).output, batch.call(model)):
            return found.outputs
    for name in readers:
        read = layer_call(model, owner(name)[0], batch).inputs[0]
        if any(_same(read, given) for given in batch.values):
            return found.inputs
    side, names = ("outputs", writers) if writers else ("inputs", readers)
    raise InvalidOption(f"modules: no labels for the {side} of {', '.join(names)}; ignore this layer")


def _same(one: Tensor, other: object) -> bool:
    return isinstance(other, Tensor) and one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten())


def _settled(labels: np.ndarray, k: int) -> np.ndarray:
    """Dormant ones shared out."""
    labels = labels.copy()
    counts = np.bincount(labels[labels >= 0], minlength=k)
    for neuron in np.flatnonzero(labels < 0):
        labels[neuron] = int(np.argmin(counts))
        counts[labels[neuron]] += 1
    return labels
