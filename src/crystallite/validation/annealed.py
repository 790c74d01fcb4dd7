"""A model annealed at one level after another: tests are made once, a level only moves their thresholds."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import Annealing, AnnealingOptions, anneal
from crystallite.annealing.initial import named_weights
from crystallite.annealing.neyman import neyman_level, resolve_level
from crystallite.annealing.random_walk import random_walk_test
from crystallite.core.errors import InvalidOption
from crystallite.models.composites import expanded
from crystallite.models.layers import Unit, find_units
from crystallite.operators.conv import Convolution
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.annealed_layers import structure_of

__all__ = ["BONFERRONI", "AnnealedModel", "LayerStructure"]

BONFERRONI = 0.01  # the level that "bonferroni" shares out over the weights of a matrix


@dataclass(frozen=True)
class LayerStructure:
    """What one layer falls into at one level."""

    name: str
    kept_share: float
    blocks: int  # strongly connected components of a recurrent network
    largest_share: float  # neurons of the largest block as a share of those in any block
    dormant: int  # neurons in no block
    neurons: int  # inputs and outputs; hidden units of a recurrent network
    macs: int  # multiply-adds of its blocks, per input vector, output position or time step
    dense_macs: int


@dataclass(frozen=True)
class _Weight:
    """A parameter of the original, the tests of its parts (gates of a stack), and where it goes in the copy."""

    source: Tensor
    target: Tensor
    tests: list[Annealing]
    turned: bool  # stored (in, out)


class AnnealedModel:
    """A copy of a model that computes what its exact reorganization at any level computes, before it is built.

    The same weights as `reorganize` keeps. Setting a level is one pass over the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[str],
        ignore: Sequence[str],
        null: nulls.Null | str,
        options: AnnealingOptions,
    ) -> None:
        model = expanded(model)
        self.model = copy.deepcopy(model)
        self.options = options
        self._bands: dict[tuple[str, float | None], np.ndarray] = {}
        units, copies = (find_units(m, targets, ignore) for m in (model, self.model))
        pairs = [(unit, twin) for unit, twin in zip(units, copies, strict=True) if not unit.reason]
        if not pairs:
            raise InvalidOption(f"no layer to anneal matches targets {targets} and ignore {ignore}")
        initial = nulls.for_module(model)
        known = initial if isinstance(initial, dict) else {}
        self.units = [twin for _, twin in pairs]
        self._weights = [w for unit, twin in pairs for w in _weights(unit, twin, known, null)]

    def numeric_level(self, level: float | str) -> float:
        """The level that entries are tested at, the geometric mean over all weights where matrices differ."""
        tests = [test for weight in self._weights for test in weight.tests]
        sizes = [test.magnitudes.bits.size for test in tests]
        return math.exp(np.average([math.log(self._entry_level(test, level)) for test in tests], weights=sizes))

    def set_level(self, level: float | str, rule: str, alpha: float | None = None) -> bool:
        """Give the copy the weights that annealing keeps; whether the random-walk band alone decides which."""
        alone = rule == "both"
        for weight in self._weights:
            masks = []
            for test in weight.tests:
                limits = np.full(test.shape[1], test.null.threshold(self._entry_level(test, level)))
                if rule == "both":
                    band = self._band(test, alpha)
                    above, limits = limits > band, np.maximum(limits, band)
                masks.append(_at_least(test.matrix, limits))
                if alone and above.any():
                    alone = bool((masks[-1] == _at_least(test.matrix, band)).all())
            mask = torch.cat(masks)
            kept = (mask.T if weight.turned else mask).reshape(weight.source.shape)
            with torch.no_grad():
                weight.target.copy_(weight.source * kept)
        return alone

    def structures(self) -> tuple[LayerStructure, ...]:
        """What each layer falls into at the level that is set; one pass over the weights."""
        return tuple(map(_structure, self.units))

    def _entry_level(self, test: Annealing, level: float | str) -> float:
        if level == "bonferroni":
            return neyman_level(test.null, BONFERRONI, "bonferroni", test.magnitudes, test.name)
        number = resolve_level(level, *test.shape)
        return neyman_level(test.null, number, self.options.correction, test.magnitudes, test.name)

    def _band(self, test: Annealing, alpha: float | None) -> np.ndarray:
        """(columns,) the least magnitude above the random-walk band at a significance level α of that test."""
        key = test.name, alpha
        if key not in self._bands:
            o = self.options
            assert o.random_walk is not None
            walk = random_walk_test(
                test.magnitudes, test.null, o.random_walk, test.name, alpha=alpha, delta0=o.delta0, tau=o.tau
            )
            self._bands[key] = np.nextafter(walk.preference_above, np.inf)
        return self._bands[key]


def _at_least(matrix: Tensor, limits: np.ndarray) -> Tensor:
    """Where |w| reaches its column's limit, compared as float64 would."""
    compared = matrix.double() if matrix.dtype == torch.float64 else matrix.float()
    rounded = limits.astype(np.float64 if compared.dtype == torch.float64 else np.float32)
    # |w| ≥ c in float64 ⇔ |w| ≥ the smallest float32 that is not below c
    rounded = np.where(rounded < limits, np.nextafter(rounded, np.inf, dtype=rounded.dtype), rounded)
    return compared.abs() >= torch.from_numpy(rounded).to(matrix.device)


def _weights(unit: Unit, twin: Unit, initial: dict[str, nulls.Null], null: nulls.Null | str) -> Iterator[_Weight]:
    prefix, tests = f"{unit.name}." if unit.name else "", dict[str, list[Annealing]]()
    for name, matrix, own in named_weights(unit.module):
        parameter = name.partition("[")[0]
        drawn, chosen = initial.get(prefix + parameter, own), null
        if isinstance(null, str) and null in ("auto", "init"):
            chosen = drawn if null == "init" else nulls.choose(matrix, [drawn], prefix + name)  # type: ignore[assignment]
        tested = anneal(matrix, chosen, rule="neyman", name=prefix + name)  # for its null: levels come later
        tests.setdefault(parameter, []).append(tested)
    turned = unit.kind == "linear" and not isinstance(unit.module, nn.Linear)
    for parameter, parts in tests.items():
        source, target = (u.module.get_parameter(parameter).detach() for u in (unit, twin))
        yield _Weight(source, target, parts, turned)


def _structure(unit: Unit) -> LayerStructure:
    if isinstance(unit.module, nn.RNNBase):
        recurrent = BlockRecurrent.from_dense(unit.module)
        sizes = [block.size for layer in recurrent._layers() for block in layer.form.blocks]
        share = max(sizes, default=0) / unit.module.hidden_size
        units = unit.module.hidden_size
        return LayerStructure(unit.name, unit.kept_share, recurrent.n_sccs, share, 0, units, recurrent.macs, unit.macs)
    found = structure_of(unit)
    assert found is not None
    rows, cols = found.shape
    active = int((found.row_block >= 0).sum() + (found.col_block >= 0).sum())
    share = int(found.block_shapes.sum(1).max(initial=0)) / max(active, 1)
    per_pair = unit.module.weight[0, 0].numel() if isinstance(unit.module, Convolution) else 1
    macs, dormant = found.macs * per_pair, rows + cols - active
    return LayerStructure(unit.name, unit.kept_share, found.n_blocks, share, dormant, rows + cols, macs, unit.macs)
