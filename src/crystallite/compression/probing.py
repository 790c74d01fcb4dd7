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

from crystallite.compression.allocation import LayerCurve, NeuronCurve, falling
from crystallite.compression.heads import order_head_numbers_
from crystallite.compression.hubs import own_shape, with_hubs
from crystallite.compression.influence import influence
from crystallite.compression.operator_specs import Blocks, OperatorSpec, approximate, low_rank_factors
from crystallite.compression.partitions import triangular_cells
from crystallite.compression.pruning import eliminate
from crystallite.compression.recurrent import reads_own_states
from crystallite.compression.session import LayerGroupMoments, Session, output_error
from crystallite.data.batch import run
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of, set_layer_
from crystallite.statistics.observer import outputs_of
from crystallite.statistics.regression import Regression

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
    session: Session, groups: Sequence[NeuronGroup], progress: bool
) -> tuple[dict[str, LayerCurve], list[NeuronCurve]]:
    """Curves for every layer and every group of hidden neurons; attention heads of the dense model are rotated first.

    A layer's own error at each size is known in closed form; what an error of it does to the model's outputs is
    measured once, on held-out samples. Their product is the expected damage. Cost: one run of the model over the data,
    and for each layer a run from it to the end on 64 samples.
    """
    order_head_numbers_(session, groups)
    session.output_factors.update(influence(session))
    layers: dict[str, LayerCurve] = {}
    neurons: dict[str, NeuronCurve] = {}
    readers = {group.reader: group for group in groups}
    probe_data = _Probe(session)
    carry = session.start()
    for segment, layer_groups in enumerate(tqdm(session.plan.segments, "probing", disable=not progress)):
        moments = [LayerGroupMoments(session, layer_group) for layer_group in layer_groups]
        names = [name for layer_group in layer_groups for name in layer_group]
        following = []
        for number, (seen, returned) in enumerate(session.seen(session.dense, segment, carry, names)):
            following.append(returned)
            for layer_group in moments:
                layer_group.add(number, seen)
        while moments:
            layer_group = moments.pop(0)  # its products are large
            for name, regression in layer_group.regressions().items():
                session.check_samples(name, regression.weight.shape[1], layer_group.fitted.samples)
                size = (regression.weight.shape[0], regression.weight.shape[1])
                if regression.constant:
                    layers[name] = LayerCurve(size, ((OperatorSpec(), 0.0),), session.call_counts.get(name, 1))
                    continue
                factors = low_rank_factors(regression.weight, regression.metric)
                module = session.units[name].module
                own = None if isinstance(module, Convolution) or name in session.uncut else matrix_of(module)
                options = _layer_options(regression, factors, session.seed, own, reads_own_states(session.dense, name))
                sensitivity = probe_data.sensitivity(name, regression, factors, options, segment, carry)
                choices = ((spec, sensitivity * error) for spec, error in options)
                layers[name] = LayerCurve(size, ((OperatorSpec(), 0.0), *choices), session.call_counts.get(name, 1))
                if name in readers:
                    curve = _neuron_options(regression, readers[name])
                    neurons[name] = NeuronCurve(readers[name], tuple((n, sensitivity * error) for n, error in curve))
        carry = following
    return layers, list(neurons.values())


def _sizes(largest: float, steps: int = _STEPS) -> list[int]:
    """About so many sizes below the largest, those of wide layers multiples of 8."""
    unit = 8 if largest >= 256 else 1
    found = {unit * math.floor(largest * step / steps / unit) for step in range(1, steps)}
    return sorted((size for size in found if size), reverse=True)


def _layer_options(
    regression: Regression, factors: Factors, seed: int, own: Tensor | None, of_states: bool
) -> list[tuple[OperatorSpec, float]]:
    """Shapes of fewer multiply-adds than the dense layer has, each with the layer's held-out error.

    own: the weight of a layer that may be cut into blocks; of_states: it reads what it writes itself, a step before.
    """
    weight, metric = regression.weight, regression.metric
    outputs, inputs = weight.shape
    errors, even = regression.rank_errors(*factors), outputs * inputs / (outputs + inputs)  # a rank that saves nothing
    ranks = [r for r in _sizes(even, _RANKS_ONLY if own is None else _STEPS) if r <= len(errors)]
    found = [(OperatorSpec(rank), error) for rank, error in falling([(r, errors[r - 1]) for r in ranks])]

    def add(spec: OperatorSpec) -> float:
        error = regression.error(regression.whiten(approximate(regression.own, metric, spec)[0]))
        found.append((spec, error))
        return error

    def promising(spec: OperatorSpec) -> bool:
        as_dear = max(1, int(spec.macs(outputs, inputs, (outputs, inputs)) / (outputs + inputs)))
        return add(spec) < _PROMISING * errors[as_dear - 1]

    if of_states:
        for groups in _BLOCKS:
            if inputs < 8 * groups or not promising(
                OperatorSpec(0, triangular_cells(regression, groups), triangular=True)
            ):
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
        joined = promising(replace(with_hubs(regression, cells, dear[-1], rounds=1), provisional=True))
        for macs in dear if joined else ():
            add(replace(with_hubs(regression, cells, macs), provisional=True))
        if promising(OperatorSpec(0, cells, provisional=True)):
            add(OperatorSpec(max(1, int(even / blocks) // 2), cells, provisional=True))
        elif not joined:
            break
    return found


def _any_cells(outputs: int, inputs: int, blocks: int, seed: int) -> Blocks:
    """A partition that is quick to have; if blocks are chosen for the layer, a better one is looked for."""
    rng = np.random.default_rng(seed)
    rows, columns = (rng.permutation(np.arange(size) % blocks) for size in (outputs, inputs))
    return tuple((np.flatnonzero(rows == b), np.flatnonzero(columns == b)) for b in range(blocks))


def _neuron_options(regression: Regression, group: NeuronGroup) -> list[tuple[int, float]]:
    """How many neurons may be kept, each with the reader's held-out error; all of them first."""
    found = eliminate(regression, _sizes(group.size), group.width)
    errors = ((count, regression.error(weight, kept)) for count, (kept, weight) in found.items())
    return falling([(group.size, 0.0), *errors])


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
        options: Sequence[tuple[OperatorSpec, float]],
        segment: int,
        carry: Sequence[Any],
    ) -> float:
        """Damage at the outputs for each unit of error of the layer."""
        usable = [
            (spec, error) for spec, error in options if not spec.blocks and error > torch.finfo(torch.float32).eps
        ]
        if not usable:
            return 1.0
        spec, error = min(usable, key=lambda option: abs(math.log(option[1] / _PROBED)))
        weight = factors[0][:, : spec.rank] @ factors[1][: spec.rank]
        module = self.session.dense.get_submodule(name)
        before = {key: value.detach().clone() for key, value in module.named_parameters()}
        set_layer_(module, regression.unwhiten(weight), regression.unwhiten(regression.bias(weight)))
        batches = self.session.data.all
        found = [
            output_error(
                outputs_of(self.session.dense, batches[n], self.session.plan, segment, carry[n]),
                self.expected[n],
                batches[n],
            )
            for n in self.numbers
        ]
        with torch.no_grad():
            for key, value in module.named_parameters():
                value.copy_(before[key])
        return sum(found) / len(found) / error
