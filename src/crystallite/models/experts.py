"""Stacks of experts, recognised by what they hold and compute, and taken apart into layers like any others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from crystallite.models.layers import Unit, find_units, has_hooks
from crystallite.models.swap import put_
from crystallite.operators.experts import Experts, Gating, StackLayout, holds_stacks

__all__ = [
    "collapse_experts",
    "expand_experts",
    "holds_stacks",
    "recognise_experts",
    "units_and_experts",
]

_TOKENS = 6  # of the trial that tells what a module computes
_SCALES = (1.0, 6.0)  # of what its gates get: small numbers, and some that are clipped where a gate clips
_TOLERANCE = 1e-3  # of float32, relative to the size of the outputs
_ACTIVATIONS = (nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU())
_SHIFTS = (0.0, 1.0)


class _Form(NamedTuple):
    layout: StackLayout
    activation: nn.Module | None
    gating: Gating


def expand_experts(model: nn.Module) -> nn.Module:
    """The model, in place, with `Experts` wherever a module holds experts as stacks in a way that is known.

    Others stay: `units_and_experts` says why.
    """
    for name, module in list(model.named_modules()):
        found = recognise_experts(module) if holds_stacks(module) and not _shared(model, module) else None
        if isinstance(found, _Form):
            model = put_(model, name, Experts.from_stack(module, *found))
    return model


def collapse_experts(model: nn.Module) -> nn.Module:
    """The model, in place, with the modules that its `Experts` stand for, where no expert has become smaller."""
    for name, module in list(model.named_modules()):
        dense = module.to_dense() if isinstance(module, Experts) else None
        if dense is not None:
            model = put_(model, name, dense)
    return model


def units_and_experts(model: nn.Module, targets: Sequence[str], ignore: Sequence[str]) -> list[Unit]:
    """What `find_units` finds in a model whose experts were expanded; of stacks that were not, why."""
    units = []
    for unit in find_units(model, targets, ignore):
        why = (_shared(model, unit.module) or recognise_experts(unit.module)) if holds_stacks(unit.module) else ""
        units.append(replace(unit, reason=why) if why and isinstance(why, str) else unit)
    return units


def _shared(model: nn.Module, module: nn.Module) -> str:
    places = Counter(id(each) for _, each in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for each in model.modules() for p in each._parameters.values())
    if has_hooks(module):
        return "hooks are attached to it"
    tied = any(owners[id(p)] > 1 for p in module._parameters.values() if p is not None)
    return "its weights are tied" if tied or places[id(module)] > 1 else ""


@torch.no_grad()
def recognise_experts(module: nn.Module) -> _Form | str:
    """How a module with stacks of weights computes its experts, or why that is not known.

    It is called as (hidden states, indices of experts, their weights) on random numbers, and so is every known form:
    matrices stored (outputs, inputs) or turned, gate and up in one stack, after each other or in turns, or in stacks of
    their own; with the activation that the module holds, plain or clipped. The one that computes the same is it.
    """
    if any(p.is_meta for p in module.parameters()):
        return "its weights are on the meta device: load them first"
    layouts = list(_layouts(module))
    if not layouts:
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())
        return f"its stacks do not fit together as the layers of experts: {shapes}"
    parameters = {name: _precise(p) for name, p in module.named_parameters()}
    rng, called, error_text = torch.Generator().manual_seed(0), False, ""
    for layout in layouts:
        views = {(role, kind): view for role, kind, view in layout.views(parameters)}
        trials = [_Trial.draw(views, scale * limit, rng) for scale, limit in _scales(module)]
        try:
            expected = [functional_call(module, parameters, trial.arguments) for trial in trials]
        except Exception as error:  # whatever the module's own code raises
            error_text = next(iter(str(error).strip().splitlines()), type(error).__name__)
            continue
        called = True
        for activation, gating in _between(module, "gate" in layout.weights):
            if all(_equal(t.run(views, activation, gating), y) for t, y in zip(trials, expected, strict=True)):
                return _Form(layout, activation, gating)
    if not called:
        return f"it cannot be called with hidden states, indices of experts and weights: {error_text:.120}"
    return "it computes something else than feed-forward experts of a kind that is known"


class _Trial(NamedTuple):
    """Random tokens, and the experts that they are sent to."""

    x: Tensor  # (tokens, features)
    experts: Tensor  # (tokens, 2)
    weights: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.experts, self.weights

    @classmethod
    def draw(cls, views: Mapping[tuple[str, str], Tensor], scale: float, rng: torch.Generator) -> _Trial:
        up = views["up", "weight"]
        x = torch.randn(_TOKENS, up.shape[2], generator=rng).to(up)
        size = torch.einsum("eoi,ti->teo", up[:2], x).std().clamp_min(torch.finfo(torch.float32).tiny)
        index = torch.randint(len(up), (_TOKENS, 1), generator=rng)
        index = torch.cat([index, (index + 1) % len(up)], 1).to(up.device)  # no expert twice
        return cls(x * (scale / size), index, torch.rand(_TOKENS, 2, generator=rng).to(up) + 0.5)

    def run(self, views: Mapping[tuple[str, str], Tensor], activation: nn.Module | None, gating: Gating) -> Tensor:
        """What experts of this form return."""
        result = torch.zeros_like(self.x)
        for token, slot in product(range(_TOKENS), range(self.experts.shape[1])):
            expert = int(self.experts[token, slot])

            def layer(role: str, x: Tensor, expert: int = expert) -> Tensor:
                written = views[role, "weight"][expert] @ x
                return written + views[role, "bias"][expert] if (role, "bias") in views else written

            gate = layer("gate", self.x[token]) if ("gate", "weight") in views else None
            hidden = gating.hidden(activation, gate, layer("up", self.x[token]))
            result[token] += self.weights[token, slot] * layer("down", hidden)
        return result


def _layouts(module: nn.Module) -> Iterator[StackLayout]:
    """Every way in which the sizes of a module's stacks fit together; gate before up, as most have it, first."""
    own = dict(module.named_parameters(recurse=False))
    stacks = {name: p.shape for name, p in own.items() if p.ndim == 3}
    flat = {name: p.shape for name, p in own.items() if p.ndim == 2}
    if len(stacks) + len(flat) < len(own) or len(stacks) not in (2, 3):
        return
    for transposed, down in product((False, True), stacks):
        sizes = {name: (s[2], s[1]) if transposed else (s[1], s[2]) for name, s in stacks.items()}  # outputs, inputs
        features, hidden = sizes[down]
        others = [name for name in stacks if name != down]
        for fused, pair in _firsts(others, sizes, features, hidden):
            weights = {**pair, "down": down}
            biases = _biases(weights, flat, sizes)
            if biases is None:
                continue
            for interleaved in (False, True) if fused else (False,):
                for gate_first in (True, False) if fused else (True,):
                    yield StackLayout(weights, biases, transposed, interleaved, gate_first)


