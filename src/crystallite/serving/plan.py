"""`plan`: which pieces of a saved model are services of their own, and which are fused."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.core.tables import text_table
from crystallite.models.opening import open_mapped
from crystallite.models.record import find_record
from crystallite.operators.chain import BlockChain
from crystallite.serving.cuts.operators import CUTTABLE, forms, fuse_uncut
from crystallite.serving.cuts.site import Cost, Groups, Site, nbytes
from crystallite.serving.example import examples
from crystallite.serving.machine import Machine, measure_machine
from crystallite.serving.network import Network, network_of, runs
from crystallite.serving.piece import Piece
from crystallite.serving.signature import INPUT
from crystallite.serving.work import Work, count_work

__all__ = ["Plan", "Stage", "arrange", "plan", "planned"]

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
    fused: tuple[tuple[str, str], ...] = ()  # operators that could be cut and are not, and why
    sample: str = ""  # that multiply-adds and times are of; "": a vector, position or time step of each operator

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
                hops = _hops(piece.seconds, self.machine)
                cells = [f"{piece.macs:,}", f"{piece.nbytes:,}", f"{piece.seconds * 1e3:.3g}", hops]
                replicas = f"{piece.least}" if piece.least == piece.most else f"{piece.least}–{piece.most}"
                rows.append([piece.name, *cells, replicas, piece.holds])
            if not stage.pieces:
                rows.append(["(transform tier)", "", "", "", "", "", stage.does])
        lines = text_table(rows)
        if self.fused:
            lines += ["", "not cut:", *text_table([list(pair) for pair in self.fused])]
        unknown = "each weight counted once, as no sample is known: say shape="
        counted = f"of one sample, {self.sample}" if self.sample else unknown
        counted = f"multiply-adds are {counted}; times are what they take at least"
        hop = f"a hop costs {self.machine.hop * 1e6:.0f} µs; a piece is a service of its own from {WORTH} hops on"
        replicas = f"replicas, which an engine of several processes starts, for {self.workers} workers"
        return "\n".join([*lines, "", counted, hop, replicas])


def plan(
    artifact: str | os.PathLike[str],
    *,
    into: nn.Module | None = None,
    shape: tuple[int, ...] | None = None,
    batch: int = 1,
    machine: Machine | None = None,
    workers: int | None = None,
) -> Plan:
    """Which pieces of a saved model are services: independent networks first, then heavy blocks of single operators.

    A chain of layers that separates end to end is cut into its subnetworks; where it does not, each layer that
    separates by itself is a candidate, and so are the blocks of feed-forward pairs and of convolutions, the weak
    components of recurrent networks and the experts of a mixture, wherever they stand in the model. A part is a service
    of its own if it computes for at least ten hops; lighter ones are fused until they do, and an operator that would be
    one service stays where it is. What lies between cut operators is a service too if the model is an `nn.Sequential`
    of them; otherwise the model itself runs in the transform tier and calls the pieces of what was cut inside it.
    Modules without weights run in the transform tier.

    - `into`: an instance of the original, for a model with code of its own.
    - `shape`: of one sample, where the first layer does not say it: what it costs is counted in one run.
    - `batch`: the samples that a call is expected to hold.
    - `machine`: rates to plan for; measured here if not given.
    - `workers`: cores of the inference tier, which replicas share in proportion to what they compute; those of this
      machine if not given. A piece that fills one alone has at least two replicas, so that one may die.
    """
    model = open_mapped(Path(artifact), into).eval()
    found = find_record(model)
    try:
        given = list(examples(model, shape, None if found is None else found.call))
    except InvalidOption:  # nobody says what a sample is: one vector
        given = []
    return planned(model, batch, machine or measure_machine(), workers, work=count_work(model, given))


def arrange(
    model: nn.Module,
    batch: int,
    machine: Machine,
    workers: int | None = None,
    positional: tuple[str, ...] = (INPUT,),
    outputs: tuple[str, ...] = (),
    work: Work | None = None,
) -> tuple[Plan, Network]:
    """The plan of a model, and the model cut along it.

    positional: inputs that the model takes by place, not by name; outputs: those that are chosen. See `NamedModel`.
    work: as for `planned`.
    """
    found = planned(model, batch, machine, workers, positional, outputs, work)
    return found, network_of(model, found.pieces, positional, outputs)


def planned(
    model: nn.Module,
    batch: int,
    machine: Machine,
    workers: int | None = None,
    positional: tuple[str, ...] = (INPUT,),
    outputs: tuple[str, ...] = (),
    work: Work | None = None,
) -> Plan:
    """The plan of a model, of whose weights no number is read; arguments as for `arrange`.

    work: what one sample brings to each operator.
    """
    workers = (os.cpu_count() or 1) if workers is None else workers
    for name, count in (("batch", batch), ("workers", workers)):
        if count < 1:
            raise InvalidOption(f"{name}: expected at least 1, got {count}")
    work = work or Work()
    vectors = work.vectors
    cuts: dict[str, list[tuple[Site, Groups]]] = {}
    fused: dict[str, str] = {}
    for name, operator in _cuttable(model):
        found = _groups(operator, batch * vectors.get(name, 1), machine)
        if isinstance(found, str):
            fused[name or "model"] = found
        else:
            cuts[name] = found
    stages: list[Stage] = []
    for names in runs(model, cuts):
        if names is None:
            for name, sites in cuts.items():
                stages += _stages(name, sites, vectors.get(name, 1), batch, machine)
            stages.append(Stage(f"all else of {type(model).__name__}", ()))
        elif names[0] in cuts:
            stages += _stages(names[0], cuts[names[0]], vectors.get(names[0], 1), batch, machine)
        else:
            stages.append(_uncut(model, names, work, batch, machine, positional, outputs))
    return Plan(_with_replicas(stages, workers), batch, machine, workers, tuple(fused.items()), work.sample)


def _cuttable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Operators that may be cut, each with its first name; those inside another one are parts of that."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, CUTTABLE) and not any(name.startswith(outer) for outer in inside):
            inside.append(f"{name}." if name else "")
            yield name, module


def _groups(operator: nn.Module, vectors: int, machine: Machine) -> list[tuple[Site, Groups]] | str:
    """The operator's sites with groups of blocks worth a service each, at least two of them in one; or why not."""
    enough = WORTH * machine.hop
    ways, most = forms(operator), 0.0
    for sites in ways:
        seconds = [_seconds(site, vectors, machine) for site in sites]
        macs = [[cost.macs for cost in site.costs] for site in sites]
        packed = [_packed(own, work, enough) for own, work in zip(seconds, macs, strict=True)]
        if any(len(groups) > 1 for groups in packed):
            return fuse_uncut(operator, sites, packed)
        most = max(most, *map(sum, seconds))
    if all(sum(cost.macs > 0 for cost in site.costs) < 2 for sites in ways for site in sites):
        return "one block"
    if most < 2 * enough:
        return f"its blocks compute for {_hops(most, machine)} hops in all, two services for at least {2 * WORTH}"
    return f"all its blocks but the heaviest compute for less than {WORTH} hops"


