"""How much of a layer can go, and how much the model's outputs would suffer: curves of damage over size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from crystallite.operators.conv import Convolution
from crystallite.refitting.allocation import LayerCurve, NeuronCurve, falling
from crystallite.refitting.forms import Cells, Shape, approximate, low_rank_factors
from crystallite.refitting.groups import Hidden
from crystallite.refitting.heads import turn_heads_
from crystallite.refitting.hubs import own_shape, with_hubs
from crystallite.refitting.influence import influence
from crystallite.refitting.partitions import triangular_cells
from crystallite.refitting.places import matrix_of, set_layer_
from crystallite.refitting.pruning import eliminate
from crystallite.refitting.recurrent import reads_own_states
from crystallite.refitting.regression import Regression
from crystallite.refitting.running import outputs_of
from crystallite.refitting.session import Session, StageMoments, damage
from crystallite.validation.batches import run

__all__ = ["probe"]

_STEPS = 16  # sizes of each family
_RANKS_ONLY = 64  # of a layer that has no other family
_SAMPLES = 64  # held-out samples on which the damage at the outputs is measured
_PROBED = 0.05  # error of the layer at which it is measured
_BLOCKS = (2, 4, 8)
_BORDERS = (0.125, 0.5)  # multiply-adds of hubs, as shares of the blocks'
_PROMISING = 1.5  # blocks with more than this times the error of a low rank as dear are not looked at further

Factors = tuple[Tensor, Tensor]  # (outputs, ranks) and (ranks, inputs), best first


def probe(
    session: Session, hidden: Sequence[Hidden], progress: bool
) -> tuple[dict[str, LayerCurve], list[NeuronCurve]]:
    """Curves for every layer and every group of hidden neurons; attention heads of the dense model are turned before.

    A layer's own error at each size is known in closed form; what an error of it does to the model's outputs is
    measured once, on held-out samples. Their product is the expected damage. Cost: one run of the model over the data,
    and for each layer a run from it to the end on 64 samples.
    """
    turn_heads_(session, hidden)
    session.roots.update(influence(session))
    layers: dict[str, LayerCurve] = {}
    neurons: dict[str, NeuronCurve] = {}
    readers = {group.reader: group for group in hidden}
    probe_data = _Probe(session)
    handed = session.start()
    for stretch, stages in enumerate(tqdm(session.itinerary.stretches, "probing", disable=not progress)):
        moments = [StageMoments(session, stage) for stage in stages]
        names = [name for stage in stages for name in stage]
        following = []
        for number, (seen, returned) in enumerate(session.seen(session.dense, stretch, handed, names)):
            following.append(returned)
            for stage in moments:
                stage.add(number, seen)
        while moments:
            stage = moments.pop(0)  # its products are large
            for name, regression in stage.regressions().items():
                session.check_samples(name, regression.weight.shape[1], stage.fitted.samples)
                size = (regression.weight.shape[0], regression.weight.shape[1])
                if regression.constant:
                    layers[name] = LayerCurve(size, ((Shape(), 0.0),), session.uses.get(name, 1))
                    continue
                factors = low_rank_factors(regression.weight, regression.metric)
                module = session.units[name].module
                own = None if isinstance(module, Convolution) or name in session.uncut else matrix_of(module)
                options = _layer_options(regression, factors, session.seed, own, reads_own_states(session.dense, name))
                sensitivity = probe_data.sensitivity(name, regression, factors, options, stretch, handed)
                choices = ((shape, sensitivity * error) for shape, error in options)
                layers[name] = LayerCurve(size, ((Shape(), 0.0), *choices), session.uses.get(name, 1))
                if name in readers:
                    curve = _neuron_options(regression, readers[name])
                    neurons[name] = NeuronCurve(readers[name], tuple((n, sensitivity * error) for n, error in curve))
        handed = following
    return layers, list(neurons.values())


def _sizes(largest: float, steps: int = _STEPS) -> list[int]:
    """About so many sizes below the largest, those of wide layers multiples of 8."""
    unit = 8 if largest >= 256 else 1
    found = {unit * math.floor(largest * step / steps / unit) for step in range(1, steps)}
    return sorted((size for size in found if size), reverse=True)


def _layer_options(
    regression: Regression, factors: Factors, seed: int, own: Tensor | None, of_states: bool
) -> list[tuple[Shape, float]]:
    """Shapes of fewer multiply-adds than the dense layer has, each with the layer's held-out error.

    own: the weight of a layer that may be cut into blocks; of_states: it reads what it writes itself, a step before.
    """
    weight, metric = regression.weight, regression.metric
    outputs, inputs = weight.shape
    errors, even = regression.rank_errors(*factors), outputs * inputs / (outputs + inputs)  # a rank that saves nothing
    ranks = [r for r in _sizes(even, _RANKS_ONLY if own is None else _STEPS) if r <= len(errors)]
    found = [(Shape(rank), error) for rank, error in falling([(r, errors[r - 1]) for r in ranks])]

    def add(shape: Shape) -> float:
        error = regression.error(regression.turned(approximate(regression.own, metric, shape)[0]))
        found.append((shape, error))
        return error

    def promising(shape: Shape) -> bool:
        as_dear = max(1, int(shape.macs(outputs, inputs, (outputs, inputs)) / (outputs + inputs)))
        return add(shape) < _PROMISING * errors[as_dear - 1]

    if of_states:
        for groups in _BLOCKS:
            if inputs < 8 * groups or not promising(Shape(0, triangular_cells(regression, groups), triangular=True)):
                break
    if own is None:
        return found
    planted = own_shape(own)
    if planted is not None:
        add(planted)
    for blocks in _BLOCKS:
        if min(outputs, inputs) < 8 * blocks:
            break
        cells, alone = _any_cells(outputs, inputs, blocks, seed), outputs * inputs / blocks
        dear = [alone * (1 + border) for border in _BORDERS]
        joined = promising(replace(with_hubs(regression, cells, dear[-1], rounds=1), draft=True))
        for macs in dear if joined else ():
            add(replace(with_hubs(regression, cells, macs), draft=True))
        if promising(Shape(0, cells, draft=True)):
            add(Shape(max(1, int(even / blocks) // 2), cells, draft=True))
        elif not joined:
            break
    return found


def _any_cells(outputs: int, inputs: int, blocks: int, seed: int) -> Cells:
    """A partition that is quick to have; if blocks are chosen for the layer, a better one is looked for."""
    chance = np.random.default_rng(seed)
    rows, columns = (chance.permutation(np.arange(size) % blocks) for size in (outputs, inputs))
    return tuple((np.flatnonzero(rows == b), np.flatnonzero(columns == b)) for b in range(blocks))


def _neuron_options(regression: Regression, hidden: Hidden) -> list[tuple[int, float]]:
    """How many neurons may be kept, each with the reader's held-out error; all of them first."""
    found = eliminate(regression, _sizes(hidden.size), hidden.width)
    errors = ((count, regression.error(weight, kept)) for count, (kept, weight) in found.items())
    return falling([(hidden.size, 0.0), *errors])


