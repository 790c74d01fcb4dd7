"""Which partition generalises: tried on a stand-in for the model, with new weights, that has not seen what judges."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from crystallite.core.progress import phase
from crystallite.data.batch import Batch
from crystallite.models.record import RecipeSearch
from crystallite.partitioning.partition import Partition
from crystallite.separation.search import Choices, find_recipe, held_out_part
from crystallite.separation.task import Task
from crystallite.separation.training import target_loss
from crystallite.statistics.trainer import Trainer

__all__ = ["can_stand_in", "choose_partition"]

_RATE = 1e-3  # of training the stand-in
_CLEARLY = 0.05  # share of the first partition's loss that another one must save: less is chance


def can_stand_in(model: nn.Module) -> bool:
    """Whether a copy of the model can be drawn anew: every module that is trained knows how it is initialised.

    >>> can_stand_in(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    True
    >>> can_stand_in(nn.ParameterList([torch.zeros(3)]))
    False
    """
    return all(callable(getattr(module, "reset_parameters", None)) for module in _trained(model))


def choose_partition(
    task: Task,
    cut: Callable[[nn.Module, list[Batch]], Mapping[str, Partition]],
    choices: Choices,
    data: Any,
    epochs: int,
    calibrated: bool,
    progress: bool,
) -> tuple[str, RecipeSearch | None]:
    """The name of the best partition, and how it was found; the first one where they cannot be tried.

    That is where data are too few, or training from new weights diverges.

    The model has seen the data, so none of them tells how it generalises. A stand-in, the same network with new
    weights, is trained on four fifths of them for as many epochs as the upgrade will have; it is cut in each way and
    trained on as a trial of the search is, at the first value of every other knob, and the last fifth judges. Another
    partition than the first has to be clearly better.
    """
    part, judges, length, shortage = held_out_part(data, task.seed)
    if shortage:
        return choices.partition[0], None
    torch.manual_seed(task.seed)
    with phase("training a network with new weights", progress):
        stand_in = _trained_anew(task.dense, task, part, epochs)
    if not all(bool(parameter.isfinite().all()) for parameter in stand_in.parameters()):
        return choices.partition[0], None
    other = replace(task, dense=stand_in, partitions=cut(stand_in, part), some=part, _fitted={})
    only = Choices(choices.partition, choices.learning_rate[:1], choices.smoothing[:1], choices.block_loss[:1])
    own, unseen = ([(batch.arguments, batch.target) for batch in some] for some in (part, judges))
    _, found = find_recipe(other, only, own, unseen, epochs, calibrated, progress)
    scores = {one.recipe.partition: math.inf if one.score is None else one.score for one in found.trials}
    first, best = choices.partition[0], min(scores, key=lambda name: scores[name])
    clear = math.isinf(scores[first]) or scores[first] - scores[best] > _CLEARLY * abs(scores[first])
    return best if clear else first, replace(found, cost=(1 + found.cost) * len(part) / length)


def _trained_anew(model: nn.Module, task: Task, part: list[Batch], epochs: int) -> nn.Module:
    """A copy of the model with new weights, trained on a part of the data."""
    assert task.loss is not None, "without labels there is nothing to train a stand-in for"
    new = copy.deepcopy(model)
    for module in _trained(new):
        module.reset_parameters()  # type: ignore[operator]
    parameters = [p for p in new.parameters() if p.requires_grad]
    trainer = Trainer(parameters, {}, {}, _RATE, epochs * len(part))
    new.train()
    for _ in range(epochs):
        for place in torch.randperm(len(part)).tolist():
            trainer.descend([target_loss(task.loss, part[place].call(new), part[place])])
    return new.eval()


def _trained(model: nn.Module) -> list[nn.Module]:
    """Modules with parameters of their own that are trained."""
    return [m for m in model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
