"""What was allocated becomes forms, and forms become modules in the places of the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.compression.allocation import Allocation
from crystallite.compression.operator_specs import FittedOperator
from crystallite.compression.pruning import eliminate
from crystallite.compression.sequential import fitted_operator
from crystallite.compression.session import Session
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.models.layers import Unit, plain_layer
from crystallite.models.record import OperatorKind, OperatorRecord
from crystallite.models.swap import replace_
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of, set_layer_
from crystallite.statistics.regression import Regression

__all__ = ["Chooser", "assembled", "operator_records", "sensitive", "size_of", "unfit"]


def unfit(unit: Unit, in_blocks: bool) -> str:
    """Why a layer cannot be fitted, or an empty string; in_blocks: not even to be cut into blocks."""
    module, kind = unit.module, type(unit.module).__name__
    if unit.kind == "linear" or (isinstance(module, Convolution) and module.groups == 1 and not in_blocks):
        return ""
    if isinstance(module, Convolution) and module.groups > 1:
        return f"the {module.groups} groups of its channels are apart already"
    if isinstance(module, nn.RNNBase) and not in_blocks:
        return ""
    if in_blocks and isinstance(module, (Convolution, nn.RNNBase)):
        return f"only linear layers are fitted in blocks, this is a {kind}"
    return f"no smaller operator is fitted to a {kind}"


Kept = tuple[NeuronGroup, Tensor]  # and the neurons that are left


class Chooser:
    """Gives each layer the form that was allocated to it."""

    def __init__(self, session: Session, allocation: Allocation) -> None:
        self.session, self.allocation = session, allocation
        self.compared = allocation.compared()

    def __call__(self, name: str, regression: Regression, samples: int) -> FittedOperator:
        form = self._fitted(name, regression)
        for group, left in self.compared:
            if name in group.writers:
                form = form.without_outputs(group.lost(name, left).to(form.weight.device))
        return form

    def _fitted(self, name: str, regression: Regression) -> FittedOperator:
        read, spec = self.allocation.read_by(name), self.allocation.spec(name)
        if read is None:
            return fitted_operator(regression, spec)
        group, count = read
        neurons, _ = eliminate(regression, [count], group.places)[count]
        kept = group.read(neurons).to(regression.metric.device)
        inner, inputs, numbers = regression.restricted(kept), len(regression.metric), kept.cpu().numpy()
        place = np.full(inputs, -1)
        place[numbers] = np.arange(len(kept))
        cells = tuple((rows, place[columns][place[columns] >= 0]) for rows, columns in spec.blocks)
        form = fitted_operator(inner, replace(spec, blocks=cells))
        whole = tuple((rows, numbers[columns]) for rows, columns in form.spec.blocks)
        return replace(
            form,
            spec=replace(form.spec, blocks=whole),
            weight=_spread(form.weight, kept, inputs),
            down=None if form.down is None else _spread(form.down, kept, inputs),
            kept=kept,
            neurons=(group, neurons),
        )


def _spread(matrix: Tensor, columns: Tensor, size: int) -> Tensor:
    """A matrix of more columns, zero where it had none."""
    whole = matrix.new_zeros(len(matrix), size)
    whole[:, columns] = matrix
    return whole


def assembled(
    model: nn.Module, session: Session, operators: Mapping[str, FittedOperator], compared: Sequence[Kept]
) -> tuple[nn.Module, dict[str, tuple[int, int]]]:
    """The model, in place, with an operator for each form, and how many outputs and inputs of each layer are left.

    compared: numbers of queries and keys that are left.
    """
    gone: dict[str, Tensor] = {}
    embedded: set[str] = set()
    for group, neurons in [*compared, *(form.neurons for form in operators.values() if form.neurons is not None)]:
        for writer in group.writers:
            rows = group.lost(writer, neurons)
            gone[writer] = torch.cat([gone[writer], rows]) if writer in gone else rows
        embedded |= {*group.layers} if group.embedded else set()
        if not group.embedded:
            for name in group.passed:
                model = replace_(model, name, _smaller(model.get_submodule(name), neurons.sort().values))
    left = {}
    for name, unit in session.units.items():
        form, size = operators[name], matrix_of(unit.module).shape
        outputs = torch.arange(size[0])
        outputs = outputs[~torch.isin(outputs, gone[name])] if name in gone else outputs
        inputs = torch.arange(size[1]) if form.kept is None else form.kept.cpu()
        left[name] = (len(outputs), len(inputs))
        old = plain_layer(model.get_submodule(name))
        if (form.spec.rank or form.spec.blocks) or left[name] != size:
            model = replace_(model, name, form.build(outputs, inputs, old, name in embedded))
        else:
            set_layer_(old, form.weight, form.bias)
    return model, left


def _smaller(module: Any, kept: Tensor) -> nn.Module:
    """A batch norm, or a convolution of each channel by itself, of some of the channels."""
    if isinstance(module, Convolution):
        found = type(module)(
            len(kept), len(kept), module.kernel_size, module.stride, module.padding, module.dilation,  # type: ignore[arg-type]
            len(kept), module.bias is not None, module.padding_mode, module.weight.device, module.weight.dtype,
        )  # fmt: skip
    else:
        found = type(module)(len(kept), module.eps, module.momentum, module.affine, module.track_running_stats)
    for name, value in module.state_dict().items():
        getattr(found, name).data = value[kept.to(value.device)].clone() if value.ndim else value.clone()
    return found


def operator_records(
    parts: Mapping[str, tuple[FittedOperator, tuple[int, int]]], session: Session
) -> tuple[OperatorRecord, ...]:
    """What a layer, or each product of a recurrent one, became, and its held-out error."""
    records = []
    for name, (form, left) in parts.items():
        (outputs, inputs), spec = matrix_of(session.units[name].module).shape, form.spec
        kind: OperatorKind = "blocks" if spec.blocks else "low rank" if spec.rank else "dense"
        records.append(
            OperatorRecord(
                kind,
                len(spec.blocks) or 1,
                spec.rank,
                outputs=(left[0], outputs),
                inputs=(left[1], inputs),
                part=_product_name(name, len(parts)),
                reason="fitted again" if kind == "dense" else "",
                error=form.error,
                repairs=form.repairs,
            )
        )
    return tuple(records)


def _product_name(name: str, products: int) -> str:
    """Which product of a recurrent layer this is, where there are several."""
    layer, kind = name.split(".")[-2:] if products > 1 else ("", "")
    return f"{kind.replace('recurrent', 'state')}s{f' {layer}' * (products > 2)}" if kind else ""


def sensitive(allocation: Allocation) -> dict[str, float]:
    """Layers that stayed as they are, and the output error that half of their multiply-adds would add; worst first."""
    thinned = [curve.group for i, curve in enumerate(allocation.neurons) if allocation.chosen.get(i, 0)]
    smaller = {name for group in thinned for name in group.layers}
    found = {}
    for name, curve in allocation.layers.items():
        outputs, inputs = curve.size
        halved = [d for spec, d in curve.options if spec.macs(outputs, inputs, curve.size) <= outputs * inputs / 2]
        if not allocation.chosen.get(name, 0) and name not in smaller and halved:
            found[name] = min(halved)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def size_of(module: nn.Module) -> int:
    """Numbers in a module."""
    return sum(p.numel() for p in module.parameters())