class _Probe:
    """Measures on a few held-out samples what the error of a layer does to the outputs."""

    def __init__(self, session: Session) -> None:
        self.session, self.numbers = session, list[int]()
        samples, first = 0, len(session.data.fitted)
        for number, batch in enumerate(session.data.held_out, first):
            if samples < _SAMPLES:
                self.numbers.append(number)
                samples += batch.size
        self.expected = {number: run(session.dense, session.data.all[number]) for number in self.numbers}

    def sensitivity(
        self,
        name: str,
        regression: Regression,
        factors: Factors,
        options: Sequence[tuple[Shape, float]],
        stretch: int,
        handed: Sequence[Any],
    ) -> float:
        """Damage at the outputs for each unit of error of the layer."""
        usable = [
            (shape, error) for shape, error in options if not shape.cells and error > torch.finfo(torch.float32).eps
        ]
        if not usable:
            return 1.0
        shape, error = min(usable, key=lambda option: abs(math.log(option[1] / _PROBED)))
        weight = factors[0][:, : shape.rank] @ factors[1][: shape.rank]
        module = self.session.dense.get_submodule(name)
        before = {key: value.detach().clone() for key, value in module.named_parameters()}
        set_layer_(module, regression.turned_back(weight), regression.turned_back(regression.bias(weight)))
        batches = self.session.data.all
        found = [
            damage(
                outputs_of(self.session.dense, batches[n], self.session.itinerary, stretch, handed[n]),
                self.expected[n],
                batches[n],
            )
            for n in self.numbers
        ]
        with torch.no_grad():
            for key, value in module.named_parameters():
                value.copy_(before[key])
        return sum(found) / len(found) / error
