"""What a layer costs in time: measured, for whatever it may become."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from crystallite.compression.operator_specs import FittedOperator, OperatorSpec
from crystallite.compression.session import Session
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.operators.conv import Convolution
from crystallite.statistics.layer_io import matrix_of
from crystallite.statistics.watching import watching

__all__ = ["Latency"]

RUNS = 5  # the best of which counts


class Latency:
    """The seconds that a layer takes for the first batch of the calibration data, on as many threads as PyTorch uses.

    Measured when asked for, and once for all layers that are alike. What a layer reads is what it reads in the dense
    model, cut to the inputs that are left. The product of a recurrent layer with its states is timed for all steps at
    once, which is quicker than step by step.
    """

    def __init__(self, session: Session, groups: Sequence[NeuronGroup] = ()) -> None:
        """groups: hidden neurons; layers around those that are embedded keep their sizes outwards."""
        self.session, self.known = session, dict[Any, float]()
        self.embedded = {name for group in groups if group.embedded for name in group.layers}
        with watching(session.dense, session.units) as calls:
            session.data.fitted[0].run(session.dense)
        nothing = {name: matrix_of(unit.module)[:0] for name, unit in session.units.items()}  # of experts in a list
        self.read: dict[str, Tensor] = {
            name: own[-1].inputs[0] if own else nothing[name] for name, own in calls.items()
        }

    @cached_property
    def rest(self) -> float:
        """Seconds that the model takes beside its layers, which stay as they are."""
        batch, best = self.session.data.fitted[0], math.inf
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            batch.run(self.session.dense)
            best = min(best, time.perf_counter() - start)
        sizes = {name: matrix_of(unit.module).shape for name, unit in self.session.units.items()}
        return max(best - sum(self(name, OperatorSpec(), *size) for name, size in sizes.items()), 0.0)

    def __call__(self, name: str, spec: OperatorSpec, outputs: int, inputs: int) -> float:
        """Seconds of a layer that has become this shape and has so many outputs and inputs left."""
        module, x = self.session.units[name].module, self.read[name]
        sizes = tuple((len(rows), len(columns)) for rows, columns in spec.blocks)
        whole = matrix_of(module).shape
        embedded = name in self.embedded and (outputs, inputs) != whole
        key = (type(module), whole, x.shape, spec.rank, sizes, outputs, inputs, embedded)
        if key not in self.known:
            self.known[key] = self._measured(module, x, spec, outputs, inputs, embedded)
        return self.known[key]

    def _measured(self, module: Any, x: Tensor, spec: OperatorSpec, outputs: int, inputs: int, embedded: bool) -> float:
        whole = matrix_of(module).double()
        up, down = (
            (None, None) if not spec.rank else (whole[:, :1].expand(-1, spec.rank), whole[:1].expand(spec.rank, -1))
        )
        form = FittedOperator(spec, whole, whole[:, 0], 0.0, up, down)
        rows, columns = (
            torch.arange(most - left, most) for most, left in zip(whole.shape, (outputs, inputs), strict=True)
        )
        operator = form.build(rows, columns, module, embedded).eval()
        if isinstance(module, Convolution):
            channels = inputs // math.prod(module.kernel_size)
            x = x.narrow(-1 - len(module.kernel_size), 0, channels)
        elif not embedded:
            x = x[..., :inputs]
        x, best = x.contiguous(), math.inf
        with torch.inference_mode():
            for _ in range(1 + RUNS):
                start = time.perf_counter()
                operator(x)
                best = min(best, time.perf_counter() - start)
        return best
