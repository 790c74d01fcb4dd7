"""`Network`: a model cut along a plan, as steps of the transform tier and pieces of the inference tier."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from crystallite.models.manifest import source_sha256
from crystallite.serving.cuts.calls import Request, calls_go_to
from crystallite.serving.cuts.features import CutFeatures
from crystallite.serving.cuts.operators import without_blocks
from crystallite.serving.cuts.site import Named
from crystallite.serving.interface import NamedModel, computed
from crystallite.serving.piece import Piece, part_of
from crystallite.serving.signature import INPUT, Tensors

__all__ = ["Call", "Fan", "Inside", "Local", "Network", "Step", "network_of", "runs"]


@dataclass(frozen=True)
class Local:
    """Modules without weights, run in the transform tier."""

    module: nn.Module


@dataclass(frozen=True)
class Call:
    """One piece that takes everything and returns everything."""

    piece: str


@dataclass(frozen=True)
class Fan:
    """Pieces that each take some features and return some, site after site."""

    module: CutFeatures


@dataclass(frozen=True)
class Inside:
    """A model that runs in the transform tier, where operators inside it have been cut; it calls their pieces."""

    module: nn.Module | None  # None: not opened in this process


Step = Local | Call | Fan | Inside


@dataclass(frozen=True)
class Network:
    """The steps, and the module behind the name of each piece."""

    steps: tuple[Step, ...]
    modules: Mapping[str, nn.Module]

    @torch.no_grad()
    def __call__(self, given: Tensors) -> Tensors:
        """All steps here and now: what the tiers compute together."""

        def call(requests: Sequence[Request]) -> list[Tensors]:
            return [computed(self.modules[piece], own) for piece, own in requests]

        with calls_go_to(call):
            for step in self.steps:
                module = self.modules[step.piece] if isinstance(step, Call) else step.module
                assert module is not None
                given = computed(module, given)
        return given

    @property
    def parts(self) -> list[nn.Module]:
        """Everything that computes: pieces, and what runs in the transform tier."""
        local = (step.module for step in self.steps if not isinstance(step, Call))
        return [*self.modules.values(), *(module for module in local if module is not None)]

    def sha256(self) -> str:
        """A hash of the weights that run in the transform tier."""
        models = [step.module for step in self.steps if isinstance(step, Inside) and step.module is not None]
        return " ".join(source_sha256(model) for model in models if model.state_dict())

    def without_weights(self) -> Network:
        """The steps without pieces, and without what runs in the transform tier and has weights."""
        steps = tuple(Inside(None) if isinstance(step, Inside) else step for step in self.steps)
        return Network(steps, {})


def network_of(
    model: nn.Module,
    pieces: Iterable[Piece],
    positional: tuple[str, ...] = (INPUT,),
    outputs: tuple[str, ...] = (),
    with_modules: bool = True,
) -> Network:
    """The model cut into some pieces, all of it in memory of its own.

    Args:
        model: the model.
        pieces: all pieces of its plan.
        positional: inputs that the model takes by place, not by name; see `NamedModel`.
        outputs: those that are chosen.
        with_modules: also the pieces' own modules, not only what the transform tier needs.
    """
    pieces = tuple(pieces)
    cuts: dict[str, dict[str, Named]] = {}
    for piece in pieces:
        if piece.site is not None:
            sites = cuts.setdefault(piece.modules[0] if piece.modules else "", {})
            sites.setdefault(piece.site, {})[piece.name] = piece.blocks
    modules = {piece.name: part_of(model, piece) for piece in pieces} if with_modules else {}
    stubs = {name: without_blocks(model.get_submodule(name), sites) for name, sites in cuts.items()}
    whole = iter([piece.name for piece in pieces if piece.site is None])
    steps = list[Step]()
    for names in runs(model, cuts):
        if names is None:
            replaced = {id(model.get_submodule(name)): stub for name, stub in stubs.items()}
            steps.append(Inside(NamedModel(copy.deepcopy(model, replaced).eval(), positional, outputs)))
        elif (stub := stubs.get(names[0])) is not None:
            steps.append(Fan(stub) if isinstance(stub, CutFeatures) else Inside(NamedModel(stub, positional, outputs)))
        else:
            inside = [model.get_submodule(name) for name in names]
            if any(True for module in inside for _ in module.parameters()):
                steps.append(Call(next(whole)))
            else:
                steps.append(Local(copy.deepcopy(nn.Sequential(*inside)).eval()))
    return Network(tuple(steps), modules)


def runs(model: nn.Module, cut: Collection[str]) -> list[list[str] | None]:
    """What runs one after the other, as names of modules: cut operators alone, and what lies between them together.

    None: the model itself, inside which something is cut; [""] a model that is cut as one operator, or not at all.

    >>> runs(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), ["1"])
    [['0'], ['1'], ['2', '3']]
    >>> runs(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), ["1.0"])
    [None]
    """
    if not cut or "" in cut:
        return [[""]]
    if type(model) is not nn.Sequential or not {*cut} <= model._modules.keys():
        return [None]
    found: list[list[str] | None] = []
    last: list[str] | None = None
    for name, module in model._modules.items():  # not named_children, which leaves out a second place of a module
        if isinstance(module, nn.Identity):
            continue
        if name not in cut and last is not None:
            last.append(name)
            continue
        found.append([name])
        last = None if name in cut else found[-1]
    return found
