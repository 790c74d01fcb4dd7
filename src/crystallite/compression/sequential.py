"""Layer after layer fitted to what the dense model writes there, from what the fitted model reads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.operator_specs import FittedOperator, OperatorSpec, approximate
from crystallite.compression.recurrent import reads_own_states
from crystallite.compression.session import LayerGroupMoments, Session
from crystallite.statistics.layer_io import set_layer_
from crystallite.statistics.observer import Carry, Seen, outputs_of
from crystallite.statistics.output_error import output_error
from crystallite.statistics.regression import Regression

__all__ = ["fit_layers_", "fitted_operator"]

_ROUNDS = 3  # at most, in which a recurrent layer is fitted to its own states again


def fit_layers_(
    session: Session, model: nn.Module, choose: Callable[[str, Regression, int], FittedOperator], progress: bool
) -> dict[str, FittedOperator]:
    """Give every layer of a copy of the dense model the operator that is chosen for it, in place; returns them.

    choose: the operator of a layer, from its name, its regression and the number of samples. A layer is fitted to what
    the dense model writes, from what the layers before it leave; where its output is added to a residual stream, it
    also makes good for what that stream has lost. Layers keep their size: what they do not use is zero.

    Cost: two runs of the model, and for each group of layers a run of the copy's segment up to it. Memory: what the
    layers of one segment write on the rows fitted on, and the carry of each batch, twice.
    """
    operators: dict[str, FittedOperator] = {}
    carry, dense_carry = session.start(), session.start()
    for segment, layer_groups in enumerate(tqdm(session.plan.segments, "fitting", disable=not progress)):
        names = [name for layer_group in layer_groups for name in layer_group]
        targets, dense_next = [], []
        for seen, following in session.seen(session.dense, segment, dense_carry, names):
            targets.append({name: (one.outputs, one.residual) for name, one in seen.items()})
            dense_next.append(following)
        here = _Segment(session, model, segment, carry, targets, choose)
        for i, layer_group in enumerate(layer_groups):
            operators |= here.fit_(layer_group, layer_groups[i + 1][0] if i + 1 < len(layer_groups) else None)
            spec = operators[layer_group[0]].spec
            if reads_own_states(model, layer_group[0]) and (spec.rank or spec.blocks):
                operators |= here.fit_again_(layer_group, operators[layer_group[0]])
        carry, dense_carry = session.advance(model, segment, carry), dense_next
    return operators


@dataclass(frozen=True)
class _Segment:
    """A segment of a copy of the dense model while its layers are fitted."""

    session: Session
    model: nn.Module
    number: int
    carry: list[Carry]  # of the copy, for each batch
    targets: list[dict[str, tuple[Tensor, Tensor | None]]]  # what the dense layers write, and what is added to it
    choose: Callable[[str, Regression, int], FittedOperator]

    def fit_(self, layer_group: Sequence[str], following: str | None) -> dict[str, FittedOperator]:
        """Give layers that read the same tensor their operators, in place; following: the layer after them."""
        session, moments, operators = self.session, LayerGroupMoments(self.session, layer_group), {}
        adds = [
            name for name in layer_group if self.targets[0][name][1] is not None
        ]  # to a stream: see what became of it
        until, names = (following, layer_group) if adds else (layer_group[0], ())
        if {*layer_group} & session.plan.reused:
            until, names = None, layer_group  # all calls
        for number, (found, _) in enumerate(session.seen(self.model, self.number, self.carry, names, until)):
            wanted = {name: _target(*self.targets[number][name], found.get(name)) for name in layer_group}
            # of experts in a list, other positions may arrive than in the dense model: they are fitted to themselves
            moments.add(number, found, None if session.plan.routed.issuperset(layer_group) else wanted)
        for name, regression in moments.regressions().items():
            chosen = self.choose(name, regression, moments.fitted.samples)
            operators[name] = replace(chosen, repairs=name in adds)
            set_layer_(self.model.get_submodule(name), operators[name].weight, operators[name].bias)
        return operators

    def fit_again_(self, layer_group: Sequence[str], form: FittedOperator) -> dict[str, FittedOperator]:
        """Fit what reads its own states to those that it has since it was fitted, as long as that helps."""
        error = self._held_out_error()
        for _ in range(_ROUNDS):
            found = self.fit_(layer_group, None)[layer_group[0]]
            after = self._held_out_error()
            if after >= error:
                set_layer_(self.model.get_submodule(layer_group[0]), form.weight, form.bias)
                break
            form, error = found, after
        return {layer_group[0]: form}

    def _held_out_error(self) -> float:
        session, found = self.session, []
        for number, batch in enumerate(session.data.held_out, len(session.data.fitted)):
            outputs = outputs_of(self.model, batch, session.plan, self.number, self.carry[number])
            found.append(float(output_error(outputs, batch.run(session.dense), batch)))
        return sum(found) / len(found)


def _target(outputs: Tensor, residual: Tensor | None, found: Seen | None) -> Tensor:
    if residual is None or found is None or found.residual is None:
        return outputs
    return outputs + (residual - found.residual)


def fitted_operator(regression: Regression, spec: OperatorSpec) -> FittedOperator:
    """The best operator of a spec."""
    if spec.blocks:
        weight, up, down = approximate(regression.own, regression.metric, spec, regression.output_metric)
        whitened = regression.whiten(weight)
        return FittedOperator(
            spec, weight, regression.unwhiten(regression.bias(whitened)), regression.error(whitened), up, down
        )
    whitened, up, down = approximate(regression.weight, regression.metric, spec)
    weight, bias = (regression.unwhiten(part) for part in (whitened, regression.bias(whitened)))
    up = None if up is None else regression.unwhiten(up)
    return FittedOperator(spec, weight, bias, regression.error(whitened), up, down)
