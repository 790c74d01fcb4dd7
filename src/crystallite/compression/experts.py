"""Mixtures of experts while they are fitted: which layers only some positions reach, how many, and who sends them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.positions import real_positions
from crystallite.models.layers import Unit
from crystallite.models.record import TOO_FEW
from crystallite.operators.experts import Experts
from crystallite.statistics.layer_io import counts_and_unit, matrix_of, row_counts

__all__ = ["Reach", "Routes", "expert_of", "routing", "run_alike"]

Routes = dict[str, tuple[Tensor, Tensor]]  # experts → which of them each token is sent to, and what they count
_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")
_PER_INPUT = 2  # positions for each input of an expert's widest layer, below which it is not fitted
_HELD_OUT = 16  # positions that must be left to judge it by
_NEVER = 1e-9  # the count of an expert that nothing reaches: 0 says of other layers that nothing is known
_PIECES = 8  # of the data, on which layers that only some positions reach show themselves


@dataclass(frozen=True)
class Reach:
    """The layers of experts, and how many positions of the calibration data reach them."""

    example: Batch  # on which as many of them run as on any other batch
    loose: frozenset[str] = frozenset()  # those of modules in lists: who reaches them is the model's own code's to say
    counts: Mapping[str, float] = field(default_factory=dict)  # how often each layer is used
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a layer is not fitted
    unit: str = ""  # what the counts are of, in words

    @classmethod
    def of(cls, model: nn.Module, units: Mapping[str, Unit], data: Calibration, example: Batch) -> Reach:
        """What the model's own experts, stacked or in lists, see of the data; units: all of its layers.

        Other layers are counted on the first batch: some may run once for all of it. Cost: a run of the model over the
        data where there are experts.
        """
        stacked = {name: expert_of(name, model) for name in units}
        experts = {name: expert for name, expert in stacked.items() if expert}
        linear = [name for name, unit in units.items() if unit.kind == "linear" and name not in experts]
        loose = _routed_in_lists(model, linear, data)
        experts |= loose
        others = [name for name in units if name not in experts]
        called, unit = counts_and_unit(model, others, data.fitted[0])
        counts: dict[str, float] = {**called}
        if not experts:
            return cls(example, counts=counts, unit=unit)
        fitted, held_out, ran = dict.fromkeys(units, 0), dict.fromkeys(experts, 0), dict[int, int]()
        real = positions = 0
        for number, batch in enumerate(data.all):
            judging = number >= len(data.fitted)
            with routing(model, batch, {}, replay=False):
                found = row_counts(model, experts if judging else units, batch)
            total = held_out if judging else fitted
            for name, rows in found.items():
                total[name] += rows
            ran[number] = sum(found[name] > 0 for name in loose)
            mask = batch.named.get("attention_mask")
            if isinstance(mask, Tensor) and not judging:
                real, positions = real + int(mask.bool().sum()), positions + mask.numel()
        usual = [name for name in others if fitted[name] and counts[name]]
        most = max(usual, key=lambda name: counts[name], default="")  # as the batches grow, not once for each
        scale = counts[most] / fitted[most] if most else 1.0
        for name in experts:
            padded = positions / real if real and name not in loose else 1.0  # of which none was sent to experts
            counts[name] = padded * fitted[name] * scale or _NEVER
        reasons = _too_few(units, experts, fitted, held_out)
        best = max(range(len(data.fitted)), key=lambda number: ran[number])
        return cls(data.fitted[best] if loose else example, frozenset(loose), counts, reasons, unit)


def expert_of(name: str, model: nn.Module) -> str:
    """The expert of an `Experts` that a layer is in, or an empty string."""
    parts = name.split(".")
    for depth in range(len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), Experts):
            return ".".join(parts[: depth + 1])
    return ""


def _routed_in_lists(model: nn.Module, names: Sequence[str], data: Calibration) -> dict[str, str]:
    """Layers in modules of an `nn.ModuleList` that some of the data reaches and some not → the module.

    Modules of a list that are alike run on the same positions, or on a fixed share of them; experts do not.
    """
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    alike: dict[tuple[str, str], dict[str, str]] = {}
    for path, module in lists:
        prefix = f"{path}." if path else ""
        for name in names:
            if name.startswith(prefix) and len(module) > 1:
                child, _, inner = name.removeprefix(prefix).partition(".")
                alike.setdefault((path, inner), {})[name] = prefix + child
    asked = {name for some in alike.values() if len(some) > 1 for name in some}
    if not asked:
        return {}
    pieces = [piece for batch in data.fitted[:_PIECES] for piece in batch.split(max(1, -(-batch.size // 4)))][:_PIECES]
    rows = [row_counts(model, asked, piece) for piece in pieces]
    found: dict[str, str] = {}
    for some in alike.values():
        table = np.array([[piece[name] for name in some] for piece in rows], dtype=float) if len(some) > 1 else None
        if table is not None and np.linalg.matrix_rank(table) > 1:
            found |= some  # of lists inside each other, the innermost comes last
    return found


def _too_few(
    units: Mapping[str, Unit], experts: Mapping[str, str], fitted: Mapping[str, int], held_out: Mapping[str, int]
) -> dict[str, str]:
    """Why the layers of some experts are not fitted: an expert is, as a whole, or it is not."""
    members: dict[str, list[str]] = {}
    for name, expert in experts.items():
        members.setdefault(expert, []).append(name)
    found: dict[str, str] = {}
    for some in members.values():
        inputs = max(matrix_of(units[name].module).shape[1] for name in some)
        rows, judging = min(fitted[name] for name in some), min(held_out[name] for name in some)
        if rows < _PER_INPUT * inputs:
            why = f"{TOO_FEW} reach this expert: {rows}, where {inputs} inputs need {_PER_INPUT * inputs}"
            found |= dict.fromkeys(some, why)
        elif judging < _HELD_OUT:
            why = f"{TOO_FEW} that judge reach this expert: {judging}, where {_HELD_OUT} are needed"
            found |= dict.fromkeys(some, why)
    return found


@contextmanager
def routing(model: nn.Module, batch: Batch, known: Routes, *, replay: bool) -> Iterator[None]:
    """Inside, padding is sent to no expert, and where all else is sent is kept in `known`, or taken from there.

    So a model that is being fitted can be shown to be sent what the dense one was, row by row.
    """

    def send(name: str) -> Any:
        def hook(module: Experts, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
            x, index, weights = (*inputs, *(named[key] for key in _ARGUMENTS[len(inputs) :]))
            if replay and name in known:
                index, weights = known[name]
            else:
                real = real_positions(batch, torch.Size([len(index)]))
                if isinstance(real, Tensor):
                    index = index.masked_fill(~real.to(index.device)[:, None], len(module.experts))
                known[name] = index, weights
            return (x, index, weights), {}

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                hooks.callback(module.register_forward_pre_hook(send(name), with_kwargs=True).remove)
        yield


def run_alike(first: nn.Module, second: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """What two models return on a batch, where the experts of the second are sent what those of the first are."""
    routes: Routes = {}
    with routing(first, batch, routes, replay=False):
        expected = batch.run(first)
    with routing(second, batch, routes, replay=True):
        return expected, batch.run(second)