def _firsts(
    others: list[str], sizes: Mapping[str, tuple[int, int]], features: int, hidden: int
) -> Iterator[tuple[bool, dict[str, str]]]:
    """Whether gate and up are one stack, and which stacks they are."""
    if len(others) == 1:
        (name,) = others
        if sizes[name] == (2 * hidden, features):
            yield True, {"gate": name, "up": name}
        if sizes[name] == (hidden, features):
            yield False, {"up": name}
    elif all(sizes[name] == (hidden, features) for name in others):
        yield False, {"gate": others[0], "up": others[1]}
        yield False, {"gate": others[1], "up": others[0]}


def _biases(
    weights: Mapping[str, str], flat: Mapping[str, torch.Size], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, str] | None:
    """The bias of each stack, None where some parameter is nobody's: by name, as two may be of one size."""
    found = {}
    for role, stack in weights.items():
        fits = [name for name, shape in flat.items() if shape[1] == sizes[stack][0] and name.startswith(stack)]
        if fits:
            found[role] = fits[0]
    return found if {*found.values()} == {*flat} else None


def _between(module: nn.Module, gated: bool) -> Iterator[tuple[nn.Module | None, Gating]]:
    """What may be done between the layers: what the module holds comes before what it may have in its code."""
    own = [child for child in module.children() if not any(True for _ in child.parameters())]
    numbers = _numbers(module)
    for limit in (None, *numbers):
        for shift in _SHIFTS if gated else (0.0,):
            for activation in (*own, *_ACTIVATIONS):
                if _elementwise(activation):
                    yield activation, Gating(None, limit, shift)
            for alpha in numbers:
                yield None, Gating(alpha, limit, shift)


def _elementwise(activation: nn.Module) -> bool:
    """Whether what it makes of a number depends on that number alone."""
    x = torch.linspace(-3, 3, 7)
    try:
        found = activation(x)
        return found.shape == x.shape and torch.allclose(found[2:5], activation(x[2:5]))
    except Exception:  # a child that is no activation may raise anything
        return False


def _numbers(module: nn.Module) -> list[float]:
    """Settings that may limit or scale a gate."""
    found = (v for name, v in vars(module).items() if isinstance(v, float) and not name.startswith("_"))
    return sorted({value for value in found if math.isfinite(value) and value > 0})


def _scales(module: nn.Module) -> Iterable[tuple[float, float]]:
    return product(_SCALES, (1.0, *_numbers(module)))


def _precise(parameter: Tensor) -> Tensor:
    """Half precision would not tell one activation from another."""
    value = parameter.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def _equal(found: Tensor, expected: object) -> bool:
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        return False
    return bool((found - expected.to(found)).norm() <= _TOLERANCE * found.norm())
