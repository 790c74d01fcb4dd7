"""`reorganize`: a copy of a model in which annealed linear layers run as their blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import nn

from crystallite.annealing import nulls
from crystallite.annealing.anneal import anneal
from crystallite.errors import InvalidOption
from crystallite.operators.chain import ELEMENTWISE, BlockChain
from crystallite.operators.linear import BlockLinear
from crystallite.reorganization.record import LayerChange, Reorganization
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose

__all__ = ["reorganize"]

_WORTH = 0.75  # blocks must save a quarter of the multiply-adds, or moving their inputs and outputs eats the gain


def reorganize(
    model: nn.Module,
    *,
    level: float | str | None = 0.01,
    null: str = "auto",
    correction: str | None = None,
    random_walk: str | None = "calibrated",
    rule: str = "both",
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
) -> nn.Module:
    """A copy of the model whose linear layers are annealed, decomposed and rebuilt from their blocks.

    The result has the interface of the model and computes exactly what the model computes with the annealed weights;
    `cx.summary` says what each layer became. Consecutive layers of an `nn.Sequential` with only elementwise functions
    between them become one `BlockChain` where they separate end to end: no permutation is left between them.

    - `level`, `null`, `correction`, `random_walk`, `rule`: as for `anneal`. level=None anneals nothing and takes the
      nonzeros of the weights as they are.
    - `targets`, `ignore`: a pattern of module names, or several (`encoder.*.dense`). Layers not chosen are left alone,
      and so are tied weights and modules of other kinds.

    A layer that stays one block, or whose blocks would not pay, stays an `nn.Linear` with its annealed weight.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
    ...     model[2].weight[0, 2:] = model[2].weight[1, :2] = 0
    >>> reorganize(model, level=None)
    Sequential(
      (0): BlockChain(4 → 4 → 2, subnetworks=2, 12 of 24 multiply-adds)
      (1): Identity()
      (2): Identity()
    )
    """
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"expected an nn.Module, got {type(model).__name__}")
    targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    result = copy.deepcopy(model)
    layers = dict(_chosen(result, targets, ignore))
    if not layers:
        raise InvalidOption(f"no linear layer matches targets {targets} and ignore {ignore}")
    changes: dict[str, LayerChange] = {}
    structures: dict[str, BipartiteStructure] = {}
    for name, layer in layers.items():
        reason = _left_alone(result, layer)
        before = layer.weight.numel()
        if reason:
            changes[name] = LayerChange(name, reason, before, before, _size(layer), _size(layer))
            continue
        if level is not None:
            initial = nulls.choose(layer.weight, [nulls.for_module(layer)], name).null if null == "auto" else null
            mask = anneal(layer.weight, initial, level, correction, random_walk, rule, name).mask
            with torch.no_grad():
                layer.weight *= mask
        structures[name] = decompose(layer.weight, name=name)
    for run in _runs(result):
        if len(run.layers) > 1 and all(name in structures for name in run.layers):
            _swap_chain(result, run, layers, changes)
    for name, structure in structures.items():
        if name not in changes:
            changes[name] = _swap_layer(result, name, layers[name], structure)
    options = {"level": level, "null": str(null), "correction": correction, "random_walk": random_walk, "rule": rule}
    result.reorganization = Reorganization([changes[n] for n in layers], [], options)  # type: ignore[assignment]
    return result


def _chosen(model: nn.Module, targets: Sequence[str], ignore: Sequence[str]) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        wanted = any(fnmatch(name, p) for p in targets) and not any(fnmatch(name, p) for p in ignore)
        if isinstance(module, nn.Linear) and wanted:
            yield name, module


def _left_alone(model: nn.Module, layer: nn.Linear) -> str:
    """Why a layer must not be changed, or an empty string."""
    if type(layer) is not nn.Linear:
        return f"left alone: {type(layer).__name__} is used by its parent in its own way"
    owners = sum(
        parameter is layer.weight
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return "left alone: its weight is tied to another module's" if owners > 1 else ""


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class _Run:
    """Consecutive places of an nn.Sequential: linear layers with elementwise functions between them."""

    parent: str
    places: tuple[str, ...]  # all of them
    layers: tuple[str, ...]  # full names of the linear ones


def _runs(model: nn.Module) -> Iterator[_Run]:
    for parent, module in model.named_modules():
        if type(module) is not nn.Sequential:
            continue
        places: list[str] = []
        layers: list[str] = []
        for place, child in [*module.named_children(), ("", nn.Module())]:
            if type(child) is nn.Linear:
                places.append(place)
                layers.append(f"{parent}.{place}" if parent else place)
            elif layers and isinstance(child, ELEMENTWISE):
                places.append(place)
            else:
                while places and not isinstance(module.get_submodule(places[-1]), nn.Linear):
                    places.pop()  # what follows the last layer stays where it is
                if layers:
                    yield _Run(parent, tuple(places), tuple(layers))
                places, layers = [], []


def _swap_chain(model: nn.Module, run: _Run, layers: dict[str, nn.Linear], changes: dict[str, LayerChange]) -> None:
    """Replace a run by one chain of subnetworks if it separates and that pays."""
    parent = model.get_submodule(run.parent)
    between: list[list[nn.Module]] = []
    for place in run.places:
        child = parent.get_submodule(place)
        if isinstance(child, nn.Linear):
            between.append([])
        else:
            between[-1].append(child)
    activations = [m[0] if len(m) == 1 else nn.Sequential(*m) for m in between[:-1]]
    chosen = [layers[name] for name in run.layers]
    chain = BlockChain.from_dense(chosen, activations)
    if chain.n_blocks < 2 or chain.macs > _WORTH * chain.dense_macs:
        return
    for name, layer in zip(run.layers, chosen, strict=True):
        share = float((layer.weight != 0).double().mean())
        after = layer.weight.numel() * chain.macs // chain.dense_macs
        became = f"part of a chain of {chain.n_blocks} subnetworks"
        saved = layer.weight.numel() - after
        changes[name] = LayerChange(
            name, became, layer.weight.numel(), after, _size(layer), _size(layer) - saved, share, chain.n_blocks
        )
    setattr(parent, run.places[0], chain)
    for place in run.places[1:]:
        setattr(parent, place, nn.Identity())


def _swap_layer(model: nn.Module, name: str, layer: nn.Linear, structure: BipartiteStructure) -> LayerChange:
    before, share = layer.weight.numel(), float((layer.weight != 0).double().mean())
    if structure.macs > _WORTH * before:
        why = "one block" if structure.n_blocks == 1 else f"{structure.n_blocks} blocks that would not pay"
        return LayerChange(
            name, f"dense, annealed: {why}", before, before, _size(layer), _size(layer), share, structure.n_blocks
        )
    blocks = BlockLinear.from_dense(layer.weight, layer.bias, structure)
    parent, _, place = name.rpartition(".")
    if not name:
        raise InvalidOption("the model itself is the only linear layer; wrap it in nn.Sequential to have it replaced")
    setattr(model.get_submodule(parent), place, blocks)
    return LayerChange(
        name,
        f"{structure.n_blocks} blocks",
        before,
        blocks.macs,
        _size(layer),
        _size(blocks),
        share,
        structure.n_blocks,
    )
