"""What every block alone would say of the model's output: a second task for it while it is trained."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.partitioning.partition import Partition
from crystallite.statistics.watching import layer_call

__all__ = ["Readouts", "readouts_for"]


class Readouts(nn.Module):
    """For every block a linear map from its last hidden neurons, as a ReLU would leave them, to the whole output.

    A block that has to answer for a few classes only, or for its share of a sum, learns features that fit the samples
    it has seen; one that could do the whole task as well as its inputs allow generalises better. Readouts start at
    zero and are no part of the model.

    >>> readouts = Readouts("0", np.array([0, 1, 0]), 2, torch.float32)
    >>> [tuple(said.shape) for said in readouts(torch.randn(5, 3))]
    [(5, 2), (5, 2)]
    """

    def __init__(self, layer: str, labels: np.ndarray, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer  # which writes the hidden neurons
        self.members = [torch.from_numpy(np.flatnonzero(labels == b)) for b in range(labels.max() + 1)]
        self.maps = nn.ModuleList(nn.Linear(len(own), outputs, dtype=dtype) for own in self.members)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Iterator[Tensor]:
        for own, read in zip(self.members, self.maps, strict=True):
            yield read(hidden.index_select(-1, own.to(hidden.device)).relu())


def readouts_for(model: nn.Module, partition: Partition, batch: Batch) -> Readouts | None:
    """Readouts of a model in evaluation mode; None unless one chain of linear layers leads to one vector per sample."""
    (chain, *others), last = partition.chains, partition.chains[0].layers[-1]
    group = chain.writes[last] if chain.read_on else chain.reads[last]
    writers = [name for name in chain.layers if chain.writes[name] == group]
    linear = all(type(model.get_submodule(name)) is nn.Linear for name in partition.modules)
    if others or not linear or len(writers) != 1:
        return None
    with torch.no_grad():
        output, hidden = batch.call(model), layer_call(model, writers[0], batch).output
    labels = partition.labels[0][group]
    if output.shape[:-1] != hidden.shape[:-1] or not output.is_floating_point() or len(labels) != hidden.shape[-1]:
        return None
    readouts = Readouts(writers[0], labels, output.shape[-1], output.dtype)
    return readouts.to(output.device)
