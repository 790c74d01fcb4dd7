"""Ways to cut chains of layers into blocks: inputs are shared out first, hidden neurons and outputs follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import check_choice
from crystallite.data.batch import Batch
from crystallite.graph.chains import Chain
from crystallite.partitioning.assignment import assign_by_explained_variance
from crystallite.partitioning.input_clusters import cluster_partition
from crystallite.partitioning.partition import Partition, decorrelated_partition, random_partition
from crystallite.partitioning.weights import owner
from crystallite.statistics.watching import watching

__all__ = ["candidate_partitions"]

_ROWS = 4096  # of a batch, which say enough about how features vary together


@torch.no_grad()
def candidate_partitions(
    kind: str, model: nn.Module, chains: Sequence[Chain], blocks: Any, some: Sequence[Batch], seed: int, several: bool
) -> dict[str, Partition]:
    """By name: one, or several where trials can decide between them, the one to take without trials first."""
    if kind == "random":
        return {kind: random_partition(chains, blocks, seed)}
    check_choice("partition", kind, ("auto", "regions", "spread", "random"), "a Partition")
    read = _features(model, [chain.layers[0] for chain in chains], some)
    read_on = [chain for chain in chains if chain.read_on and not (chain.rows or chain.columns)]
    found = {}
    if kind == "regions" or (kind == "auto" and read_on):
        found["regions"] = _with_regions(chains if kind == "regions" else read_on, chains, blocks, read, seed)
    if kind == "spread" or (kind == "auto" and (several or not read_on)):
        found["spread"] = decorrelated_partition(chains, blocks, read, seed)
    return {name: assign_by_explained_variance(one, model, some) for name, one in found.items()}


def _with_regions(
    some: Sequence[Chain], chains: Sequence[Chain], blocks: int, read: Mapping[str, Tensor], seed: int
) -> Partition:
    """Inputs of some chains in regions, those of the others spread; hidden neurons are shared out at random."""
    regions = cluster_partition(some, blocks, read, seed)
    if len(some) == len(chains):
        return regions
    spread = decorrelated_partition(chains, blocks, read, seed)
    chosen = dict(zip((chain.layers for chain in some), regions.labels, strict=True))
    labels = (chosen.get(c.layers, own) for c, own in zip(chains, spread.labels, strict=True))
    return Partition(spread.blocks, spread.chains, tuple(labels))


def _features(model: nn.Module, names: Sequence[str], some: Sequence[Batch]) -> dict[str, Tensor]:
    """(rows, features) that each layer reads, some of them; the features of a convolution are its channels."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in some:
        with watching(model, {owner(name)[0] for name in names}) as calls:
            batch.call(model)
        for name, parts in found.items():
            module = owner(name)[0]
            if not calls[module]:
                raise InvalidOption(f"{name}: the model does not run this layer on the data, so it cannot be separated")
            x = calls[module][0].inputs[0]
            x = x.data if isinstance(x, PackedSequence) else x
            by_features = isinstance(model.get_submodule(module), (nn.Linear, nn.RNNBase))
            rows = (x if by_features else x.movedim(1, -1)).flatten(0, -2)
            parts.append(rows[:: -(-len(rows) // _ROWS)])
    return {name: torch.cat(parts) for name, parts in found.items()}
