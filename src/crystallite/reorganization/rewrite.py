"""`reorganize`: a copy of a model in which annealed layers run as their blocks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from tqdm import tqdm

from crystallite.annealing import nulls
from crystallite.annealing.anneal import AnnealingOptions
from crystallite.annealing.random_walk import DELTA0, TAU
from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.core.progress import phase
from crystallite.core.suggest import suggest_keywords
from crystallite.graph.feed_forward import recognise_feed_forward
from crystallite.graph.sequential_calls import whole_by_definition
from crystallite.graph.trace import Spaces, Untraceable, trace
from crystallite.models.composites import collapse_, expand_
from crystallite.models.experts import units_and_experts
from crystallite.models.layers import Unit, change, has_hooks, left_alone, trained
from crystallite.models.preparing import note_call_, prepared
from crystallite.models.record import ExactOptions, Fold, LayerChange, OperatorKind, OperatorRecord, Record, set_record_
from crystallite.models.swap import put_, replace_
from crystallite.models.transformers_folder import write_config
from crystallite.operators.chain import BlockChain
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.annealed_layers import anneal_, block_operator, blocks_are_faster, structure_of
from crystallite.reorganization.cost_model import CostModel
from crystallite.reorganization.fold import fold_
from crystallite.reorganization.runs import Run, chain, channel_pair, find_runs
from crystallite.structure.bipartite import BipartiteStructure

__all__ = ["reorganize"]

_FEED_FORWARD: dict[str, OperatorKind] = {
    "pair": "feed-forward pair",
    "layers": "feed-forward layers",
    "channels": "feed-forward channels",
}


@suggest_keywords
def reorganize(
    model: nn.Module,
    *,
    level: float | str | None = 0.01,
    null: nulls.Null | str = "auto",
    correction: str | None = None,
    random_walk: str | None = "calibrated",
    rule: str = "both",
    alpha: float | None = None,
    delta0: float = DELTA0,
    tau: float = TAU,
    targets: str | Sequence[str] = ("*",),
    ignore: str | Sequence[str] = (),
    example: Any = None,
    fold: bool = True,
    channels: int | None = None,
    feed_forward: Literal["pair", "layers", "channels"] | None = None,
    only_if_faster: bool = True,
    progress: bool = False,
) -> nn.Module:
    """A copy of the model whose layers are annealed, decomposed and rebuilt from their blocks.

    The result has the interface of the model and computes exactly what the model computes with the annealed weights;
    `cx.summary` says what each layer became, `cx.restore` undoes it. Linear layers, convolutions and recurrent networks
    become blocks; feed-forward pairs and consecutive layers of an `nn.Sequential` become one operator where that saves
    more and `forward` is seen to call them only together. A layer that stays one block, or whose blocks would not pay,
    keeps its place with its annealed weight. Tied weights and other kinds of modules are left alone. Blocks are frozen
    where their weights were.

    Args:
        model: the model; it is not changed.
        level, correction, random_walk, rule, alpha, delta0, tau: as for `anneal`. level=None anneals nothing and takes
            the nonzeros of the weights as they are.
        null: "auto" believes the initialisation of a layer only if it explains the bulk of its weights, else it
            measures the bulk; "init" always believes it; "empirical" always measures; or one null for all.
        targets, ignore: a pattern of layer names, or several (`encoder.*.dense`).
        example: inputs (a tensor, a tuple or a dict) to follow the neurons through a model that cannot be traced
            without.
        fold: put the order of hidden neurons into the stored weights where the model allows it, those of layers left
            alone included, so that less is moved at run time. Inside, hidden neurons then have other numbers. Only
            `forward` is followed, in evaluation and in training mode: a model with parameters that it does not use is
            not folded.
        channels: into how many a d–cd–d feed-forward pair is cut where its channels are taken one by one; c by default.
        feed_forward: the form of every such pair, whatever it saves (see `BlockFeedForward`); None: where one saves
            more than blocks of single layers, the one that saves most.
        only_if_faster: replace a layer only where its blocks are expected to run faster on a CPU, small batches
            included; False: wherever they need fewer multiply-adds.
        progress: a bar on standard error.

    Returns:
        A model with the interface of the original, whose layers are blocks where that is worth it.

    Raises:
        InvalidOption: an option outside the values it may take, or a pattern that matches no layer; it names the
            nearest.

    Examples:
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
    model, notes = prepared(model, dense=True)
    targets, ignore = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    result = expand_(copy.deepcopy(model))
    units = {unit.name: unit for unit in units_and_experts(result, targets, ignore)}
    if not units:
        raise InvalidOption(f"no layer with weights matches targets {targets} and ignore {ignore}")
    usable = {name: unit for name, unit in units.items() if not unit.reason}
    initial = nulls.for_module(result) if usable else {}
    structures = {}
    for name, unit in tqdm(usable.items(), unit="layer", disable=not progress):
        if level is not None:
            known = initial if isinstance(initial, dict) else {}
            tests = AnnealingOptions(level, correction, random_walk, rule, alpha, delta0, tau)
            anneal_(unit, known, null, tests)
        structure = structure_of(unit)
        if structure is not None:
            structures[name] = structure
    cost_model = CostModel(only_if_faster)
    faster = {name: s for name, s in structures.items() if blocks_are_faster(usable[name], s, cost_model)}
    whole, folds, reason = whole_by_definition(result), list[Fold](), ""
    if (fold and faster) or any(run.parent not in whole for run in find_runs(result, usable)):
        with phase("tracing", progress):
            spaces, reason = _traced(result, example)
        whole |= frozenset() if spaces is None else spaces.whole
        if fold and faster and spaces is not None and not reason:
            folds = fold_(result, faster, spaces)
            moved = {name for each in folds for name, _ in each.places}
            structures |= {name: _now(usable[name]) for name in structures if f"{name}.weight" in moved}
    rewrite = _Rewrite(result, usable, structures, cost_model, whole, channels, feed_forward)
    rewrite.run()
    rewrite.model = collapse_(rewrite.model)
    rewrite.changes |= {name: left_alone(unit) for name, unit in units.items() if unit.reason}
    options = ExactOptions(level, str(null), correction, random_walk, rule, alpha, delta0, tau, channels, feed_forward)
    changes = tuple(rewrite.changes[name] for name in units)
    set_record_(rewrite.model, Record(options, changes, tuple(folds), reason if fold and faster else "", notes))
    note_call_(rewrite.model, [] if example is None else [example])
    write_config(rewrite.model, model)
    return rewrite.model


