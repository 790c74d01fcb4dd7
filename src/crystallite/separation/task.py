"""What stays the same in all trainings of an upgrade: those that try recipes, and the one that counts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.models.record import Epoch, Recipe
from crystallite.partitioning.partition import Partition
from crystallite.separation.readouts import readouts_for
from crystallite.separation.refit import refit_
from crystallite.separation.straight_through import attach_
from crystallite.separation.training import Loss, Metric, Schedule, train_
from crystallite.statistics.checkpoints import Checkpoints

__all__ = ["Task", "smoothed", "takes_probabilities"]


@dataclass(frozen=True)
class Task:
    """A dense model, ways to cut it, and what is to be learned."""

    dense: nn.Module  # in the units in which weights are tested
    partitions: Mapping[str, Partition]  # by name, of the same layers
    thresholds: Mapping[str, float]
    ends: Sequence[str]
    loss: Loss | None
    some: Sequence[Batch]  # what least squares reads
    seed: int
    _fitted: dict[str, nn.Module] = field(default_factory=dict)

    def fit(self, partition: str) -> nn.Module:
        """The model in blocks as least squares finds them."""
        if partition not in self._fitted:
            student = copy.deepcopy(self.dense)
            refit_(student, self.dense, self.partitions[partition], self.some)
            self._fitted[partition] = student
        return self._fitted[partition]

    def train(
        self,
        recipe: Recipe,
        data: Any,
        epochs: int,
        *,
        fitted: bool = True,
        metric: Metric | None = None,
        state: Mapping[str, Any] | None = None,
        checkpoints: Checkpoints | None = None,
        progress: bool = False,
    ) -> tuple[nn.Module, list[Epoch], float | None]:
        """The model behind its gates after training, the history, and the metric before it.

        fitted: whether it begins with what least squares finds; a checkpoint has its own weights. state: plain values
        that are kept in checkpoints.
        """
        student = copy.deepcopy(self.fit(recipe.partition) if fitted else self.dense)
        partition, gates = self.partitions[recipe.partition], {}
        readouts = readouts_for(self.dense, partition, self.some[0]) if recipe.block_loss else None
        for name in partition.layers:
            student, gates[name] = attach_(student, name, partition)
        history, start = train_(
            student,
            self.dense,
            gates,
            self.thresholds,
            self.ends,
            data,
            self.loss if self.loss is None else smoothed(self.loss, recipe.smoothing),
            metric,
            Schedule(epochs, recipe.learning_rate, block_loss=recipe.block_loss),
            readouts,
            self.seed,
            checkpoints,
            progress,
            state,
        )
        return student, history, start


def smoothed(loss: Loss, share: float) -> Loss:
    """The loss where a share of every label is spread over all classes.

    >>> output, label = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    >>> round(smoothed(nn.functional.cross_entropy, 0.2)(output, label).item(), 4)
    0.3269
    >>> round(nn.functional.cross_entropy(output, label, label_smoothing=0.2).item(), 4)
    0.3269
    """
    if not share:
        return loss

    def of(output: Tensor, target: Tensor) -> Tensor:
        if target.is_floating_point() or bool((target < 0).any()):  # labels that do not count, as −100
            return loss(output, target)
        return loss(output, (1 - share) * _probabilities(output, target) + share / output.shape[-1])

    return of


@torch.no_grad()
def takes_probabilities(loss: Loss, output: Tensor, target: Tensor) -> bool:
    """Whether the loss takes a probability for each class in place of labels, as cross-entropy does.

    >>> x, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 0])
    >>> [takes_probabilities(loss, x, y) for loss in (nn.functional.cross_entropy, nn.functional.multi_margin_loss)]
    [True, False]
    """
    labels = not (target.is_floating_point() or target.is_complex()) and target.dtype != torch.bool
    if not labels or output.ndim != 2 or target.shape != output.shape[:1] or output.shape[1] < 2:
        return False
    if int(target.min()) < 0 or int(target.max()) >= output.shape[1]:
        return False
    expected = loss(output, target)
    try:
        found = loss(output, _probabilities(output, target))
    except Exception:  # what a loss of somebody else says to targets it was not made for
        return False
    return (
        isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.isclose(found, expected, rtol=1e-4))
    )


def _probabilities(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.one_hot(target.long(), output.shape[-1]).to(output.dtype)
