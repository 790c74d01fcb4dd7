"""Whether a trained model consists of exactly the blocks it was to have, by the paper's own tests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.core.errors import CrystalliteError
from crystallite.partitioning.partition import Partition, joint_components
from crystallite.partitioning.weights import parameter, weight_of

__all__ = ["drop_strays_", "prove"]


@torch.no_grad()
def drop_strays_(model: nn.Module, partition: Partition) -> int:
    """Set weights of fragments to zero: of the components with one label only the largest is the block."""
    dropped, wide = 0, partition.expanded
    for chain, labels in zip(wide.chains, wide.labels, strict=True):
        weights = {name: weight_of(model, name) for name in chain.layers}
        components = joint_components(chain, {name: partition.expand(name, w.detach()) for name, w in weights.items()})
        component, label = (np.concatenate([side[group] for group in chain.sizes]) for side in (components, labels))
        sizes = np.bincount(component[component >= 0])
        largest = [max(np.unique(component[(label == b) & (component >= 0)]), key=lambda c: sizes[c], default=-1)
                   for b in range(int(label.max()) + 1)]  # fmt: skip
        for name, weight in weights.items():
            written = components[chain.writes[name]][chain.written(name)]
            stray = torch.from_numpy(~np.isin(written, largest)).to(weight.device)
            dropped += int(torch.count_nonzero(weight[stray]))
            weight[stray] = 0
    return dropped


def prove(model: nn.Module, partition: Partition, chosen: Mapping[str, nulls.Null], level: float) -> None:
    """Separation by the paper's own tests; a shared input is a column of its own for every block that reads it."""
    for chain in partition.expanded.chains:
        kept = {}
        for name in chain.layers:
            weight = weight_of(model, name).detach()
            mask = anneal(
                weight.flatten(1), chosen[parameter(name)], level=level, random_walk=None, rule="neyman", name=name
            ).mask
            assert torch.equal(mask.view_as(weight), weight != 0), f"{name}: annealing changes it"
            kept[name] = partition.expand(name, mask.view_as(weight))
        components = np.concatenate(list(joint_components(chain, kept).values()))
        if (found := int(components.max(initial=-1)) + 1) != partition.blocks:
            raise CrystalliteError(
                f"{' → '.join(chain.layers)}: expected {partition.blocks} blocks, but {found} are left with weights: "
                "the threshold was too much for the others; train for more epochs, or with a larger level"
            )
