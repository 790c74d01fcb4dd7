"""Which recipe to train with: one knob after the other, by short trainings judged on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from crystallite.data.batch import Batch, batches
from crystallite.models.record import Recipe, RecipeSearch, Trial
from crystallite.separation.task import Task
from crystallite.separation.training import similarity, target_loss

__all__ = ["Choices", "find_recipe", "held_out_part"]

_HELD_OUT = 5  # every fifth batch judges
_MOST_SAMPLES = 20_000  # that are read
_FEWEST_SAMPLES, _FEWEST_BATCHES = 500, 10  # of which a fifth can be held out
_LENGTH = 0.4  # of a trial, as a share of the epochs
_ORDER = ("partition", "learning_rate", "block_loss", "smoothing")  # in which knobs are turned
_TEMPERATURES = torch.logspace(-0.6, 0.6, 25).tolist()


@dataclass(frozen=True)
class Choices:
    """Values to try for every knob; the first ones are taken where nothing can be tried."""

    partition: tuple[str, ...]
    learning_rate: tuple[float, ...]
    smoothing: tuple[float, ...] = (0.0,)
    block_loss: tuple[float, ...] = (0.0,)

    @property
    def default(self) -> Recipe:
        return Recipe(self.partition[0], self.learning_rate[0], self.smoothing[0], self.block_loss[0])

    @property
    def open(self) -> list[str]:
        """Knobs with several values, in the order in which they are turned."""
        return [name for name in _ORDER if len(getattr(self, name)) > 1]


def find_recipe(
    task: Task, choices: Choices, data: Any, held_out: Any, epochs: int, calibrated: bool, progress: bool
) -> tuple[Recipe, RecipeSearch]:
    """The best of some recipes, and how it was found.

    Begins with the first value of every knob and turns one after the other, keeping what does best. Every trial is a
    whole training of its own, only shorter. The score is the loss on held-out batches, or without labels the distance
    to the dense model's outputs. held_out: these batches; None: every fifth of the data. calibrated: outputs are
    logits; they are judged at their best temperature, as otherwise smoothed labels would be judged by how unsure they
    make a model, not by what it gets right.
    """
    if not choices.open:
        return choices.default, RecipeSearch(note="every knob was given")
    if held_out is not None:
        part, length, _ = _read(data, task.seed)
        judges = _read(held_out, task.seed)[0]
    else:
        part, judges, length, shortage = held_out_part(data, task.seed)
        if shortage:
            return choices.default, RecipeSearch(note=shortage)
    own_epochs = max(1, round(_LENGTH * epochs))
    part = part[: math.ceil(_LENGTH * epochs * length / own_epochs)]
    cost = own_epochs * len(part) / (epochs * length)  # of a trial
    best, trials = choices.default, {}
    bar = tqdm(
        total=1 + sum(len(getattr(choices, knob)) - 1 for knob in choices.open), unit="trial", disable=not progress
    )
    for knob in choices.open:
        for value in getattr(choices, knob):
            recipe = replace(best, **{knob: value})
            if recipe not in trials:
                bar.set_description(f"search at {cost * bar.total:.1f} × the cost of training: {recipe}")
                model, *_ = task.train(recipe, [(batch.arguments, batch.target) for batch in part], own_epochs)
                trials[recipe] = _score(task, model, judges, calibrated)
                bar.update()
        best = min(trials, key=lambda recipe: trials[recipe])
    bar.close()
    found = tuple(Trial(recipe, score if score < math.inf else None) for recipe, score in trials.items())
    samples, judged = (sum(batch.size for batch in some) for some in (part, judges))
    return best, RecipeSearch(found, own_epochs, samples, judged, cost * len(trials))


def held_out_part(data: Any, seed: int) -> tuple[list[Batch], list[Batch], int, str]:
    """Batches to train with, every fifth to judge by, how many there are in all, and why they are too few, if so."""
    read, length, shortage = _read(data, seed)
    part = [batch for i, batch in enumerate(read) if i % _HELD_OUT != _HELD_OUT - 1]
    return part, read[_HELD_OUT - 1 :: _HELD_OUT], length, shortage


def _read(data: Any, seed: int) -> tuple[list[Batch], int, str]:
    """Batches in one order, how many there are in all, and why they are too few, if they are."""
    torch.manual_seed(seed)
    read: list[Batch] = []
    samples = length = 0
    for batch in batches(data):
        length += 1
        if samples < _MOST_SAMPLES:
            read.append(batch)
            samples += batch.size
    if len(read) >= _FEWEST_BATCHES and samples >= _FEWEST_SAMPLES:
        return read, length, ""
    needed = f"{_FEWEST_SAMPLES} in {_FEWEST_BATCHES} are needed"
    return read, length, f"{samples} samples in {len(read)} batches are too few to hold some out ({needed})"


@torch.no_grad()
def _score(task: Task, model: nn.Module, held_out: Sequence[Batch], calibrated: bool) -> float:
    """The loss of a model on average over some batches, each weighed by its samples."""
    if task.loss is None:
        losses = [[float(similarity(model, task.dense, task.ends, batch)) for batch in held_out]]
    else:
        outputs = [batch.call(model) for batch in held_out]
        losses = [
            [
                float(target_loss(task.loss, factor * output, batch))
                for output, batch in zip(outputs, held_out, strict=True)
            ]
            for factor in (_TEMPERATURES if calibrated else (1.0,))
        ]
    sizes = torch.tensor([batch.size for batch in held_out], dtype=torch.float64)
    means = torch.tensor(losses, dtype=torch.float64) @ (sizes / sizes.sum())
    return float(means.nan_to_num(math.inf).min())
