"""How much of a layer can go, and how much the model's outputs would suffer: curves of output error over size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from crystallite.compression.allocation import LayerCurve, NeuronCurve, falling
from crystallite.compression.heads import Energy, order_head_numbers_, score_worth
from crystallite.compression.influence import influence
from crystallite.compression.operator_specs import OperatorSpec, approximate, low_rank_factors
from crystallite.compression.pruning import eliminate
from crystallite.compression.session import LayerGroupMoments, Session
from crystallite.core.progress import phase
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of, set_layer_
from crystallite.statistics.observer import Carry, outputs_of
from crystallite.statistics.output_error import output_error
from crystallite.statistics.regression import Regression
from crystallite.structure.decompose import decompose

__all__ = ["probe"]

_STEPS = 16  # sizes of each family
_RANKS_ONLY = 64  # of a layer that has no other family
_SAMPLES = 64  # held-out samples on which the output error is measured
_PROBED = 0.05  # error of the layer at which it is measured
_FULL = 0.9  # of the weights nonzero: no blocks worth looking for

Factors = tuple[Tensor, Tensor]  # (outputs, ranks) and (ranks, inputs), best first


def probe(
    session: Session, groups: Sequence[NeuronGroup], progress: bool
) -> tuple[dict[str, LayerCurve], list[NeuronCurve]]:
    """Curves for every layer and every group of hidden neurons; attention heads of the dense model are rotated first.

    A layer's own error at each size is known in closed form; what an error of it does to the model's outputs is
    measured once, on held-out samples. Their product is the expected output error. Cost: one run of the model over
    the data, and for each layer a run from it to the end on 64 samples.
    """
    with phase("rotating heads", progress):
        order_head_numbers_(session, groups)
    session.output_factors.update(influence(session, progress))
    layers: dict[str, LayerCurve] = {}
    neurons: list[NeuronCurve] = []
    energies: dict[str, Energy] = {}
    readers = {group.reader: group for group in groups if group.readers}
    compared = [group for group in groups if not group.readers]
    probe_data = _Probe(session)
    carry = session.start()
    for segment, layer_groups in enumerate(tqdm(session.plan.segments, "probing", disable=not progress)):
        moments = [LayerGroupMoments(session, layer_group) for layer_group in layer_groups]
        names = [name for layer_group in layer_groups for name in layer_group]
        following = []
        for number, (seen, carried) in enumerate(session.seen(session.dense, segment, carry, names)):
            following.append(carried)
            for layer_group in moments:
                layer_group.add(number, seen)
        while moments:
            layer_group = moments.pop(0)  # its products are large
            for name, regression in layer_group.regressions().items():
                session.check_samples(name, regression.weight.shape[1], layer_group.fitted.samples)
                size = (regression.weight.shape[0], regression.weight.shape[1])
                if any(name in group.writers for group in compared):
                    energies[name] = Energy.of(regression.own, session.units[name].bias, layer_group.fitted)
                if regression.constant:
                    layers[name] = LayerCurve(size, ((OperatorSpec(), 0.0),), session.call_counts.get(name, 1))
                    continue
                factors = low_rank_factors(regression.weight, regression.metric)
                module = session.units[name].module
                own = None if isinstance(module, Convolution) or name in session.uncut else matrix_of(module)
                options = _layer_options(regression, factors, own)
                sensitivity = probe_data.sensitivity(name, regression, factors, options, segment, carry)
                choices = ((spec, sensitivity * error) for spec, error in options)
                layers[name] = LayerCurve(size, ((OperatorSpec(), 0.0), *choices), session.call_counts.get(name, 1))
                if name in readers:
                    curve = _neuron_options(regression, readers[name])
                    costs = tuple((n, sensitivity * error) for n, error in curve)
                    neurons.append(NeuronCurve(readers[name], costs, session.between(readers[name])))
        for group in [group for group in compared if {*group.writers} <= {*names}]:
            neurons.append(_score_curve(group, energies, probe_data, segment, carry))
        carry = following
    return layers, neurons


def _score_curve(
    group: NeuronGroup, energies: Mapping[str, Energy], probe_data: _Probe, segment: int, carry: Sequence[Carry]
) -> NeuronCurve:
    """How many of the numbers in which queries and keys are compared may be kept, the most valuable ones first."""
    worth = score_worth(group, energies)
    order = worth.argsort(descending=True, stable=True)
    lost = 1 - worth[order].cumsum(0) / worth.sum().clamp_min(torch.finfo(torch.float64).tiny)
    options = falling([(group.size, 0.0), *((n, float(lost[n - 1])) for n in _sizes(group.size))])
    usable = [(n, error) for n, error in options if error > torch.finfo(torch.float32).eps]
    if not usable:
        return NeuronCurve(group, tuple(options), order=order)
    count, error = min(usable, key=lambda option: abs(math.log(option[1] / _PROBED)))
    dense, changed = probe_data.session.dense, {}
    for name in group.writers:
        module = dense.get_submodule(name)
        gone = group.lost(name, order[:count]).to(matrix_of(module).device)
        bias = module._parameters.get("bias")
        weight = matrix_of(module).index_fill(0, gone, 0)
        changed[name] = weight, weight[:, 0] if bias is None else bias.detach().index_fill(0, gone, 0)
    sensitivity = probe_data.output_error(changed, segment, carry) / error
    return NeuronCurve(group, tuple((n, sensitivity * own) for n, own in options), order=order)


def _sizes(largest: float, steps: int = _STEPS) -> list[int]:
    """About so many sizes below the largest, those of wide layers multiples of 8."""
    unit = 8 if largest >= 256 else 1
    found = {unit * math.floor(largest * step / steps / unit) for step in range(1, steps)}
    return sorted((size for size in found if size), reverse=True)


def _layer_options(regression: Regression, factors: Factors, own: Tensor | None) -> list[tuple[OperatorSpec, float]]:
    """What needs fewer multiply-adds than the dense layer, each with the layer's held-out error.

    own: the weight of a layer that may become blocks: those that its nonzeros form already. Blocks that cut something
    lose to a low rank at the same cost on every network measured (docs/compression.md); `blocks=` makes them.
    """
    outputs, inputs = regression.weight.shape
    errors, even = regression.rank_errors(*factors), outputs * inputs / (outputs + inputs)  # a rank that saves nothing
    ranks = [r for r in _sizes(even, _RANKS_ONLY if own is None else _STEPS) if r <= len(errors)]
    found = [(OperatorSpec(rank), error) for rank, error in falling([(r, errors[r - 1]) for r in ranks])]
    if own is not None and torch.count_nonzero(own) <= _FULL * own.numel():
        structure = decompose(own, name="weight")
        if structure.n_blocks > 1:
            spec = OperatorSpec(0, tuple(structure.blocks))
            weight = approximate(regression.own, regression.metric, spec)[0]
            found.append((spec, regression.error(regression.whiten(weight))))
    return found


def _neuron_options(regression: Regression, group: NeuronGroup) -> list[tuple[int, float]]:
    """How many neurons may be kept, each with the reader's held-out error; all of them first."""
    found = eliminate(regression, _sizes(group.size), group.places)
    errors = (
        (count, regression.error(weight, group.read(kept).to(weight.device))) for count, (kept, weight) in found.items()
    )
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
        self.expected = {number: session.data.all[number].run(session.dense) for number in self.numbers}

    def sensitivity(
        self,
        name: str,
        regression: Regression,
        factors: Factors,
        options: Sequence[tuple[OperatorSpec, float]],
        segment: int,
        carry: Sequence[Carry],
    ) -> float:
        """Output error for each unit of error of the layer."""
        usable = [
            (spec, error) for spec, error in options if not spec.blocks and error > torch.finfo(torch.float32).eps
        ]
        if not usable:
            return 1.0
        spec, error = min(usable, key=lambda option: abs(math.log(option[1] / _PROBED)))
        weight = factors[0][:, : spec.rank] @ factors[1][: spec.rank]
        changed = regression.unwhiten(weight), regression.unwhiten(regression.bias(weight))
        return self.output_error({name: changed}, segment, carry) / error

    def output_error(self, changed: Mapping[str, tuple[Tensor, Tensor]], segment: int, carry: Sequence[Carry]) -> float:
        """Where some layers have other weights (outputs, inputs) and biases."""
        dense, batches, found = self.session.dense, self.session.data.all, []
        modules = {name: dense.get_submodule(name) for name in changed}
        before = {name: {k: v.detach().clone() for k, v in m.named_parameters()} for name, m in modules.items()}
        for name, (weight, bias) in changed.items():
            set_layer_(modules[name], weight, bias)
        for n in self.numbers:
            outputs = outputs_of(dense, batches[n], self.session.plan, segment, carry[n])
            found.append(float(output_error(outputs, self.expected[n], batches[n])))
        with torch.no_grad():
            for name, module in modules.items():
                for key, value in module.named_parameters():
                    value.copy_(before[name][key])
        return sum(found) / len(found)
