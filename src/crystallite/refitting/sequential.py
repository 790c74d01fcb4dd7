"""Layer after layer fitted to what the dense model writes there, from what the fitted model reads there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.refitting.forms import Form, Shape, approximate
from crystallite.refitting.regression import Regression
from crystallite.refitting.running import Seen
from crystallite.refitting.session import Session, StageMoments

__all__ = ["fit_layers_", "form_of", "set_layer_"]


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
        for i, stage in enumerate(stages):
            moments = StageMoments(session, stage)
            adds = [name for name in stage if targets[0][name][1] is not None]  # to a stream: see what has become of it
            until = stage[0] if not adds else stages[i + 1][0] if i + 1 < len(stages) else None
            for number, (found, _) in enumerate(session.seen(model, stretch, handed, stage if adds else (), until)):
                moments.add(number, found, {name: _target(*targets[number][name], found.get(name)) for name in stage})
            for name, regression in moments.regressions().items():
                forms[name] = choose(name, regression, moments.fitted.samples)
                set_layer_(model.get_submodule(name), forms[name].weight, forms[name].bias)
        handed, dense_handed = session.advance(model, stretch, handed), dense_next
    return forms


def _target(outputs: Tensor, residual: Tensor | None, found: Seen | None) -> Tensor:
    if residual is None or found is None or found.residual is None:
        return outputs
    return outputs + (residual - found.residual)


def form_of(regression: Regression, shape: Shape) -> Form:
    """The best form of a shape."""
    weight, up, down = approximate(regression.weight, regression.metric, shape)
    return Form(shape, weight, regression.bias(weight), regression.error(weight), up, down)


@torch.no_grad()
def set_layer_(module: Any, weight: Tensor, bias: Tensor) -> None:
    """Give a dense layer other numbers, in place; one that stores its weight (inputs, outputs) too."""
    module.weight.copy_(weight if isinstance(module, nn.Linear) else weight.T)
    if module.bias is not None:
        module.bias.copy_(bias)
