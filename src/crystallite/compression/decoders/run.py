"""A decoder compressed layer by layer: probed backwards once, allotted sizes, fitted forwards."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.decoders.layer_fit import FittedLayer, fit_layer_
from crystallite.compression.decoders.layer_parts import LayerParts, find_parts
from crystallite.compression.decoders.sensitivity import (
    LayerProbe,
    ProbeSums,
    least_weights_of,
    probe_of,
    weights_of,
)
from crystallite.compression.decoders.share_out import SizeCurve, share_out
from crystallite.compression.decoders.shares import Chunks, Layers, OneShare, Share, Shares, positions_of
from crystallite.compression.decoders.stack import Stack
from crystallite.compression.decoders.token_tables import HeadSums, Tables, fit_tables
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.whole_cost import NOT_ASKED
from crystallite.core.errors import InvalidOption
from crystallite.core.free_memory import give_back
from crystallite.core.suggest import matching
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.models.familiarity import Readings, chosen_of, known_of
from crystallite.models.layers import Unit, change, find_units
from crystallite.models.record import CompressedOptions, Familiar, LayerChange, OperatorRecord, Record
from crystallite.statistics.moments import Moments

__all__ = ["CHUNK", "DecoderFit", "DecoderOptions", "OutOfReach", "as_tokens", "fit_decoder"]

CHUNK = 512  # positions that are run at once
_SHARED_STEP = 8  # neurons, where all layers have as many: what processors multiply at once


class OutOfReach(InvalidOption):
    """A budget that needs more than fewer neurons and numbers of heads; nothing has been done yet."""


@dataclass(frozen=True)
class DecoderOptions:
    """What was asked for; see `compress`."""

    budgets: tuple[float, ...]
    objective: str
    form: str
    ridge: float
    seed: int
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    embeddings: float | None = None

    def __post_init__(self) -> None:
        if self.embeddings is None:
            return
        if isinstance(self.embeddings, bool) or not 0 < self.embeddings < 1:
            raise InvalidOption(f"embeddings: expected a share between 0 and 1, got {self.embeddings!r:.80}")
        if self.form != "any":
            raise InvalidOption(
                f'embeddings: a table and a head of low rank are no ordinary layers, as form="{self.form}" asks for; '
                'pass form="any", or leave embeddings out'
            )


Sizes = tuple[Mapping[str, int], ...]  # by layer: part → neurons that are left


@dataclass(frozen=True)
class DecoderFit:
    """A decoder whose layers are fitted one after the other."""

    stack: Stack
    layers: Layers
    shares: Shares
    example: Batch
    form: str
    ridge: float
    work: Workspace
    kept: Mapping[int, Sequence[str]] = field(default_factory=dict)  # by layer: what must stay as it is
    progress: bool = False
    _parts: dict[Any, LayerParts] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.stack.layers)

    @property
    def found_parts(self) -> list[LayerParts]:
        """Of all kinds of layers seen so far."""
        return list(self._parts.values())

    def parts(self, number: int) -> LayerParts:
        """What may go from a layer; found once for all layers of one shape."""
        keep, layer = tuple(self.kept.get(number, ())), self.stack.layers[number]
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        key = (type(layer), shapes, keep)
        if key not in self._parts:
            self._parts[key] = find_parts(self.stack, self.layers.read(number), self.example, self.form, keep)
            gc.collect()  # graphs, and models in them, refer to themselves
            give_back()
        return self._parts[key]

    def check(self, total: float, saved: float, limits: Mapping[float, float]) -> None:
        """Refuse budgets that cannot be reached, before work begins; limits: what each leaves of the total.

        saved: what goes outside the layers.
        """
        least = total - saved
        for number, layer in enumerate(self.stack.layers):
            for group in self.parts(number).groups.values():
                least -= weights_of(layer, group) - least_weights_of(layer, group)
        for budget, limit in limits.items():
            if least > limit:
                raise OutOfReach(
                    f'budget {budget:g} with form="{self.form}": the smallest that can be reached here is '
                    f"{least / total:.3f} of it"
                )

    @torch.no_grad()
    def probe(self) -> list[LayerProbe]:
        """What each size of each part costs, by a sample of the data; see `sensitivity.py`.

        Without the factors, which are large together: `fit` reads those of one layer at a time.
        """
        work, numbers = self.work, range(self.count)
        parts = [self.parts(number) for number in numbers]
        with tqdm(total=2 * self.count, desc="probing", disable=not self.progress) as bar:
            known = next((n for n in numbers if work.has(f"probe-{n}")), self.count)
            bar.update(2 * (self.count - known))
            for number in range(known):
                self.shares.each(Share.advance, number)
                bar.update()
            for number in range(known - 1, -1, -1):
                sums = ProbeSums.total(self.shares.each(Share.probe, number, parts))
                give_back()  # activations: what follows needs room for large matrices
                found = probe_of(self.layers.read(number), parts[number], sums)
                work.put(f"probe-{number}", found.to_tensors())  # from here on, nothing above is needed
                self.shares.each(Share.forget_probe, number)
                give_back()
                bar.update()
        return [replace(self._probed(n), factors={}) for n in numbers]

    def fit_tables(self, tables: Tables) -> list[LayerProbe]:
        """`probe`, and the tables of tokens, which are known from then on."""
        known = self.layers.tables() is not None
        head = None if known else HeadSums.total(self.shares.each(Share.head_sums))
        probes = self.probe()
        if head is not None:
            found = self.shares.each(Share.first_gradients, [self.parts(n) for n in range(self.count)])
            positions, squares = (sum(some[1:], some[0]) for some in zip(*found, strict=True))
            self.layers.write_tables(tables, fit_tables(self.stack.model, tables, head, squares, positions))
        return probes

    def _probed(self, number: int) -> LayerProbe:
        return LayerProbe.from_tensors(self.work.get(f"probe-{number}"))

    def plan(self, probes: Sequence[LayerProbe], total: float, limit: float) -> Sizes:
        """Sizes that add least damage and leave at most `limit` of what all costs."""
        curves: dict[str, SizeCurve] = {}
        for number, probe in enumerate(probes):
            for key, costs in probe.costs.items():
                sizes, errors, weights = (tuple(column) for column in costs.T.tolist())
                curves[f"{number} {key}"] = SizeCurve(tuple(map(int, sizes)), errors, weights)
        if not curves:
            raise InvalidOption("no part of any layer can be made smaller")
        names = {name: name.partition(" ")[2] for name in curves} if self.form == "uniform" else {n: n for n in curves}
        joined: dict[str, list[SizeCurve]] = {}
        for name, joint in names.items():
            joined.setdefault(joint, []).append(curves[name])
        summed = {name: SizeCurve.sum(some) for name, some in joined.items()}
        if self.form == "uniform":  # a step is one of all layers at once: that of a single layer would leave much over
            summed = {name: curve.finer(_SHARED_STEP) for name, curve in summed.items()}
        chosen = share_out(summed, total, limit)
        found: list[dict[str, int]] = [{} for _ in probes]
        for name in curves:
            layer, _, key = name.partition(" ")
            found[int(layer)][key] = chosen[names[name]]
        return tuple(found)

    @torch.no_grad()
    def fit(self, plans: Sequence[Sizes]) -> list[dict[int, FittedLayer]]:
        """Make every layer smaller, one after the other, for all plans while the dense stream is there.

        What the layers cost is known from `probe`. Afterwards `output_errors` compares the streams.
        """
        work, results, watched = self.work, range(len(plans)), chosen_of(self.count)
        done: list[dict[int, FittedLayer]] = [{} for _ in plans]
        with tqdm(total=self.count * len(plans), desc="fitting", disable=not self.progress) as bar:
            for number in range(self.count):
                for result in results:
                    if (before := self.layers.written(result, number)) is not None:
                        done[result][number] = before
                        bar.update()
                missing = [result for result in results if number not in done[result]]
                if not missing:
                    continue
                dense = self.layers.read(number)
                parts, probe = self.parts(number), self._probed(number)
                self.shares.each(Share.run_dense, number, parts)
                for result in missing:
                    layer, readings = copy.deepcopy(dense), Readings("")
                    data = _LayerData(self.shares, result, number, parts, readings if number in watched else None)
                    fitted = fit_layer_(layer, parts, probe, plans[result][number], data, self.ridge)
                    self.shares.each(Share.finish, result, number, layer, parts)
                    if readings.count:
                        work.put(f"inputs-{result}-{number}", readings.to_tensors())
                    self.layers.write(result, number, layer, fitted)  # from here on, nothing before is needed
                    self.shares.each(Share.forget_small, result, number)
                    done[result][number] = fitted
                    bar.update()
                self.shares.each(Share.forget_dense, number, parts)
        return done

    def inputs(self, result: int) -> tuple[Familiar, ...]:
        """What some layers of a smaller model read."""
        found = []
        for number in chosen_of(self.count):
            if self.work.has(f"inputs-{result}-{number}"):
                name = f"{self.stack.layer_name(number)}.{self.parts(number).readers[-1]}"
                found.append(Readings.from_tensors(name, self.work.get(f"inputs-{result}-{number}")))
        return known_of(found)

    @torch.no_grad()
    def output_errors(self, results: int) -> list[float]:
        """Of the probabilities, on held-out data: see `output_error` of models; all streams are at their ends."""
        give_back()
        found = {n: each for some in self.shares.each(Share.output_errors, results) for n, each in some.items()}
        errors = [[error for n in sorted(found) for error in found[n][result]] for result in range(results)]
        return [sum(some) / len(some) for some in errors]


@dataclass(frozen=True)
class _LayerData:
    """What a layer of one of the smaller models is fitted to; see `FitData`."""

    shares: Shares
    result: int
    number: int
    parts: LayerParts
    readings: Readings | None

    def moments(self, layer: nn.Module, reader: str, watch: bool) -> tuple[Moments, Moments]:
        watch = watch and self.readings is not None
        found = self.shares.each(Share.moments, self.result, self.number, layer, self.parts, reader, watch)
        if self.readings is not None:
            for _, _, read in found:
                self.readings.join(read)
        fitted, held_out, _ = zip(*found, strict=True)
        return Moments.total(fitted), Moments.total(held_out)

    def add(self, layer: nn.Module, reader: str, weight: Tensor | None) -> None:
        self.shares.each(Share.add, self.result, self.number, layer, self.parts, reader, weight)


def in_chunks(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Batches of so many positions that a run is quick and small."""
    return tuple(part for b in batches for part in b.split(max(1, CHUNK // max(1, positions_of(b) // b.size))))


def as_tokens(batch: Batch) -> Batch:
    """Tokens under the name that language models have for them."""
    if batch.named or len(batch.positional) != 1:
        return batch
    return replace(batch, positional=(), named={"input_ids": batch.positional[0]})


def changes_of(
    units: Sequence[Unit], stack: Stack, fitted: Mapping[int, FittedLayer], alone: Callable[[str], str],
    tables: Tables | None = None,
) -> Iterator[LayerChange]:  # fmt: skip
    """What became of every layer of a model; alone: why one that did not change stayed as it was."""
    for unit in units:
        if tables is not None and (became_table := tables.change_of(unit)) is not None:
            yield became_table
            continue
        number, _, inside = unit.name.removeprefix(f"{stack.name}.").partition(".")
        here = fitted.get(int(number)) if unit.name.startswith(f"{stack.name}.") and number.isdigit() else None
        if here is None or (inside not in here.sizes and inside not in here.errors):
            stays = OperatorRecord("left alone", reason=unit.reason or alone(unit.name))
            yield change(unit, stays, macs=unit.macs, parameters=unit.parameters, share=1.0)
            continue
        outputs, inputs = unit.matrix.shape
        left = here.sizes.get(inside, (outputs, inputs))
        error = here.errors.get(inside)
        became = OperatorRecord(
            "dense", outputs=(left[0], outputs), inputs=(left[1], inputs), reason="fitted again", error=error,
            repairs=error is not None,
        )  # fmt: skip
        macs = left[0] * left[1]
        biases = 0 if unit.bias is None else left[0]
        yield change(unit, became, macs=macs, parameters=macs + biases, share=macs / unit.macs)


@torch.no_grad()
def fit_decoder(
    stack: Stack, layers: Layers, data: Calibration, options: DecoderOptions, work: Workspace, progress: bool,
    spread: Callable[[Stack, Chunks], Shares] | None = None,
) -> list[tuple[Record, list[tuple[int, int]]]]:  # fmt: skip
    """Probe once, then allot and fit for each budget; what became of every layer, and sizes that all layers share.

    The sizes are those before and after. spread: who keeps the calibration data; left out, this process does.
    """
    fitted, held_out = (in_chunks([as_tokens(b) for b in some]) for some in (data.fitted, data.held_out))
    units = find_units(stack.model, ["*"], [])
    asked = {*matching([unit.name for unit in units], options.targets, options.ignore)}
    kept = {
        n: [name for name, _ in layer.named_modules() if name and f"{stack.layer_name(n)}.{name}" not in asked]
        for n, layer in enumerate(stack.layers)
    }
    quick, chunks = stack.quick(), Chunks.of(fitted, held_out, options.seed)
    shares = OneShare(Share(quick, layers, chunks, work)) if spread is None else spread(quick, chunks)
    fit = DecoderFit(quick, layers, shares, fitted[0], options.form, options.ridge, work, kept, progress)
    tables = None if options.embeddings is None else Tables.of(stack.model, options.embeddings, asked)
    if options.objective == "parameters":
        total, saved = sum(p.numel() for p in stack.model.parameters()), tables.saved if tables else 0
    else:
        total, saved = sum(unit.macs for unit in units), tables.saved_macs if tables else 0
    fit.check(total, saved, {budget: budget * total for budget in options.budgets})
    probes, plans = fit.fit_tables(tables) if tables else fit.probe(), []
    for budget in options.budgets:
        try:
            plans.append(fit.plan(probes, total - saved, budget * total))
        except InvalidOption as error:
            raise InvalidOption(f'budget {budget:g} with form="{options.form}": {error}') from None
    done = fit.fit(plans)
    parts = next(iter(fit.found_parts), LayerParts())

    def alone(name: str) -> str:
        inside = name.removeprefix(f"{stack.name}.").partition(".")[2]
        if name not in asked:
            return NOT_ASKED
        if not name.startswith(f"{stack.name}."):
            return "outside the layers"
        return parts.alone.get(inside, "") or f'nothing of it may go with form="{options.form}"'

    mixed = [
        f"{stack.layer_name(number)}.{name}"
        for number, found in enumerate(fit.found_parts)
        for group in found.groups.values()
        if group.inside_heads and group.readers
        for name in group.writers
    ]
    before = {key: group.size for found in fit.found_parts for key, group in found.groups.items()}
    results = []
    errors = fit.output_errors(len(plans))
    for result, (budget, sizes, held_out_error) in enumerate(zip(options.budgets, plans, errors, strict=True)):
        made = CompressedOptions(
            options.ridge, options.seed, held_out_error, budget=budget, objective=options.objective,  # type: ignore[arg-type]
            form=options.form, heads_kept={name: why for name, why in parts.alone.items() if ":" in name},  # type: ignore[arg-type]
            heads_mixed=tuple(mixed), inputs=fit.inputs(result), data=data.size, counted="for one token",
        )  # fmt: skip
        shared = [(before[key], size) for key, size in sizes[0].items()] if options.form == "uniform" else []
        changes = changes_of(units, stack, done[result], alone, tables)
        results.append((Record(made, tuple(changes)), shared))
    return results
