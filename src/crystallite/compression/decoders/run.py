"""A decoder compressed layer by layer: probed backwards once, allotted sizes, fitted forwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from crystallite.compression.decoders.layer_fit import Chunk, FittedLayer, Streams, fit_layer_
from crystallite.compression.decoders.layer_parts import LayerParts, find_parts
from crystallite.compression.decoders.sensitivity import LayerProbe, back_through, gradients_at_end
from crystallite.compression.decoders.share_out import SizeCurve, share_out
from crystallite.compression.decoders.stack import Call, Stack
from crystallite.compression.decoders.workspace import Workspace
from crystallite.compression.whole_cost import NOT_ASKED
from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import matching
from crystallite.data.batch import Batch
from crystallite.data.calibration import Calibration
from crystallite.data.outputs import judged
from crystallite.data.positions import real_positions
from crystallite.models.layers import Unit, change, find_units
from crystallite.models.record import CompressedOptions, LayerChange, OperatorRecord, Record
from crystallite.statistics.output_error import relative_error

__all__ = ["CHUNK", "DecoderFit", "DecoderOptions", "Layers", "as_tokens", "fit_decoder"]

CHUNK = 2048  # positions that are run at once
_PROBED = 8192  # positions from which sizes are chosen
_HEAD = 64  # positions at once, where logits of both models are compared


class Layers(Protocol):
    """Where the weights of a decoder's layers come from, and where those of the smaller ones go."""

    def read(self, number: int) -> nn.Module:
        """A dense layer; it may be changed only if it is a copy."""
        ...

    def write(self, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        """Take a layer that has become smaller."""
        ...

    def written(self, number: int) -> FittedLayer | None:
        """What was made of a layer before the run was interrupted, if so."""
        ...


@dataclass(frozen=True)
class DecoderOptions:
    """What was asked for; see `compress`."""

    budget: float
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

    def calls(self, number: int) -> tuple[Tensor, list[Call]]:
        """What the first layer reads of a chunk, and what each layer is called with."""
        return self.stack.begin(self.batches[number])

    def parts(self, layer: nn.Module, number: int) -> LayerParts:
        """What may go from a layer; found once for all layers of one shape."""
        keep = tuple(self.kept.get(number, ()))
        shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
        key = (type(layer), shapes, keep)
        if key not in self._parts:
            self._parts[key] = find_parts(self.stack, layer, self.batches[0], self.form, keep)
        return self._parts[key]

    @torch.no_grad()
    def probe(self) -> list[LayerProbe]:
        """What each size of each part costs, by a sample of the data; see `sensitivity.py`."""
        work, chunks = self.work, self._probed()
        with tqdm(total=2 * self.count, desc="probing", disable=not self.progress) as bar:
            hidden = {n: self.calls(n)[0] for n in chunks}
            for number in range(self.count):
                bar.update()
                if work.has(f"probe-{number}") or work.has(f"states-{number}"):
                    continue
                if number:
                    hidden = {int(k): v for k, v in work.get(f"states-{number - 1}").items()}
                    layer = self.layers.read(number - 1)
                    hidden = {n: self.stack.run(layer, h, self.calls(n)[1][number - 1]) for n, h in hidden.items()}
                work.put(f"states-{number}", {str(n): h for n, h in hidden.items()})
            known = next((n for n in range(self.count) if work.has(f"probe-{n}")), self.count)
            if known == self.count and not work.has(f"gradients-{known - 1}"):
                layer = self.layers.read(self.count - 1)
                before = work.get(f"states-{self.count - 1}")
                ends = {n: self.stack.run(layer, before[str(n)], self.calls(n)[1][-1]) for n in chunks}
                after = {str(n): self._gradients(n, h) for n, h in ends.items()}
                work.put(f"gradients-{known - 1}", after)
            for number in range(known - 1, -1, -1):
                layer = self.layers.read(number)
                states, above = work.get(f"states-{number}"), work.get(f"gradients-{number}")
                given = [(states[str(n)], self.calls(n)[1][number], above[str(n)]) for n in chunks]
                found, below = back_through(self.stack, layer, self.parts(layer, number), given)
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
    def fit(self, probes: Sequence[LayerProbe], sizes: Sizes) -> Iterator[tuple[int, FittedLayer]]:
        """Make every layer smaller, one after the other; afterwards `output_error` compares both streams."""
        work = self.work
        begun = next((n for n in range(self.count) if self.layers.written(n) is None), self.count)
        if not work.has(f"streams-{begun}"):
            if begun:
                raise InvalidOption(f"{work.folder}: layer {begun - 1} is done, but what it wrote is missing")
            for n in range(len(self.batches)):
                start = self.calls(n)[0]
                work.put(f"streams-0-{n}", {"dense": start, "small": start.clone()})
            work.put("streams-0", {})
        for number in tqdm(range(self.count), "fitting", disable=not self.progress):
            done = self.layers.written(number)
            if done is not None:
                yield number, done
                continue
            dense = self.layers.read(number)
            layer = copy.deepcopy(dense)
            streams = Streams(partial(self._chunk, number), len(self.batches), work)
            parts = self.parts(dense, number)
            fitted, ends = fit_layer_(
                self.stack, dense, layer, parts, probes[number], sizes[number], streams, self.ridge
            )
            for n, (expected, found) in enumerate(ends):
                work.put(f"streams-{number + 1}-{n}", {"dense": expected, "small": found})
            work.put(f"streams-{number + 1}", {})
            self.layers.write(number, layer, fitted)
            for n in range(len(self.batches)):
                work.drop(f"streams-{number}-{n}")
            work.drop(f"streams-{number}")
            yield number, fitted

    def _chunk(self, layer: int, number: int) -> Chunk:
        streams = self.work.get(f"streams-{layer}-{number}")
        held_out = number >= len(self.batches) - self.held_out
        return Chunk(streams["dense"], streams["small"], self.calls(number)[1][layer], self._real(number), held_out)

    def _real(self, number: int) -> Tensor | slice:
        """Of the positions of a chunk in one row, those that are no padding."""
        batch = self.batches[number]
        return real_positions(batch, batch.named["input_ids"].shape)

    @torch.no_grad()
    def output_error(self) -> float:
        """Of the probabilities, on held-out data: see `output_error` of models; both streams are at their ends."""
        errors = []
        for number in range(len(self.batches) - self.held_out, len(self.batches)):
            streams = self.work.get(f"streams-{self.count}-{number}")
            dense, small = (streams[name].flatten(0, 1)[self._real(number)] for name in ("dense", "small"))
            for start in range(0, len(dense), _HEAD):
                rows = [self.stack.end(part[start : start + _HEAD, None])[:, 0] for part in (dense, small)]
                (expected,), (found,) = (list(judged({"logits": logits}).values()) for logits in rows)
                errors.append(float(relative_error(found, expected, Batch(0, 1))))
        return sum(errors) / len(errors)


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
) -> tuple[Record, list[tuple[int, int]]]:
    """Probe, allot and fit; what became of every layer, and sizes before and after that all layers share."""
    fitted, held_out = (in_chunks([as_tokens(b) for b in some]) for some in (data.fitted, data.held_out))
    units = find_units(stack.model, ["*"], [])
    asked = {*matching([unit.name for unit in units], options.targets, options.ignore)}
    kept = {
        n: [name for name, _ in layer.named_modules() if name and f"{stack.layer_name(n)}.{name}" not in asked]
        for n, layer in enumerate(stack.layers)
    }
    fit = DecoderFit(
        stack.quick(), layers, (*fitted, *held_out), len(held_out), options.form, options.ridge, options.seed, work,
        kept, progress,
    )  # fmt: skip
    if options.objective == "parameters":
        total = sum(p.numel() for p in stack.model.parameters())
    else:
        total = sum(unit.macs for unit in units)
    probes = fit.probe()
    try:
        sizes = fit.plan(probes, total, options.budget * total)
    except InvalidOption as error:
        raise InvalidOption(f'budget {options.budget:g} with form="{options.form}": {error}') from None
    done = dict(fit.fit(probes, sizes))
    parts = next(iter(fit.found_parts), LayerParts())

    def alone(name: str) -> str:
        inside = name.removeprefix(f"{stack.name}.").partition(".")[2]
        if name not in asked:
            return NOT_ASKED
        if not name.startswith(f"{stack.name}."):
            return "outside the layers"
        return parts.alone.get(inside, "") or f'nothing of it may go with form="{options.form}"'

    made = CompressedOptions(
        options.ridge, options.seed, fit.output_error(), budget=options.budget, objective=options.objective,  # type: ignore[arg-type]
        form=options.form, heads_kept={name: why for name, why in parts.alone.items() if ":" in name},  # type: ignore[arg-type]
    )  # fmt: skip
    shared = []
    if options.form == "uniform":
        before = {key: group.size for found in fit.found_parts for key, group in found.groups.items()}
        shared = [(before[key], size) for key, size in sizes[0].items()]
    return Record(made, tuple(changes_of(units, stack, done, alone))), shared