def _seconds(site: Site, vectors: int, machine: Machine) -> list[float]:
    return [machine.seconds(*cost, vectors) for cost in site.costs]


def _packed(seconds: Sequence[float], macs: Sequence[int], enough: float) -> list[list[int]]:
    """Groups of blocks, the heaviest first, each closed as soon as it takes long enough; what is left joins the last.

    Blocks that multiply nothing are no reason for a service, and come last.

    >>> _packed([5, 1, 1, 1, 7, 9], [5, 1, 1, 1, 7, 0], 2)
    [[4], [0], [1, 2, 3, 5]]
    """
    groups: list[list[int]] = []
    open_group: list[int] = []
    for block in sorted(range(len(seconds)), key=lambda i: (not macs[i], -seconds[i])):
        open_group.append(block)
        if macs[block] and sum(seconds[i] for i in open_group) >= enough:
            groups.append(open_group)
            open_group = []
    if groups:
        groups[-1] += open_group
    return groups or [open_group]


def _stages(
    name: str, sites: Sequence[tuple[Site, Groups]], vectors: int, batch: int, machine: Machine
) -> Iterator[Stage]:
    """One for each site of a cut operator; vectors: that a sample brings."""
    for site, groups in sites:
        where = ".".join(part for part in (name or "model", site.name) if part)
        pieces = []
        for number, blocks in enumerate(groups):
            one, modules = Cost.sum(site.costs[block] for block in blocks), (name,) if name else ()
            cost = Cost(one.macs * vectors, one.nbytes)
            seconds, held = machine.seconds(*cost, batch), f"{_spans(blocks)} of {where}"
            pieces.append(Piece(f"{where}.{number}", held, *cost, seconds, modules, site.name, tuple(blocks)))
        yield Stage(f"{len(pieces)} part{'s' * (len(pieces) > 1)} of {where}", tuple(pieces))


def _uncut(
    model: nn.Module, names: Sequence[str], work: Work, batch: int, machine: Machine, positional: tuple[str, ...],
    outputs: tuple[str, ...],
) -> Stage:  # fmt: skip
    """What is one service as it is, or, without weights, a step of the transform tier."""
    inside = [model.get_submodule(name) for name in names]
    module = inside[0] if names == [""] else nn.Sequential(*inside)
    if names != [""] and not any(True for _ in module.parameters()):
        return Stage(_kinds(module), ())
    name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
    cost = Cost(work.macs_of(model, names), nbytes(module))
    piece = Piece(name or "model", _kinds(module), *cost, machine.seconds(*cost, batch), tuple(names))
    if names == [""]:
        piece = dataclasses.replace(piece, modules=(), positional=positional, outputs=outputs)
    return Stage(f"{piece.name} as it is", (piece,))


def _with_replicas(stages: Sequence[Stage], workers: int) -> tuple[Stage, ...]:
    """The stages with the replicas of each piece: as many workers as its share of all that a batch computes."""
    total = sum(piece.seconds for stage in stages for piece in stage.pieces)

    def replicated(piece: Piece) -> Piece:
        most = max(1, math.ceil(workers * piece.seconds / total - 1e-9))
        return dataclasses.replace(piece, least=min(2, most), most=most)

    return tuple(Stage(stage.does, tuple(map(replicated, stage.pieces))) for stage in stages)


def _spans(numbers: Sequence[int]) -> str:
    """Numbers of blocks in words.

    >>> _spans([4, 0, 1, 2]), _spans([3])
    ('blocks 0–2, 4', 'block 3')
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    spans = [f"{span[0]}–{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in found]
    return f"block{'s' * (len(numbers) > 1)} {', '.join(spans)}"


def _hops(seconds: float, machine: Machine) -> str:
    return f"{seconds / machine.hop:.1f}" if machine.hop else "∞"


def _kinds(module: nn.Module) -> str:
    if isinstance(module, BlockChain):
        return f"BlockChain {' → '.join(map(str, module.sizes))}, {module.n_blocks} blocks"
    inside = list(module) if type(module) is nn.Sequential else [module]
    return ", ".join(type(inner).__name__ for inner in inside if not isinstance(inner, nn.Identity))
