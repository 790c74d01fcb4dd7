"""`ModelFit`: a model whose layers and data are known, fitted to one budget after the other, or cut into blocks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.compression.allocation import Allocation, LayerCurve, NeuronCurve, Price, allocate, parameters
from crystallite.compression.assembling import Chooser, assembled, operator_records, sensitive, size_of, unfit
from crystallite.compression.experts import Reach, run_alike
from crystallite.compression.influence import influence
from crystallite.compression.int8_latency import Int8Latency
from crystallite.compression.joint import fit_jointly
from crystallite.compression.latency import Latency
from crystallite.compression.operator_specs import FittedOperator, OperatorSpec
from crystallite.compression.partitions import best_cells
from crystallite.compression.polish import WholeOutputs, polish_, polish_checkpoints
from crystallite.compression.probing import probe
from crystallite.compression.pruning import Prunable, find_prunable_with_experts
from crystallite.compression.recurrent import ExpandedLayer, collapse_recurrent, expand_recurrent, inner_units
from crystallite.compression.sequential import fit_layers_, fitted_operator
from crystallite.compression.session import Session
from crystallite.compression.whole_cost import NOT_ASKED, WholeCost
from crystallite.core.errors import InvalidOption
from crystallite.core.progress import phase
from crystallite.data.batch import check_repeatable, evaluating
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import equal_up_to_rounding, tensors
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.models.composites import expand_, expanded
from crystallite.models.experts import units_and_experts
from crystallite.models.layers import Unit, change, left_alone
from crystallite.models.record import (
    CompressedOptions,
    LayerChange,
    OperatorRecord,
    Record,
    find_record,
    record,
    set_record_,
)
from crystallite.reorganization.blocks import in_blocks
from crystallite.statistics.layer_io import set_layer_
from crystallite.statistics.observer import ForwardPlan
from crystallite.statistics.output_error import mean_output_error
from crystallite.statistics.regression import Regression

__all__ = ["ModelFit", "change_options_"]

_NOT_RUN = "it does not run on the calibration data"
_NOT_CALLED = "the model's code multiplies its weight itself, without calling it"
_LEAST_IN_BLOCKS = 0.5  # `influence` that all directions have: large changes of a layer change its gradients
_LESS = 0.995  # of the share allotted before, where the result was above the budget


@dataclass(frozen=True)
class ModelFit:
    """A model ready to be fitted, once or for several budgets: its layers and data are known."""

    model: nn.Module
    session: Session
    units: dict[str, Unit]  # all layers, also those that are left alone, in the order of the model
    parts: dict[str, list[str]]  # the layers of the session that a layer consists of: itself, or a recurrent one's
    cost: WholeCost
    objective: str  # what a budget is a share of
    form: str  # what layers may become: see `compress`
    progress: bool

    @classmethod
    def of(
        cls, model: nn.Module, data: Calibration, ridge: float, seed: int, targets: str | Sequence[str],
        ignore: str | Sequence[str], in_blocks: bool, objective: str, form: str, progress: bool,
        too_little: Mapping[str, str],
    ) -> ModelFit:  # fmt: skip
        """too_little: layers that there are not enough data for, and that in words; they are left alone."""
        targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
        model = expanded(model)
        dense = copy.deepcopy(model).eval()
        asked = {unit.name for unit in units_and_experts(dense, targets, ignore)}
        units = {unit.name: unit for unit in units_and_experts(dense, ["*"], [])}
        reasons = dict.fromkeys(units.keys() - asked, NOT_ASKED)
        reasons |= {name: unit.reason or unfit(unit, in_blocks) for name, unit in units.items() if name in asked}
        reasons |= too_little
        if all(reasons[name] for name in asked):
            why = next((f": {name}: {reasons[name]}" for name in units if name in asked), "")
            raise InvalidOption(f"no layer that can be fitted matches targets {targets} and ignore {ignore}{why}")
        check_repeatable(dense, data.fitted[0].first(8), "the model")
        example = data.fitted[0].first(2)
        reach = Reach.of(dense, units, data, example)
        plan = ForwardPlan.of(dense, [name for name in units if not reasons[name]], reach.example, reach.loose)
        again = {name for name in plan.reused if units[name].kind == "recurrent"}
        seldom = {name: _NOT_CALLED if reach.counts[name] else _NOT_RUN for name in plan.unused} | dict(reach.reasons)
        seldom |= dict.fromkeys(again, "a recurrent network that runs several times in a call")
        units = {name: replace(unit, reason=reasons[name] or seldom.get(name, "")) for name, unit in units.items()}
        usable = {name: unit for name, unit in units.items() if not unit.reason}
        if not usable:
            raise InvalidOption(f"no layer can be fitted: {next(iter(seldom.values()))}")
        counts = dict(reach.counts)
        dense = expand_recurrent(
            dense, [name for name, unit in usable.items() if unit.kind == "recurrent"], ExpandedLayer
        )
        parts = {name: inner_units(unit, dense) for name, unit in usable.items()}
        inner = {part.name: part for some in parts.values() for part in some}
        counts |= {part.name: counts[name] for name, some in parts.items() for part in some}
        uncut = {part.name for name, some in parts.items() if usable[name].kind == "recurrent" for part in some}
        plan = ForwardPlan.of(dense, list(inner), reach.example, reach.loose)
        cost = WholeCost.of(model, units, counts, objective)
        session = Session(dense, inner, data, plan, ridge, seed, counts, reach.unit, uncut, kernels=cost.each)
        named = {name: [part.name for part in some] for name, some in parts.items()}
        return cls(model, session, units, named, cost, objective, form, progress)

    @cached_property
    def groups(self) -> tuple[Prunable, str]:
        """Neurons that may go, and why there are none where the model cannot be followed."""
        model, session = copy.deepcopy(self.model).eval(), self.session
        with phase("tracing", self.progress):
            found, why = find_prunable_with_experts(model, session.units, session.plan.routed, session.data.fitted[0])
        return replace(found, groups=tuple(g for g in found.groups if self._may_lose(g))), why

    def _may_lose(self, group: NeuronGroup) -> bool:
        """Whether nobody asked for the modules between the layers of a group to stay."""
        if self.form != "any" and group.embedded:  # layers would keep their sizes outwards
            return False
        return not any(name in self.units and self.units[name].reason == NOT_ASKED for name in group.passed)

    @cached_property
    def curves(self) -> tuple[dict[str, LayerCurve], list[NeuronCurve]]:
        """Output error over size, probed once for all budgets."""
        layers, neurons = probe(self.session, self.groups[0].groups, self.progress)
        if self.form != "any":
            layers = {name: replace(curve, options=curve.options[:1]) for name, curve in layers.items()}
        return layers, neurons

    @cached_property
    def price(self) -> Price | None:
        """What the budget counts; None: multiply-adds."""
        if self.objective in ("latency", "int8"):
            return (Latency if self.objective == "latency" else Int8Latency)(self.session, self.groups[0].groups)
        return parameters(self.curves[0]) if self.objective == "parameters" else None

    def allocate(self, budget: float) -> Allocation:
        """Sizes under a budget of the whole model."""
        layers, neurons = self.curves
        rest = self.price.rest if isinstance(self.price, Latency) else self.cost.rest(layers, neurons)
        return allocate(layers, neurons, budget, self.price, rest)

    def reaches(self, budget: float) -> bool:
        """Whether the model can be made so small."""
        try:
            self.allocate(budget)
        except InvalidOption:
            return False
        return True

    def in_budget(self, budget: float) -> nn.Module:
        """The model within a budget.

        What blocks cost depends on which of their neurons go, which is known when the layers are fitted: where the
        result is above the budget, it is fitted again to a little less.
        """
        allotted = budget
        while True:
            result = self._fitted(allotted, budget)
            share = self._share(result)
            if share <= budget:
                return result
            allotted *= min(budget / share, _LESS)

    def _share(self, result: nn.Module) -> float:
        """Of the whole model's cost, as far as it can be counted; time is what was measured when it was allotted."""
        if self.objective == "parameters":
            return size_of(result) / size_of(self.model)
        if self.objective != "macs":
            return 0.0
        changes = record(result).changes
        return sum(each.macs_after for each in changes) / sum(each.macs_before for each in changes)

    def _fitted(self, allotted: float, budget: float) -> nn.Module:
        """The model with layers of the sizes that a budget allots; budget: what was asked for."""
        session, (prunable, untraced) = self.session, self.groups
        allocation = self.allocate(allotted)
        student = copy.deepcopy(session.dense)
        operators = fit_layers_(session, student, Chooser(session, allocation), self.progress)
        recurrent = [name for name in self.parts if self.units[name].kind == "recurrent"]
        result, changes = expand_recurrent(copy.deepcopy(self.model), recurrent), {}
        result, left = assembled(result, session, operators, allocation.compared())
        for name, parts in self.parts.items():
            if name in recurrent:
                result = collapse_recurrent(result, name)
            became = operator_records({part: (operators[part], left[part]) for part in parts}, session)
            changes[name] = self._change(name, became, result.get_submodule(name))
        _check_equal(result, student, session)
        asked = {"budget": budget, "objective": self.objective, "form": self.form}
        notes = {"sensitive": sensitive(allocation), "neurons_kept": untraced, "heads_kept": dict(prunable.reasons)}
        return self._recorded(result, changes, heads_mixed=tuple(sorted(session.mixed)), **asked, **notes)

    def _change(self, name: str, became: Sequence[OperatorRecord], module: nn.Module) -> LayerChange:
        """What became of a layer; multiply-adds count as often as its weight is used."""
        unit, macs = self.units[name], sum(p.numel() for p in module.parameters() if p.ndim > 1)
        found = change(unit, *became, macs=macs, parameters=size_of(module), share=macs / unit.macs)
        calls = self.session.call_counts.get(name) or 1
        return found.used(calls)

    def in_blocks(self, blocks: int, joint: bool) -> nn.Module:
        """The model in blocks."""
        session = self.session
        session.output_factors.update(influence(session, self.progress, _LEAST_IN_BLOCKS))
        arguments = session.data.fitted[0].first(2).arguments
        if joint:
            operators = fit_jointly(session, blocks, arguments, self.progress)
        else:

            def choose(name: str, regression: Regression, samples: int) -> FittedOperator:
                outputs, inputs = regression.weight.shape
                if min(outputs, inputs) < blocks or regression.constant:
                    return fitted_operator(regression, OperatorSpec())
                session.check_samples(name, -(-inputs // blocks), samples)
                return fitted_operator(regression, OperatorSpec(0, best_cells(regression, blocks, session.seed)))

            operators = fit_layers_(session, copy.deepcopy(session.dense), choose, self.progress)
        student = copy.deepcopy(self.model)
        for name, form in operators.items():
            set_layer_(student.get_submodule(name), form.weight, form.bias)
        cut = [name for name, form in operators.items() if form.spec.blocks]
        if not cut:
            raise InvalidOption(f"no layer has the {blocks} outputs and inputs that {blocks} blocks need")
        result = expand_(in_blocks(student, cut, arguments))
        changes = {}
        for c in record(result).changes:
            fit = operators[c.name]
            judged = tuple(replace(o, error=fit.error, repairs=fit.repairs) for o in c.operators)
            changes[c.name] = replace(c, operators=judged).used(session.call_counts.get(c.name) or 1)
        for name, unit in session.units.items():
            if name not in changes:
                size = (unit.matrix.shape[0], unit.matrix.shape[1])
                became: Sequence[OperatorRecord] = [OperatorRecord("dense", reason="not joined with other layers")]
                if name in operators:
                    became = operator_records({name: (operators[name], size)}, session)
                macs, share = unit.macs, unit.kept_share
                stays = change(unit, *became, macs=macs, parameters=unit.parameters, share=share)
                changes[name] = stays.used(session.call_counts.get(name) or 1)
        return self._recorded(result, changes, blocks=blocks, joint=joint)

    def _recorded(self, result: nn.Module, changes: dict[str, LayerChange], **asked: Any) -> nn.Module:
        """The result with a record of what was done to it and what that costs."""
        session = self.session
        with evaluating(result):
            held_out = mean_output_error(result, session.dense, session.data.held_out)
        for name, unit in self.units.items():
            if unit.reason:
                calls, left = session.call_counts.get(name) or 1, _left(result, name, unit)
                alone = left_alone(unit)
                macs, numbers = round(alone.macs_after * left), round(alone.parameters_after * left)
                changes[name] = replace(alone, macs_after=macs, parameters_after=numbers, kept_share=left).used(calls)
        options = CompressedOptions(session.ridge, session.seed, held_out, **asked)
        options = replace(options, data=session.data.size, counted=session.counted)
        exact = find_record(result) or Record(options)
        set_record_(result, replace(exact, options=options, changes=tuple(changes[n] for n in self.units)))
        return result

    def polish_(self, result: nn.Module, steps: int, folder: Path | None) -> None:
        """Train the result inside its structure, and say so in its record."""
        session = self.session
        checkpoints = None if folder is None else polish_checkpoints(folder, self.model, result, session.data, steps)
        compared = WholeOutputs(result, session.dense)
        done = polish_(result, compared, self.parts, session.data, steps, session.seed, checkpoints, self.progress)
        change_options_(result, polish=done, held_out_error=done.after)


def _left(result: nn.Module, name: str, unit: Unit) -> float:
    """Share of a layer that was not fitted which is left: a convolution of single channels goes with its channels."""
    now = [*result.get_submodule(name).parameters()] if unit.kind == "convolution" else []
    return sum(p.numel() for p in now) / sum(p.numel() for p in unit.module.parameters()) if now else 1.0


def change_options_(result: nn.Module, **new: Any) -> None:
    """Give the model a record that says more about how it was compressed."""
    found = record(result)
    set_record_(result, replace(found, options=replace(found.options, **new)))


def _check_equal(result: nn.Module, student: nn.Module, session: Session) -> None:
    """The smaller model must compute what the one it was cut from does."""
    batch = session.data.held_out[0].first(8)
    with evaluating(result):  # a rounding error may send a token to another expert
        expected, found = map(tensors, run_alike(student, result, batch))
    for path, value in expected.items():
        if not equal_up_to_rounding(found[path], value):
            raise InvalidOption(
                f"{path}: the smaller model computes something else than its layers were fitted for; something between "
                "them depends on their size: name the layers around it in ignore="
            )
