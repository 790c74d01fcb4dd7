"""Operators that are cut, and called without an engine."""

import torch

from crystallite.serving import Machine
from crystallite.serving.cuts.calls import calls_go_to
from crystallite.serving.interface import NamedModel, computed
from crystallite.serving.network import Call
from crystallite.serving.plan import arrange

FREE = Machine(hop=0.0, macs_per_second=1e9, bytes_per_second=1e9)  # a hop costs nothing: whatever can be cut is


class CutOperator:
    """What takes an operator's place, or the operator if it is not cut, called in its way.

    Remembers which pieces were called, round by round.
    """

    def __init__(self, operator, machine=FREE):
        self.plan, self.network = arrange(operator.eval(), 1, machine)
        (step,) = self.network.steps
        module = self.network.modules["model"] if isinstance(step, Call) else step.module
        self.module = module.model if isinstance(module, NamedModel) else module
        self.rounds = []

    def __call__(self, *inputs):
        def call(requests):
            self.rounds.append([piece for piece, _ in requests])
            return [computed(self.network.modules[piece], given) for piece, given in requests]

        with torch.no_grad(), calls_go_to(call):
            return self.module(*inputs)

    @property
    def is_cut(self):
        return len(self.plan.pieces) > 1
