"""`plan`: which pieces of a saved model are services of their own, and which are fused."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.core.tables import text_table
from crystallite.models.artifact import load_mapped
from crystallite.operators.chain import BlockChain
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.reorganization.subnetworks import Subnetworks, subnetworks
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.network import Call, Fan, Local, Network, Step, fused
from crystallite.serving.piece import Piece

__all__ = ["Plan", "Stage", "arrange", "plan"]

WORTH = 10  # hops that a piece must compute for to be worth one


@dataclass(frozen=True)
class Stage:
    """Pieces that run at the same time; none: a step of the transform tier alone."""

    does: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Plan:
    """The stages of a model, one after the other, and the rates and the number of workers they were chosen for."""

    stages: tuple[Stage, ...]
    batch: int
    machine: Machine
    workers: int

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for stage in self.stages for piece in stage.pieces)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __repr__(self) -> str:
        rows = [["service", "multiply-adds", "bytes", f"ms at batch {self.batch}", "hops", "replicas", "holds"]]
        for stage in self.stages:
            for piece in stage.pieces:
                hops = piece.seconds / self.machine.hop
                cells = [f"{piece.macs:,}", f"{piece.nbytes:,}", f"{piece.seconds * 1e3:.3g}", f"{hops:.1f}"]
                replicas = f"{piece.least}" if piece.least == piece.most else f"{piece.least}–{piece.most}"
                rows.append([piece.name, *cells, replicas, piece.holds])
            if not stage.pieces:
                rows.append(["(transform tier)", "", "", "", "", "", stage.does])
        hop = f"a hop costs {self.machine.hop * 1e6:.0f} µs; a piece is a service of its own from {WORTH} hops on"
        replicas = f"replicas, which an engine of several processes starts, for {self.workers} workers"
        return "\n".join([*text_table(rows), "", hop, replicas])


def plan(
    artifact: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    batch: int = 1,
    machine: Machine | None = None,
    workers: int | None = None,
) -> Plan:
    """Which pieces of a saved model are services: independent networks first, then heavy blocks of single layers.

    A model that separates end to end is cut into its subnetworks; where it does not, each operator that separates by
    itself is a candidate. A part is a service of its own if it computes for at least ten hops; lighter ones are fused
    until they do, and what would leave one service stays with its neighbours as it is. Modules without weights run in
    the transform tier.

    - `into`: an instance of the original, for a model with code of its own; such a model is one piece.
    - `batch`: the samples that a call is expected to hold.
    - `machine`: rates to plan for; measured here if not given.
    - `workers`: cores of the inference tier, which replicas share in proportion to what they compute; those of this
      machine if not given. A piece that fills one alone has at least two replicas, so that one may die.
    """
    return arrange(load_mapped(artifact, into), batch, machine or measure_machine(), workers)[0]


def arrange(model: nn.Module, batch: int, machine: Machine, workers: int | None = None) -> tuple[Plan, Network]:
    """The plan of a model, and the model cut along it."""
    workers = (os.cpu_count() or 1) if workers is None else workers
    for name, count in (("batch", batch), ("workers", workers)):
        if count < 1:
            raise InvalidOption(f"{name}: expected at least 1, got {count}")
    stages: list[Stage] = []
    steps: list[Step] = []
    modules: dict[str, nn.Module] = {}

    def piece(name: str, module: nn.Module, inside: tuple[str, ...], group: Sequence[int] = ()) -> Piece:
        modules[name] = module
        work = _macs(module), _nbytes(module)
        return Piece(name, _kinds(module), *work, machine.seconds(*work, batch), inside, tuple(group))

    for name, inside, part, groups in _runs(model, batch, machine):
        if isinstance(part, Subnetworks):
            cut = zip(part.parts, groups, strict=True)
            pieces = tuple(piece(f"{name}.{i}", inner, inside, group) for i, (inner, group) in enumerate(cut))
            stages.append(Stage(f"{len(pieces)} independent parts of {name}", pieces))
            steps.append(Fan(tuple(piece.name for piece in pieces), part))
        elif any(True for _ in part.parameters()):
            stages.append(Stage(f"{name} as it is", (piece(name, part, inside),)))
            steps.append(Call(name))
        else:
            stages.append(Stage(_kinds(part), ()))
            steps.append(Local(part))
    return Plan(_with_replicas(stages, workers), batch, machine, workers), Network(tuple(steps), modules)


def _with_replicas(stages: Sequence[Stage], workers: int) -> tuple[Stage, ...]:
    """The stages with the replicas of each piece: as many workers as its share of all that a batch computes."""
    total = sum(piece.seconds for stage in stages for piece in stage.pieces)

    def replicated(piece: Piece) -> Piece:
        most = max(1, math.ceil(workers * piece.seconds / total - 1e-9))
        return dataclasses.replace(piece, least=min(2, most), most=most)

    return tuple(Stage(stage.does, tuple(map(replicated, stage.pieces))) for stage in stages)


Run = tuple[str, tuple[str, ...], nn.Module, list[list[int]]]


def _runs(model: nn.Module, batch: int, machine: Machine) -> Iterator[Run]:
    """The model as modules to run one after the other: cut operators, and what lies between them.

    Each with its name, the names of what it is made of, and the subnetworks in each of its parts.
    """
    inside = {"model": model}
    if type(model) is nn.Sequential:  # not named_children, which leaves out a second place of a module
        inside = dict(zip(model._modules, model, strict=True))
        inside = {name: module for name, module in inside.items() if not isinstance(module, nn.Identity)}
    cuts = {name: cut for name, module in inside.items() if (cut := _cut(module, batch, machine)) is not None}
    if not cuts:
        yield "model", (), model, []
        return
    waiting: dict[str, nn.Module] = {}
    for name, module in inside.items():
        if name not in cuts:
            waiting[name] = module
            continue
        if waiting:
            yield _span(waiting), tuple(waiting), nn.Sequential(*waiting.values()), []
        waiting = {}
        yield name, () if module is model else (name,), *cuts[name]
    if waiting:
        yield _span(waiting), tuple(waiting), nn.Sequential(*waiting.values()), []


def _span(modules: dict[str, nn.Module]) -> str:
    names = list(modules)
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"


def _cut(module: nn.Module, batch: int, machine: Machine) -> tuple[Subnetworks, list[list[int]]] | None:
    """The operator as at least two groups of its independent parts that are worth a service each, if it has them."""
    enough = WORTH * machine.hop
    if not isinstance(module, (BlockChain, BlockLinear, BlockFeedForward)):
        return None
    if _seconds(module, batch, machine) < 2 * enough:
        return None
    try:
        networks = subnetworks(module)
    except InvalidOption:  # one part
        return None
    seconds = [_seconds(part, batch, machine) for part in networks.parts]
    groups = _packed(seconds, enough)
    return (fused(networks, groups), groups) if len(groups) > 1 else None


def _packed(seconds: Sequence[float], enough: float) -> list[list[int]]:
    """Groups of parts, the heaviest first, each closed as soon as it takes long enough; what is left joins the last.

    >>> _packed([5, 1, 1, 1, 7], 2)
    [[4], [0], [1, 2, 3]]
    """
    groups: list[list[int]] = []
    open_group: list[int] = []
    for part in sorted(range(len(seconds)), key=lambda i: -seconds[i]):
        open_group.append(part)
        if sum(seconds[i] for i in open_group) >= enough:
            groups.append(open_group)
            open_group = []
    if groups:
        groups[-1] += open_group
    return groups or [open_group]


def _seconds(module: nn.Module, batch: int, machine: Machine) -> float:
    return machine.seconds(_macs(module), _nbytes(module), batch)


def _macs(module: nn.Module) -> int:
    """Multiply-adds with weights for one input vector, position or time step."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def _kinds(module: nn.Module) -> str:
    if isinstance(module, BlockChain):
        return f"BlockChain {' → '.join(map(str, module.sizes))}, {module.n_blocks} blocks"
    inside = list(module) if type(module) is nn.Sequential else [module]
    return ", ".join(type(inner).__name__ for inner in inside if not isinstance(inner, nn.Identity))
