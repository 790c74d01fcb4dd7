"""`reorganize`: a copy of a model in which annealed layers run as their blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from crystallite.annealing import nulls
from crystallite.errors import InvalidOption
from crystallite.operators.chain import BlockChain
from crystallite.operators.feedforward import BlockFeedForward
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.feedforward import recognise_feed_forward
from crystallite.reorganization.fold import fold_
from crystallite.reorganization.graph import Untraceable, trace
from crystallite.reorganization.huggingface import write_config
from crystallite.reorganization.pays import Judge
from crystallite.reorganization.record import Fold, LayerChange, Reorganization
from crystallite.reorganization.runs import Run, chain, channel_pair, find_runs
from crystallite.reorganization.units import (
    Unit,
    anneal_,
    block_operator,
    change,
    find_units,
    has_hooks,
    structure_of,
    would_pay,
)
from crystallite.structure.bipartite import BipartiteStructure

__all__ = ["reorganize", "replace_"]

_FEED_FORWARD = {
    "pair": "feed-forward pair, {blocks}",
    "layers": "feed-forward layers, {blocks}",
    "channels": "feed-forward channel by channel, {blocks}",
}


def reorganize(
    model: nn.Module,
    *,
    level: float | str | None = 0.01,
    null: nulls.Null | str = "auto",
    correction: str | None = None,
    random_walk: str | None = "calibrated",
    rule: str = "both",
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    example: Any = None,
    fold: bool = True,
    only_if_faster: bool = True,
    progress: bool = False,
) -> nn.Module:
    """A copy of the model whose layers are annealed, decomposed and rebuilt from their blocks.

    The result has the interface of the model and computes exactly what the model computes with the annealed weights;
    `cx.summary` says what each layer became, `cx.restore` undoes it. Linear layers, convolutions and recurrent networks
    become blocks; feed-forward pairs and consecutive layers of an `nn.Sequential` become one operator where that saves
    more. A layer that stays one block, or whose blocks would not pay, keeps its place with its annealed weight. Tied
    weights and other kinds of modules are left alone.

    - `level`, `correction`, `random_walk`, `rule`: as for `anneal`. level=None anneals nothing and takes the nonzeros
      of the weights as they are.
    - `null`: "auto" believes the initialisation of a layer only if it explains the bulk of its weights, else it
      measures the bulk; "init" always believes it; "empirical" always measures; or one null for all.
    - `targets`, `ignore`: a pattern of layer names, or several (`encoder.*.dense`).
    - `example`: inputs (a tensor, a tuple or a dict) to follow the neurons through a model that cannot be traced
      without.
    - `fold`: put the order of hidden neurons into the stored weights where the model allows it, those of layers left
      alone included, so that less is moved at run time. Inside, hidden neurons then have other numbers.
    - `only_if_faster`: replace a layer only where its blocks are expected to run faster on a CPU, small batches
      included; False: wherever they need fewer multiply-adds.
    - `progress`: a bar on standard error.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> with torch.no_grad():
    ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
    ...     model[2].weight[0, 2:] = model[2].weight[1, :2] = 0
    >>> reorganize(model, level=None, only_if_faster=False)
    Sequential(
      (0): BlockChain(4 → 4 → 2, blocks=2 → 2, shuffles=0, subnetworks=2, 12 of 24 multiply-adds)
      (1): Identity()
      (2): Identity()
    )
    """
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"expected an nn.Module, got {type(model).__name__}")
    if hasattr(model, "reorganization"):
        raise InvalidOption("this model is reorganized already; pass the original, or cx.restore(model)")
    targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    result = copy.deepcopy(model)
    units = {unit.name: unit for unit in find_units(result, targets, ignore)}
    if not units:
        raise InvalidOption(f"no layer with weights matches targets {targets} and ignore {ignore}")
    usable = {name: unit for name, unit in units.items() if not unit.reason}
    initial = nulls.for_module(result) if usable else {}
    structures = {}
    for name, unit in tqdm(usable.items(), unit="layer", disable=not progress):
        if level is not None:
            known = initial if isinstance(initial, dict) else {}
            anneal_(unit, known, null, level, correction, random_walk, rule)
        structure = structure_of(unit)
        if structure is not None:
            structures[name] = structure
    judge = Judge(only_if_faster)
    folds, reason = _fold_(result, usable, structures, example, judge) if fold else ([], "")
    rewrite = _Rewrite(result, usable, structures, judge)
    rewrite.run()
    rewrite.changes |= {name: _left_alone(unit) for name, unit in units.items() if unit.reason}
    options = {"level": level, "null": str(null), "correction": correction, "random_walk": random_walk, "rule": rule}
    if reason:
        options["not_folded"] = reason
    record = Reorganization([rewrite.changes[name] for name in units], folds, options)
    rewrite.model.reorganization = record  # type: ignore[assignment]
    write_config(rewrite.model)
    return rewrite.model


def _fold_(
    model: nn.Module, units: dict[str, Unit], structures: dict[str, BipartiteStructure], example: Any, judge: Judge
) -> tuple[list[Fold], str]:
    """Fold the orders of layers that will be blocks into the weights, re-express their structures; or say why not."""
    paying = {name: s for name, s in structures.items() if would_pay(units[name], s, judge)}
    if not paying:
        return [], ""
    try:
        spaces = trace(model, example)
    except Untraceable as error:
        return [], str(error)
    folds, folded = fold_(model, paying, spaces)
    structures |= folded
    return folds, ""


class _Rewrite:
    """The model while its units are replaced, those that go together before those that go alone."""

    def __init__(
        self, model: nn.Module, units: dict[str, Unit], structures: dict[str, BipartiteStructure], judge: Judge
    ) -> None:
        self.model, self.units, self.structures, self.judge = model, units, structures, judge
        self.shares = {name: unit.kept_share for name, unit in units.items()}
        self.paying = {name for name, s in structures.items() if would_pay(units[name], s, judge)}
        linear = {name: s for name, s in structures.items() if units[name].kind == "linear"}
        self.links = {name for name, s in linear.items() if would_pay(units[name], s, judge, "link")}
        self.changes: dict[str, LayerChange] = {}

    def run(self) -> None:
        for name, module in list(self.model.named_modules()):
            self._feed_forward(name, module)
        for run in list(find_runs(self.model, self._left())):
            pair = channel_pair(run, self._alone(run.names), self.judge)
            if pair is not None:
                self._record_pair(run.names, pair, {})
                self._replace_run(run, pair)
        for run in list(find_runs(self.model, self._left() & self.links)):
            found = chain(run, self.judge)
            if found is not None:
                self._record_chain(run.names, found)
                self._replace_run(run, found)
        for name in self._left():
            self._single(self.units[name])

    def _left(self) -> set[str]:
        return self.units.keys() - self.changes.keys()

    def _alone(self, names: Sequence[str]) -> int:
        """Multiply-adds of some linear layers if each is replaced alone, or not at all."""
        return sum(self.structures[n].macs if n in self.paying else self.units[n].macs for n in names)

    def _kept(self, name: str) -> int:
        """Weights that are not zero: no way to cut the layer into blocks needs fewer multiply-adds."""
        return round(self.shares[name] * self.units[name].macs)

    def _feed_forward(self, name: str, module: nn.Module) -> None:
        """Replace a module that computes a feed-forward pair by one operator if that saves more than its layers do."""
        prefix = f"{name}." if name else ""
        names = [prefix + child for child, layer in module.named_children() if type(layer) is nn.Linear]
        if type(module) is nn.Sequential or has_hooks(module) or not all(member in self.units for member in names):
            return
        kept, whole = (sum(f(n) for n in names) for f in (self._kept, lambda n: self.units[n].macs))
        found = recognise_feed_forward(module) if self.judge.pays("feed-forward", whole, kept, 0, 0, 0) else None
        if found is None:
            return
        first, second = module.get_submodule(found.first), module.get_submodule(found.second)
        gate = module.get_submodule(found.gate) if found.gate else None
        operator = BlockFeedForward.from_dense(first, found.activation, second, gate)  # type: ignore[arg-type]
        ends = operator.in_features, operator.out_features
        pays = self.judge.pays("feed-forward", operator.dense_macs, operator.macs, *ends, operator.n_blocks)
        if operator.macs >= self._alone(names) or not pays:  # of equals, layers with folded orders are faster
            return
        self._record_pair(names, operator, {prefix + child: role for child, role in found.roles.items()})
        self.model = replace_(self.model, name, operator)

    def _replace_run(self, run: Run, operator: BlockChain | BlockFeedForward) -> None:
        prefix = f"{run.parent}." if run.parent else ""
        self.model = replace_(self.model, prefix + run.places[0], operator)
        for place in run.places[1:]:
            self.model = replace_(self.model, prefix + place, nn.Identity())

    def _record_pair(self, names: Sequence[str], pair: BlockFeedForward, roles: dict[str, str]) -> None:
        """A row for each layer; what the pair needs is shared out by what the layers had."""
        units = [self.units[name] for name in names]
        macs = _shared(pair.macs, [unit.macs for unit in units])
        parameters = _shared(_size(pair), [_size(unit.module) for unit in units])
        became = _FEED_FORWARD[pair.form].format(blocks=_blocks(pair.n_blocks))
        for unit, own_macs, own_parameters in zip(units, macs, parameters, strict=True):
            role, share = roles.get(unit.name, ""), self.shares[unit.name]
            self.changes[unit.name] = change(unit, became, own_macs, own_parameters, share, pair.n_blocks, role)

    def _record_chain(self, names: Sequence[str], found: BlockChain) -> None:
        apart = f"chain of {found.n_subnetworks} subnetworks" if found.n_subnetworks > 1 else "chain"
        layers: Any = found.layers
        for name, layer in zip(names, layers, strict=True):
            became = f"{_blocks(layer.n_blocks)} in a {apart}"
            share = self.shares[name]
            self.changes[name] = change(self.units[name], became, layer.macs, _size(layer), share, layer.n_blocks)

    def _single(self, unit: Unit) -> None:
        structure, share = self.structures.get(unit.name), self.shares[unit.name]
        operator: Any = block_operator(unit, structure, self.judge)
        if operator is None:
            blocks = 1 if structure is None else structure.n_blocks
            why = "one block" if blocks == 1 and structure is not None else "blocks would not pay"
            self.changes[unit.name] = change(
                unit, f"dense, annealed: {why}", unit.macs, _size(unit.module), share, blocks
            )
            return
        self.model = replace_(self.model, unit.name, operator)
        became = _blocks(operator.n_blocks)
        if isinstance(operator, BlockRecurrent):
            became = f"{operator.n_sccs} SCCs in {became}"
        self.changes[unit.name] = change(unit, became, operator.macs, _size(operator), share, operator.n_blocks)


def replace_(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with another module at a place; that is the module itself if the place is the whole model."""
    old = model.get_submodule(name)
    module.training = old.training  # only its own: activations inside it keep theirs
    if not any(p.requires_grad for p in old.parameters()):
        module.requires_grad_(False)
    if not name:
        return module
    parent_name, _, place = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, place, module)
    if isinstance(parent, nn.TransformerEncoderLayer):
        _choose_kernel_(parent)
    return model


def _choose_kernel_(layer: nn.TransformerEncoderLayer) -> None:
    """PyTorch's fused kernel takes dense weights: it would have blocks filled up for every call, so it is left out."""
    dense = all(type(child) is nn.Linear for child in (layer.linear1, layer.linear2))
    activation: Any = layer.activation
    is_relu = activation is F.relu or isinstance(activation, nn.ReLU)
    is_gelu = activation is F.gelu or isinstance(activation, nn.GELU)
    layer.activation_relu_or_gelu = (1 * is_relu or 2 * is_gelu) if dense else 0


def _left_alone(unit: Unit) -> LayerChange:
    return change(unit, unit.reason, unit.macs, _size(unit.module), unit.kept_share, 1)


def _blocks(count: int) -> str:
    return f"{count} block{'s' * (count != 1)}" if count else "dormant: only the bias is left"


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shared(total: int, weights: Sequence[int]) -> list[int]:
    """A whole number shared out in proportion, nothing lost.

    >>> _shared(10, [1, 1, 1])
    [3, 3, 4]
    """
    whole, so_far, shares = max(sum(weights), 1), 0, []
    for weight in weights:
        shares.append(total * (so_far + weight) // whole - total * so_far // whole)
        so_far += weight
    return shares
