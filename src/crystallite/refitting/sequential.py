"""Layer after layer fitted to what the dense model writes there, from what the fitted model reads there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm

from crystallite.refitting.forms import Form, Shape, approximate
from crystallite.refitting.places import set_layer_
from crystallite.refitting.recurrent import reads_own_states
from crystallite.refitting.regression import Regression
from crystallite.refitting.running import Seen, outputs_of
from crystallite.refitting.session import Session, StageMoments, damage
from crystallite.validation.batches import run

__all__ = ["fit_layers_", "form_of"]

_ROUNDS = 3  # at most, in which a recurrent layer is fitted to its own states again


def fit_layers_(
    session: Session, model: nn.Module, choose: Callable[[str, Regression, int], Form], progress: bool
) -> dict[str, Form]:
    """Give every layer of a copy of the dense model the weight that is chosen for it, in place, and return the forms.

    choose: the form of a layer, from its name, its regression and the number of samples. A layer is fitted to what the
    dense model writes, from what the layers before it leave; where its output is added to a residual stream, it also
    makes good for what that stream has lost. Layers keep their size: what they do not use is zero.

    Cost: two runs of the model, and for each stage a run of the copy's stretch up to it. Memory: what the
    layers of one stretch write on the rows fitted on, and one value handed on for each batch, twice.
    """
    forms: dict[str, Form] = {}
    handed, dense_handed = session.start(), session.start()
    for stretch, stages in enumerate(tqdm(session.itinerary.stretches, "fitting", disable=not progress)):
        names = [name for stage in stages for name in stage]
        targets, dense_next = [], []
        for seen, returned in session.seen(session.dense, stretch, dense_handed, names):
            targets.append({name: (one.outputs, one.residual) for name, one in seen.items()})
            dense_next.append(returned)
        here = _Stretch(session, model, stretch, handed, targets, choose)
        for i, stage in enumerate(stages):
            forms |= here.fit_(stage, stages[i + 1][0] if i + 1 < len(stages) else None)
            shape = forms[stage[0]].shape
            if reads_own_states(model, stage[0]) and (shape.rank or shape.cells):
                forms |= here.fit_again_(stage, forms[stage[0]])
        handed, dense_handed = session.advance(model, stretch, handed), dense_next
    return forms


@dataclass(frozen=True)
class _Stretch:
    """A stretch of a copy of the dense model while its layers are fitted."""

    session: Session
    model: nn.Module
    number: int
    handed: list[Any]  # to the copy, for each batch
    targets: list[dict[str, tuple[Tensor, Tensor | None]]]  # what the dense layers write, and what is added to it
    choose: Callable[[str, Regression, int], Form]

    def fit_(self, stage: Sequence[str], following: str | None) -> dict[str, Form]:
        """Give layers that read the same tensor their forms, in place; following: the layer after them."""
        session, moments, forms = self.session, StageMoments(self.session, stage), {}
        adds = [name for name in stage if self.targets[0][name][1] is not None]  # to a stream: see what became of it
        until, names = (following, stage) if adds else (stage[0], ())
        for number, (found, _) in enumerate(session.seen(self.model, self.number, self.handed, names, until)):
            wanted = {name: _target(*self.targets[number][name], found.get(name)) for name in stage}
            moments.add(number, found, wanted)
        for name, regression in moments.regressions().items():
            forms[name] = self.choose(name, regression, moments.fitted.samples)
            set_layer_(self.model.get_submodule(name), forms[name].weight, forms[name].bias)
        return forms

    def fit_again_(self, stage: Sequence[str], form: Form) -> dict[str, Form]:
        """Fit what reads its own states to those that it has since it was fitted, as long as that helps."""
        error = self._held_out_error()
        for _ in range(_ROUNDS):
            found = self.fit_(stage, None)[stage[0]]
            after = self._held_out_error()
            if after >= error:
                set_layer_(self.model.get_submodule(stage[0]), form.weight, form.bias)
                break
            form, error = found, after
        return {stage[0]: form}

    def _held_out_error(self) -> float:
        session, found = self.session, []
        for number, batch in enumerate(session.data.held_out, len(session.data.fitted)):
            outputs = outputs_of(self.model, batch, session.itinerary, self.number, self.handed[number])
            found.append(damage(outputs, run(session.dense, batch), batch))
        return sum(found) / len(found)


def _target(outputs: Tensor, residual: Tensor | None, found: Seen | None) -> Tensor:
    if residual is None or found is None or found.residual is None:
        return outputs
    return outputs + (residual - found.residual)


def form_of(regression: Regression, shape: Shape) -> Form:
    """The best form of a shape."""
    if shape.cells:
        weight, up, down = approximate(regression.own, regression.metric, shape)
        turned = regression.turned(weight)
        return Form(shape, weight, regression.turned_back(regression.bias(turned)), regression.error(turned), up, down)
    turned, up, down = approximate(regression.weight, regression.metric, shape)
    weight, bias = (regression.turned_back(part) for part in (turned, regression.bias(turned)))
    up = None if up is None else regression.turned_back(up)
    return Form(shape, weight, bias, regression.error(turned), up, down)