def _traced(model: nn.Module, example: Any) -> tuple[Spaces | None, str]:
    """What `forward` does with the model's neurons, as far as it can be followed, and why nothing may be folded."""
    try:
        spaces = trace(model, example)
    except Untraceable as error:
        return None, str(error)
    return spaces, f"{spaces.unused[0]} is not used by forward" if spaces.unused else ""


def _now(unit: Unit) -> BipartiteStructure:
    """The blocks of a layer with a structure, as its weights are now."""
    structure = structure_of(unit)
    assert structure is not None
    return structure


class _Rewrite:
    """The model while its units are replaced, those that go together before those that go alone."""

    def __init__(
        self, model: nn.Module, units: dict[str, Unit], structures: dict[str, BipartiteStructure],
        cost_model: CostModel, whole: frozenset[str], channels: int | None, form: str | None,
    ) -> None:  # fmt: skip
        """whole: nn.Sequentials that are only called as a whole; channels and form of feed-forward pairs."""
        self.channels, self.form = channels, form
        self.model, self.units, self.structures, self.cost_model, self.whole = (
            model,
            units,
            structures,
            cost_model,
            whole,
        )
        self.shares = {name: unit.kept_share for name, unit in units.items()}
        self.faster = {name for name, s in structures.items() if blocks_are_faster(units[name], s, cost_model)}
        linear = {name: s for name, s in structures.items() if units[name].kind == "linear"}
        self.links = {name for name, s in linear.items() if blocks_are_faster(units[name], s, cost_model, "link")}
        self.changes: dict[str, LayerChange] = {}

    def run(self) -> None:
        for name, module in list(self.model.named_modules()):
            self._feed_forward(name, module)
        for run in self._runs(self._left()):
            pair = channel_pair(run, self._alone(run.names), self.cost_model, self.channels, self.form)
            if pair is not None:
                self._record_pair(run.names, pair, {})
                self._replace_run(run, pair)
        for run in self._runs(self._left() & self.links):
            found = chain(run, self.cost_model)
            if found is not None:
                self._record_chain(run.names, found)
                self._replace_run(run, found)
        for name in self._left():
            self._single(self.units[name])

    def _runs(self, names: set[str]) -> list[Run]:
        """Runs of layers that are called only together and are frozen alike."""
        alike: dict[tuple[bool, bool], set[str]] = {}
        for name in names:
            alike.setdefault(trained(self.units[name].module), set()).add(name)
        found = (run for group in alike.values() for run in find_runs(self.model, group))
        return [run for run in found if run.parent in self.whole]

    def _left(self) -> set[str]:
        return self.units.keys() - self.changes.keys()

    def _alone(self, names: Sequence[str]) -> int:
        """Multiply-adds of some linear layers if each is replaced alone, or not at all."""
        return sum(self.structures[n].macs if n in self.faster else self.units[n].macs for n in names)

    def _kept(self, name: str) -> int:
        """Weights that are not zero: no way to cut the layer into blocks needs fewer multiply-adds."""
        return round(self.shares[name] * self.units[name].macs)

    def _feed_forward(self, name: str, module: nn.Module) -> None:
        """Replace a module that computes a feed-forward pair by one operator if that saves more than its layers do."""
        prefix = f"{name}." if name else ""
        names = [prefix + child for child, layer in module.named_children() if type(layer) is nn.Linear]
        if type(module) is nn.Sequential or has_hooks(module) or not all(member in self.units for member in names):
            return
        if any(self.units[member].shared for member in names):
            return
        if len({trained(self.units[member].module) for member in names}) != 1:
            return
        kept, whole = (sum(f(n) for n in names) for f in (self._kept, lambda n: self.units[n].macs))
        may_be_faster = self.form is not None or self.cost_model.is_faster("feed-forward", whole, kept, 0)
        found = recognise_feed_forward(module) if may_be_faster else None
        if found is None:
            return
        first: Any = module.get_submodule(found.first)
        second: Any = module.get_submodule(found.second)
        gate: Any = module.get_submodule(found.gate) if found.gate else None
        operator = BlockFeedForward.from_dense(first, found.activation, second, gate, self.channels, self.form)
        is_faster = self.cost_model.is_faster("feed-forward", operator.dense_macs, operator.macs, operator.n_blocks)
        # of equals, layers with folded orders are faster
        if self.form is None and (operator.macs >= self._alone(names) or not is_faster):
            return
        self._record_pair(names, operator, {prefix + child: role for child, role in found.roles.items()})
        self._replace(name, operator, names)

    def _replace_run(self, run: Run, operator: BlockChain | BlockFeedForward) -> None:
        prefix = f"{run.parent}." if run.parent else ""
        self._replace(prefix + run.places[0], operator, run.names)
        for place in run.places[1:]:
            idle = nn.Identity().train(self.model.get_submodule(prefix + place).training)
            self.model = put_(self.model, prefix + place, idle)  # an activation may be used elsewhere too

    def _replace(self, name: str, operator: nn.Module, layers: Sequence[str]) -> None:
        """Put an operator in the place of layers, all of whose weights it must hold: others would be lost silently."""
        kept, there = (sum(map(_nonzeros, m)) for m in ([operator], [self.units[layer].module for layer in layers]))
        if kept != there:
            raise InvalidMatrix(
                f"{', '.join(layers) or 'the model'}: expected blocks that hold all {there} nonzero numbers, they hold "
                f"{kept}; add the layer to ignore= and report this"
            )
        self.model = replace_(self.model, name, operator)

    def _record_pair(self, names: Sequence[str], pair: BlockFeedForward, roles: dict[str, str]) -> None:
        """A row for each layer; what the pair needs is shared out by what the layers had."""
        units = [self.units[name] for name in names]
        macs = _shared(pair.macs, [unit.macs for unit in units])
        parameters = _shared(_size(pair), [_size(unit.module) for unit in units])
        operator = OperatorRecord(_FEED_FORWARD[pair.form], pair.n_blocks)
        for unit, own_macs, own_parameters in zip(units, macs, parameters, strict=True):
            role, share = roles.get(unit.name, ""), self.shares[unit.name]
            self.changes[unit.name] = change(
                unit, operator, macs=own_macs, parameters=own_parameters, share=share, role=role
            )

    def _record_chain(self, names: Sequence[str], found: BlockChain) -> None:
        layers: Any = found.layers
        for name, layer in zip(names, layers, strict=True):
            operator = OperatorRecord("chain", layer.n_blocks, subnetworks=found.n_subnetworks)
            self._record(self.units[name], operator, layer)

    def _record(self, unit: Unit, operator: OperatorRecord, module: Any) -> None:
        macs = unit.macs if module is unit.module else module.macs
        share = self.shares[unit.name]
        self.changes[unit.name] = change(unit, operator, macs=macs, parameters=_size(module), share=share)

    def _single(self, unit: Unit) -> None:
        structure = self.structures.get(unit.name)
        operator: Any = block_operator(unit, structure, self.cost_model)
        if operator is None:
            blocks = 1 if structure is None else structure.n_blocks
            why = "one block" if blocks == 1 and structure is not None else "blocks would not pay"
            self._record(unit, OperatorRecord("dense", blocks, reason=f"annealed: {why}"), unit.module)
            return
        self._replace(unit.name, operator, [unit.name])
        sccs = operator.n_sccs if isinstance(operator, BlockRecurrent) else 0
        self._record(unit, OperatorRecord("blocks", operator.n_blocks, sccs=sccs), operator)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _nonzeros(module: nn.Module) -> int:
    return sum(int(p.count_nonzero()) for p in module.parameters())


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
