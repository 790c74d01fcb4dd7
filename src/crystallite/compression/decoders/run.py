"""A decoder compressed layer by layer: probed backwards once, allotted sizes, fitted forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.decoders.layer_fit import Chunk, FittedLayer, Streams, fit_layer_, goals_of
from crystallite.compression.decoders.layer_parts import LayerParts, find_parts
from crystallite.compression.decoders.sensitivity import (
    LayerProbe,
    back_through,
    gradients_at_end,
    least_weights_of,
    weights_of,
)
from crystallite.compression.decoders.share_out import SizeCurve, share_out
from crystallite.compression.decoders.stack import Call, Calls, Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.whole_cost import NOT_ASKED
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import matching
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import judged
from crystallite.data.positions import real_positions
from crystallite.models.familiarity import Readings, chosen_of, known_of
from crystallite.models.layers import Unit, change, find_units
from crystallite.models.record import CompressedOptions, Familiar, LayerChange, OperatorRecord, Record
from crystallite.statistics.output_error import relative_error

__all__ = ["CHUNK", "DecoderFit", "DecoderOptions", "Layers", "OutOfReach", "as_tokens", "fit_decoder"]

CHUNK = 2048  # positions that are run at once
_PROBED = 8192  # positions from which sizes are chosen
_HEAD = 64  # positions at once, where logits of both models are compared
_JUDGED = 2048  # positions held out at which they are


class OutOfReach(InvalidOption):
    """A budget that needs more than fewer neurons and numbers of heads; nothing has been done yet."""


class Layers(Protocol):
    """Where the weights of a decoder's layers come from, and where those of the smaller ones go.

    result: which of the smaller models, one for each budget.
    """

    def read(self, number: int) -> nn.Module:
        """A dense layer; it may be changed only if it is a copy."""
        ...

    def write(self, result: int, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        """Take a layer that has become smaller."""
        ...

    def written(self, result: int, number: int) -> FittedLayer | None:
        """What was made of a layer before the run was interrupted, if so."""
        ...


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


Sizes = tuple[Mapping[str, int], ...]  # by layer: part → neurons that are left


@dataclass(frozen=True)
class DecoderFit:
    """A decoder whose layers are fitted one after the other."""

    stack: Stack
    layers: Layers
    batches: tuple[Batch, ...]  # in chunks, those held out at the end
    calls: Calls  # of these
    held_out: int  # of these
    form: str
    ridge: float
    seed: int
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

    def begin(self, number: int) -> Tensor:
        """What the first layer reads of a chunk."""
        return self.stack.begin(self.batches[number])[0]

    def call(self, number: int, layer: int) -> Call:
        """What a layer is called with beside hidden states of a chunk."""
        return self.calls.of(number, layer)

    def parts(self, number: int) -> LayerParts:
        """What may go from a layer; found once for all layers of one shape."""
        keep, layer = tuple(self.kept.get(number, ())), self.stack.layers[number]
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        key = (type(layer), shapes, keep)
        if key not in self._parts:
            self._parts[key] = find_parts(self.stack, self.layers.read(number), self.batches[0], self.form, keep)
        return self._parts[key]

    def check(self, total: float, limits: Mapping[float, float]) -> None:
        """Refuse budgets that cannot be reached, before work begins; limits: what each leaves of the total."""
        least = total
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
        """What each size of each part costs, by a sample of the data; see `sensitivity.py`."""
        work, chunks = self.work, self._probed()
        with tqdm(total=2 * self.count, desc="probing", disable=not self.progress) as bar:
            hidden = {n: self.begin(n) for n in chunks}
            for number in range(self.count):
                bar.update()
                if work.has(f"probe-{number}") or work.has(f"states-{number}"):
                    continue
                if number:
                    hidden = {int(k): v for k, v in work.get(f"states-{number - 1}").items()}
                    layer = self.layers.read(number - 1)
                    hidden = {n: self.stack.run(layer, h, self.call(n, number - 1)) for n, h in hidden.items()}
                work.put(f"states-{number}", {str(n): h for n, h in hidden.items()})
            known = next((n for n in range(self.count) if work.has(f"probe-{n}")), self.count)
            if known == self.count and not work.has(f"gradients-{known - 1}"):
                layer = self.layers.read(self.count - 1)
                before = work.get(f"states-{self.count - 1}")
                ends = {n: self.stack.run(layer, before[str(n)], self.call(n, self.count - 1)) for n in chunks}
                after = {str(n): self._gradients(n, h) for n, h in ends.items()}
                work.put(f"gradients-{known - 1}", after)
            for number in range(known - 1, -1, -1):
                layer = self.layers.read(number)
                states, above = work.get(f"states-{number}"), work.get(f"gradients-{number}")
                given = [(states[str(n)], self.call(n, number), above[str(n)]) for n in chunks]
                found, below = back_through(self.stack, layer, self.parts(number), given)
                work.put(f"gradients-{number - 1}", {str(n): g for n, g in zip(chunks, below, strict=True)})
                work.put(f"probe-{number}", found.to_tensors())  # from here on, nothing above is needed
                work.drop(f"gradients-{number}")
                work.drop(f"states-{number}")
                bar.update()
        return [LayerProbe.from_tensors(work.get(f"probe-{n}")) for n in range(self.count)]

    def _gradients(self, number: int, hidden: Tensor) -> Tensor:
        """At what the last layer writes of a chunk; nothing where there is padding, and so nowhere before it."""
        found = gradients_at_end(self.stack, hidden, self.seed + number)
        padding = torch.ones(found.shape[:2], dtype=torch.bool).flatten()
        padding[self._real(number)] = False
        return found.masked_fill(padding.view(found.shape[:2]).to(found.device)[..., None], 0)

    def _probed(self) -> list[int]:
        """Chunks of which gradients are taken: as many as are needed, spread over the data."""
        sizes = [_positions(batch) for batch in self.batches]
        wanted = max(1, min(len(sizes), round(_PROBED / max(sum(sizes) / len(sizes), 1))))
        return sorted({int(i * len(sizes) / wanted) for i in range(wanted)})

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
        chosen = share_out({name: SizeCurve.sum(some) for name, some in joined.items()}, total, limit)
        found: list[dict[str, int]] = [{} for _ in probes]
        for name in curves:
            layer, _, key = name.partition(" ")
            found[int(layer)][key] = chosen[names[name]]
        return tuple(found)

    @torch.no_grad()
    def fit(self, probes: Sequence[LayerProbe], plans: Sequence[Sizes]) -> list[dict[int, FittedLayer]]:
        """Make every layer smaller, one after the other, for all plans while the dense stream is there.

        Afterwards `output_errors` compares the streams.
        """
        work, results = self.work, range(len(plans))
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
                parts = self.parts(number)
                self._run_dense(dense, parts, number)
                for result in missing:
                    layer = copy.deepcopy(dense)
                    streams, readings = self._streams(parts, number, result), Readings("")
                    fitted, ends = fit_layer_(
                        self.stack, layer, parts, probes[number], plans[result][number], streams, self.ridge,
                        readings if number in chosen_of(self.count) else None,
                    )  # fmt: skip
                    for n, end in enumerate(ends):
                        work.put(f"small-{result}-{number + 1}-{n}", {"hidden": end})
                    if readings.count:
                        work.put(f"inputs-{result}-{number}", readings.to_tensors())
                    self.layers.write(result, number, layer, fitted)  # from here on, nothing before is needed
                    self._drop(*(f"small-{result}-{number}-{n}" for n in range(len(self.batches))))
                    done[result][number] = fitted
                    bar.update()
                for n in range(len(self.batches)):
                    self._drop(f"dense-{number}-{n}", *(f"goal-{n}-{name}" for name in parts.readers))
        return done

    def inputs(self, result: int) -> tuple[Familiar, ...]:
        """What some layers of a smaller model read."""
        found = []
        for number in chosen_of(self.count):
            if self.work.has(f"inputs-{result}-{number}"):
                name = f"{self.stack.layer_name(number)}.{self.parts(number).readers[-1]}"
                found.append(Readings.from_tensors(name, self.work.get(f"inputs-{result}-{number}")))
        return known_of(found)

    def _run_dense(self, dense: nn.Module, parts: LayerParts, number: int) -> None:
        """Keep what the dense stream is behind a layer, and behind what adds to it there."""
        for n in range(len(self.batches)):
            if number == 0:
                self.work.put(f"dense-0-{n}", {"hidden": self.begin(n)})
            chunk = self._chunk(n, self.work.get(f"dense-{number}-{n}")["hidden"], self.call(n, number))
            end, goals = goals_of(self.stack, dense, parts, chunk)
            self.work.put(f"dense-{number + 1}-{n}", {"hidden": end})
            for name, goal in goals.items():
                self.work.put(f"goal-{n}-{name}", {"hidden": goal})

    def _streams(self, parts: LayerParts, number: int, result: int) -> Streams:
        """What one of the smaller models has where a layer begins, and the dense one behind its readers."""

        def load(n: int) -> Chunk:
            name = f"small-{result}-{number}-{n}" if number else f"dense-0-{n}"
            return self._chunk(n, self.work.get(name)["hidden"], self.call(n, number))

        def goal(n: int, name: str) -> Tensor:
            last = parts.adds and name == parts.readers[-1]
            return self.work.get(f"dense-{number + 1}-{n}" if last else f"goal-{n}-{name}")["hidden"]

        return Streams(load, goal, len(self.batches), self.work)

    def _chunk(self, number: int, hidden: Tensor, call: Call) -> Chunk:
        held_out = number >= len(self.batches) - self.held_out
        return Chunk(hidden, call, self._real(number), held_out)

    def _drop(self, *names: str) -> None:
        for name in names:
            self.work.drop(name)

    def _real(self, number: int) -> Tensor | slice:
        """Of the positions of a chunk in one row, those that are no padding."""
        batch = self.batches[number]
        return real_positions(batch, batch.named["input_ids"].shape)

    @torch.no_grad()
    def output_errors(self, results: int) -> list[float]:
        """Of the probabilities, on held-out data: see `output_error` of models; all streams are at their ends."""
        errors: list[list[float]] = [[] for _ in range(results)]
        positions = sum(_positions(batch) for batch in self.batches[-self.held_out :])
        every = max(1, positions // _JUDGED)
        for number in range(len(self.batches) - self.held_out, len(self.batches)):
            names = [f"dense-{self.count}-{number}", *(f"small-{r}-{self.count}-{number}" for r in range(results))]
            ends = [self.work.get(name)["hidden"].flatten(0, 1)[self._real(number)][::every] for name in names]
            for start in range(0, len(ends[0]), _HEAD):
                logits = (self.stack.end(end[start : start + _HEAD, None])[:, 0] for end in ends)
                expected, *found = (next(iter(judged({"logits": rows}).values())) for rows in logits)
                for some, each in zip(errors, found, strict=True):
                    some.append(float(relative_error(each, expected, Batch(0, 1))))
        return [sum(some) / len(some) for some in errors]


def _positions(batch: Batch) -> int:
    return int(batch.named["input_ids"].numel())


def in_chunks(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Batches of so many positions that a run is quick and small."""
    return tuple(part for b in batches for part in b.split(max(1, CHUNK // max(1, _positions(b) // b.size))))


def as_tokens(batch: Batch) -> Batch:
    """Tokens under the name that language models have for them."""
    if batch.named or len(batch.positional) != 1:
        return batch
    return replace(batch, positional=(), named={"input_ids": batch.positional[0]})


def changes_of(
    units: Sequence[Unit], stack: Stack, fitted: Mapping[int, FittedLayer], alone: Callable[[str], str]
) -> Iterator[LayerChange]:
    """What became of every layer of a model; alone: why one that did not change stayed as it was."""
    for unit in units:
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
    stack: Stack, layers: Layers, data: Calibration, options: DecoderOptions, work: Workspace, progress: bool
) -> list[tuple[Record, list[tuple[int, int]]]]:
    """Probe once, then allot and fit for each budget; what became of every layer, and sizes that all layers share.

    The sizes are those before and after.
    """
    fitted, held_out = (in_chunks([as_tokens(b) for b in some]) for some in (data.fitted, data.held_out))
    units = find_units(stack.model, ["*"], [])
    asked = {*matching([unit.name for unit in units], options.targets, options.ignore)}
    kept = {
        n: [name for name, _ in layer.named_modules() if name and f"{stack.layer_name(n)}.{name}" not in asked]
        for n, layer in enumerate(stack.layers)
    }
    quick, chunks = stack.quick(), (*fitted, *held_out)
    fit = DecoderFit(
        quick, layers, chunks, Calls(quick, chunks), len(held_out), options.form, options.ridge, options.seed, work,
        kept, progress,
    )  # fmt: skip
    if options.objective == "parameters":
        total = sum(p.numel() for p in stack.model.parameters())
    else:
        total = sum(unit.macs for unit in units)
    fit.check(total, {budget: budget * total for budget in options.budgets})
    probes, plans = fit.probe(), []
    for budget in options.budgets:
        try:
            plans.append(fit.plan(probes, total, budget * total))
        except InvalidOption as error:
            raise InvalidOption(f'budget {budget:g} with form="{options.form}": {error}') from None
    done = fit.fit(probes, plans)
    parts = next(iter(fit.found_parts), LayerParts())

    def alone(name: str) -> str:
        inside = name.removeprefix(f"{stack.name}.").partition(".")[2]
        if name not in asked:
            return NOT_ASKED
        if not name.startswith(f"{stack.name}."):
            return "outside the layers"
        return parts.alone.get(inside, "") or f'nothing of it may go with form="{options.form}"'

    before = {key: group.size for found in fit.found_parts for key, group in found.groups.items()}
    results = []
    errors = fit.output_errors(len(plans))
    for result, (budget, sizes, held_out_error) in enumerate(zip(options.budgets, plans, errors, strict=True)):
        made = CompressedOptions(
            options.ridge, options.seed, held_out_error, budget=budget, objective=options.objective,  # type: ignore[arg-type]
            form=options.form, heads_kept={name: why for name, why in parts.alone.items() if ":" in name},  # type: ignore[arg-type]
            inputs=fit.inputs(result),
        )  # fmt: skip
        shared = [(before[key], size) for key, size in sizes[0].items()] if options.form == "uniform" else []
        results.append((Record(made, tuple(changes_of(units, stack, done[result], alone))), shared))
    return results
