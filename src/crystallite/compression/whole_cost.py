"""What a whole model costs, and how much of it lies in layers that can be fitted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from torch import nn

from crystallite.compression.allocation import LayerCurve, NeuronCurve
from crystallite.core.errors import CrystalliteWarning, InvalidOption
from crystallite.models.layers import Unit

__all__ = ["NOT_ASKED", "WholeCost", "budgets_of"]

NOT_ASKED = "not asked for by targets= and ignore="
_COUNTED = {"macs": "multiply-adds", "parameters": "parameters"}


def budgets_of(budget: float | Sequence[float]) -> tuple[float, ...]:
    """The budgets that were asked for, one or several.

    >>> budgets_of(0.5), budgets_of([0.9, 0.8])
    ((0.5,), (0.9, 0.8))
    """
    found = tuple(budget) if isinstance(budget, Sequence) else (budget,)
    for share in found:
        if not isinstance(share, Real) or not 0 < share <= 1:
            raise InvalidOption(f"budget: expected a share of the model's cost above 0 and up to 1, got {share!r}")
    if not found or len({f"{share:g}" for share in found}) < len(found):
        raise InvalidOption(f"budget: expected shares that differ in their first six digits, got {budget!r:.200}")
    return found


@dataclass(frozen=True)
class WholeCost:
    """Multiply-adds, or parameters, of a whole model; a measured time is known only when it is measured."""

    objective: str
    total: float
    fitted: float  # in layers that can be fitted
    largest: tuple[tuple[str, float, str], ...]  # what is left alone: name, cost, reason; most expensive first
    each: Mapping[str, float]  # convolution of single channels → cost of a channel

    @classmethod
    def of(cls, model: nn.Module, units: Mapping[str, Unit], counts: Mapping[str, float], objective: str) -> WholeCost:
        """counts: how often each layer is used."""
        in_parameters = objective == "parameters"

        def cost(name: str, unit: Unit) -> float:
            return unit.parameters if in_parameters else unit.macs * (counts.get(name) or 1)

        costs = {name: cost(name, unit) for name, unit in units.items()}
        total = sum(p.numel() for p in model.parameters()) if in_parameters else sum(costs.values())
        left = sorted(((n, costs[n], u.reason) for n, u in units.items() if u.reason), key=lambda one: -one[1])
        grouped = [n for n, u in units.items() if u.kind == "convolution" and getattr(u.module, "groups", 1) > 1]
        each = {name: costs[name] / len(units[name].module.get_parameter("weight")) for name in grouped}
        fitted = sum(costs[name] for name, unit in units.items() if not unit.reason)
        return cls(objective, total, fitted, tuple(left), each)

    def rest(self, layers: Mapping[str, LayerCurve], neurons: Sequence[NeuronCurve]) -> float:
        """What all costs but the layers that are allotted sizes, and what their neurons pass."""
        weights = sum(
            curve.size[0] * curve.size[1] * (1 if self.objective == "parameters" else curve.call_counts)
            for curve in layers.values()
        )
        return self.total - weights - sum(curve.each * curve.group.size for curve in neurons)

    def check(self, budget: float | None) -> None:
        """Refuse a budget that cannot be reached, and say where most of the model stays as it is."""
        if self.objective not in _COUNTED or not self.total:
            return
        what, share = _COUNTED[self.objective], self.fitted / self.total
        named = "; ".join(f"{name} ({cost / self.total:.0%}): {why}" for name, cost, why in self.largest[:3] if cost)
        text = f"the layers that can be fitted hold {share:.0%} of the model's {what}; left alone: {named}"
        if budget is not None and budget <= 1 - share:
            raise InvalidOption(f"budget {budget:g} cannot be reached: {text}")
        asked = self.total - sum(cost for _, cost, why in self.largest if why == NOT_ASKED)
        if self.fitted < asked / 2:
            warnings.warn(text, CrystalliteWarning, stacklevel=4)
