"""A share of the calibration data with its hidden states and gradients, and the steps that are taken with it.

What a step needs and the share does not have is computed again from the layers: after a kill, and where the share was
kept by a process that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from crystallite.compression.decoders.layer_fit import (
    Chunk,
    FittedLayer,
    Streams,
    add_,
    ends_of,
    goals_of,
    moments_of,
)
from crystallite.compression.decoders.layer_parts import LayerParts
from crystallite.compression.decoders.sensitivity import ProbeSums, back_through, gradients_at_end
from crystallite.compression.decoders.stack import Call, Calls, Stack
from crystallite.compression.decoders.token_tables import HeadSums, Tables, head_sums, with_tables
from crystallite.compression.decoders.workspace import Workspace
from crystallite.data.batch import Batch
from crystallite.data.outputs import judged
from crystallite.data.positions import real_positions
from crystallite.models.familiarity import Readings
from crystallite.statistics.moments import Moments
from crystallite.statistics.output_error import relative_error

__all__ = ["PROBED", "Chunks", "Layers", "OneShare", "Share", "Shares", "positions_of"]

PROBED = 8192  # positions from which sizes are chosen
_TOGETHER = 2048  # of them that follow each other
_HEAD = 32  # positions at once, where logits of both models are compared
_JUDGED = 2048  # positions held out at which they are

P = ParamSpec("P")
T = TypeVar("T")


class Layers(Protocol):
    """Where the weights of a decoder's layers come from, and where those of the smaller ones go.

    result: which of the smaller models, one for each budget.
    """

    def read(self, number: int) -> nn.Module:
        """A dense layer; it may be changed only if it is a copy."""
        ...

    def smaller(self, result: int, number: int) -> nn.Module:
        """What has become of a layer."""
        ...

    def write(self, result: int, number: int, layer: nn.Module, fitted: FittedLayer) -> None:
        """Take a layer that has become smaller."""
        ...

    def written(self, result: int, number: int) -> FittedLayer | None:
        """What was made of a layer before the run was interrupted, if so."""
        ...

    def write_tables(self, tables: Tables, factors: Mapping[str, Tensor]) -> None:
        """Take the tables of tokens that all smaller models have."""
        ...

    def tables(self) -> tuple[Tables, Mapping[str, Tensor]] | None:
        """The same; None where they stay as they are, or are not known yet."""
        ...


@dataclass(frozen=True)
class Chunks:
    """Calibration data, or some of it, in parts that are run at once; each has a number of its own."""

    batches: Mapping[int, Batch]
    held_out: frozenset[int]  # chunks that are not fitted on
    probed: frozenset[int]  # chunks of which gradients are taken
    judged_every: int  # positions held out at which outputs are compared: one of so many
    seed: int

    @classmethod
    def of(cls, fitted: Sequence[Batch], held_out: Sequence[Batch], seed: int) -> Chunks:
        every = dict(enumerate((*fitted, *held_out)))
        sizes = [positions_of(batch) for batch in every.values()]
        # Spread over the data, but some that follow each other at a time: every other one may come from one source.
        together = [start // _TOGETHER for start in accumulate(sizes[:-1], initial=0)]
        groups = sorted(set(together))
        wanted = max(1, min(len(groups), round(PROBED * len(groups) / max(sum(sizes), 1))))
        chosen = {groups[int(i * len(groups) / wanted)] for i in range(wanted)}
        probed = frozenset(n for n, group in enumerate(together) if group in chosen)
        judges = max(1, sum(sizes[len(fitted) :]) // _JUDGED)
        return cls(every, frozenset(range(len(fitted), len(every))), probed, judges, seed)

    def split(self, count: int) -> list[Chunks]:
        """Shares that are alike: each kind of chunk is dealt out in turns."""
        order = sorted(self.batches, key=lambda n: (n in self.held_out, n in self.probed, n))
        dealt = [{n: self.batches[n] for n in sorted(order[i::count])} for i in range(min(count, len(order)))]
        return [
            Chunks(some, self.held_out & some.keys(), self.probed & some.keys(), self.judged_every, self.seed)
            for some in dealt
        ]


def positions_of(batch: Batch) -> int:
    return int(batch.named["input_ids"].numel())


@dataclass(frozen=True)
class Share:
    """Some chunks of the calibration data, and in a workspace what the streams of all models are there."""

    stack: Stack
    layers: Layers
    chunks: Chunks
    work: Workspace
    _calls: list[Calls] = field(default_factory=list)
    _smaller: list[Stack] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Of layers."""
        return len(self.stack.layers)

    def call(self, number: int, layer: int) -> Call:
        """What a layer is called with beside hidden states of a chunk."""
        if not self._calls:
            self._calls.append(Calls(self.stack, self.chunks.batches))
        return self._calls[0].of(number, layer)

    @property
    def small(self) -> Stack:
        """The stack of the smaller models, once it is known; it is the dense one if their tables of tokens are."""
        if not self._smaller:
            found = self.layers.tables()
            self._smaller.append(self.stack if found is None else with_tables(self.stack, *found))
        return self._smaller[0]

    # Probing: states and gradients of some chunks.

    def advance(self, number: int) -> None:
        """Keep what a layer reads."""
        self._states(number)

    def _states(self, number: int) -> dict[int, Tensor]:
        """By chunk, what a layer reads."""
        known = next((n for n in range(number, -1, -1) if self.work.has(f"states-{n}")), None)
        if known is None:
            hidden, known = {n: self._begin(n) for n in sorted(self.chunks.probed)}, 0
            self._keep("states-0", hidden)
        else:
            hidden = self._kept(f"states-{known}")
        for before in range(known, number):
            layer = self.layers.read(before)
            hidden = {n: self.stack.run(layer, h, self.call(n, before)) for n, h in hidden.items()}
            self._keep(f"states-{before + 1}", hidden)
        return hidden

    def _gradients(self, number: int, parts: Sequence[LayerParts]) -> dict[int, Tensor]:
        """By chunk, the gradients at what a layer writes."""
        known = next((n for n in range(number, self.count) if self.work.has(f"gradients-{n}")), None)
        if known is None:
            known = self.count - 1
            states, layer = self._states(known), self.layers.read(known)
            found = {}
            for n in [*states]:
                end = self.stack.run(layer, states.pop(n), self.call(n, known))
                found[n] = self._gradients_at_end(n, end)
            self._keep(f"gradients-{known}", found)
        for above in range(known, number, -1):
            self.probe(above, parts)
            self.forget_probe(above)
        return self._kept(f"gradients-{number}")

    def _gradients_at_end(self, number: int, hidden: Tensor) -> Tensor:
        """At what the last layer writes of a chunk; nothing where there is padding, and so nowhere before it."""
        found = gradients_at_end(self.stack, hidden, self.chunks.seed + number)
        padding = torch.ones(found.shape[:2], dtype=torch.bool).flatten()
        padding[self._real(number)] = False
        return found.masked_fill(padding.view(found.shape[:2]).to(found.device)[..., None], 0)

    def probe(self, number: int, parts: Sequence[LayerParts]) -> ProbeSums:
        """The sums from which the costs of a layer's parts follow; the gradients before it are kept.

        parts: of all layers.
        """
        known = f"states-{number}", f"gradients-{number}"
        self._states(number)
        self._gradients(number, parts)
        numbers = sorted(self.chunks.probed)

        def given() -> Iterator[tuple[Tensor, Call, Tensor]]:
            for n in numbers:  # one by one: all together are large
                hidden, above = (self.work.one(name, str(n)) for name in known)
                yield hidden, self.call(n, number), above

        found, below = back_through(self.stack, self.layers.read(number), parts[number], given())
        self._keep(f"gradients-{number - 1}", dict(zip(numbers, below, strict=True)))
        return found

    def head_sums(self) -> HeadSums:
        """What the head reads and what the softmax makes of it."""
        ends = [h.flatten(0, 1)[self._real(n)] for n, h in self._states(self.count).items()]
        self._drop(f"states-{self.count}")
        return head_sums(self.stack, ends)

    def first_gradients(self, parts: Sequence[LayerParts]) -> tuple[int, Tensor]:
        """Positions, and Σ ggᵀ of gradients at what the first layer reads."""
        if not self.work.has("gradients--1"):
            self.probe(0, parts)
        found = torch.cat([g.flatten(0, -2).float() for g in self._kept("gradients--1").values()])
        return len(found), (found.T @ found).double()

    def forget_probe(self, number: int) -> None:
        """Drop what is not needed when a layer is probed."""
        self._drop(f"gradients-{number}", f"states-{number}")

    # Fitting: the streams of the dense model and of the smaller ones.

    def run_dense(self, number: int, parts: LayerParts) -> None:
        """Keep what the dense stream is behind a layer, and behind what adds to it there."""
        self._ensure_dense(number)
        layer = self.layers.read(number)
        for n in self.chunks.batches:
            end, goals = goals_of(self.stack, layer, parts, self._chunk(n, f"dense-{number}-{n}", number))
            self.work.put(f"dense-{number + 1}-{n}", {"hidden": end})
            for name, goal in goals.items():
                self.work.put(f"goal-{n}-{name}", {"hidden": goal})

    def moments(
        self, result: int, number: int, layer: nn.Module, parts: LayerParts, reader: str, watch: bool
    ) -> tuple[Moments, Moments, Readings]:
        """See `moments_of`; and what the reader reads, nothing unless watch."""
        readings = Readings("")
        streams = self._streams(result, number, parts)
        found = moments_of(self.stack, layer, parts, reader, streams, readings if watch else None)
        return *found, readings

    def add(
        self, result: int, number: int, layer: nn.Module, parts: LayerParts, reader: str, weight: Tensor | None
    ) -> None:
        """See `add_`."""
        add_(self.stack, layer, parts, reader, self._streams(result, number, parts), weight)

    def finish(self, result: int, number: int, layer: nn.Module, parts: LayerParts) -> None:
        """Keep the stream of a smaller model behind a layer."""
        for n, end in ends_of(self.stack, layer, parts, self._streams(result, number, parts)):
            self.work.put(f"small-{result}-{number + 1}-{n}", {"hidden": end})

    def forget_small(self, result: int, number: int) -> None:
        """Drop what is not needed when a layer of a smaller model is done."""
        self._drop(*(f"small-{result}-{number}-{n}" for n in self.chunks.batches))

    def forget_dense(self, number: int, parts: LayerParts) -> None:
        """Drop what is not needed when a layer is done for all models."""
        for n in self.chunks.batches:
            self._drop(f"dense-{number}-{n}", *(f"goal-{n}-{name}" for name in parts.readers))

    def output_errors(self, results: int) -> dict[int, list[list[float]]]:
        """By chunk held out, for each smaller model: see `output_error` of models, some positions at a time."""
        self._ensure_dense(self.count)
        for result in range(results):
            self._ensure_small(result, self.count)
        found = {}
        for number in sorted(self.chunks.held_out):
            errors: list[list[float]] = [[] for _ in range(results)]
            names = [f"dense-{self.count}-{number}", *(f"small-{r}-{self.count}-{number}" for r in range(results))]
            real, every = self._real(number), self.chunks.judged_every
            ends = [self.work.get(name)["hidden"].flatten(0, 1)[real][::every] for name in names]
            stacks = [self.stack, *[self.small] * results]
            for start in range(0, len(ends[0]), _HEAD):
                logits = (s.end(end[start : start + _HEAD, None])[:, 0] for s, end in zip(stacks, ends, strict=True))
                expected, *ours = (next(iter(judged({"logits": rows}).values())) for rows in logits)
                for some, each in zip(errors, ours, strict=True):
                    some.append(float(relative_error(each, expected, Batch(0, 1))))
            found[number] = errors
        return found

    def _streams(self, result: int, number: int, parts: LayerParts) -> Streams:
        """What one of the smaller models has where a layer begins, and the dense one behind its readers."""
        if not all(self.work.has(f"dense-{number + 1}-{n}") for n in self.chunks.batches):
            self.run_dense(number, parts)
        self._ensure_small(result, number)

        def load(n: int) -> Chunk:
            own = number or self.small is not self.stack
            return self._chunk(n, f"small-{result}-{number}-{n}" if own else f"dense-0-{n}", number)

        def goal(n: int, name: str) -> Tensor:
            last = parts.adds and name == parts.readers[-1]
            return self.work.get(f"dense-{number + 1}-{n}" if last else f"goal-{n}-{name}")["hidden"]

        return Streams(load, goal, tuple(self.chunks.batches), self.work)

    def _ensure_dense(self, number: int) -> None:
        """The stream of the dense model where a layer begins."""
        if not any(self._has_all(f"dense-{n}") for n in range(number + 1)):
            for n in self.chunks.batches:
                self.work.put(f"dense-0-{n}", {"hidden": self._begin(n)})
        self._run_on("dense", number, self.layers.read)

    def _ensure_small(self, result: int, number: int) -> None:
        """The same of a smaller model; where the first layer begins, it is that of the dense one if its tables are."""
        own = self.small is not self.stack
        if not number and not own:
            return
        if not any(self._has_all(f"small-{result}-{n}") for n in range(not own, number + 1)):
            for n, batch in self.chunks.batches.items():
                self.work.put(f"small-{result}-0-{n}", {"hidden": self.small.begin(batch)[0]})
        self._run_on(f"small-{result}", number, lambda layer: self.layers.smaller(result, layer))

    def _run_on(self, stream: str, number: int, read: Callable[[int], nn.Module]) -> None:
        """Run layers from where a stream is known last to where one begins."""
        known = next(n for n in range(number, -1, -1) if self._has_all(f"{stream}-{n}"))
        for before in range(known, number):
            layer = read(before)
            for n in self.chunks.batches:
                chunk = self._chunk(n, f"{stream}-{before}-{n}", before)
                self.work.put(f"{stream}-{before + 1}-{n}", {"hidden": self.stack.run(layer, chunk.hidden, chunk.call)})
            self._drop(*(f"{stream}-{before}-{n}" for n in self.chunks.batches))

    def _has_all(self, stream: str) -> bool:
        return all(self.work.has(f"{stream}-{n}") for n in self.chunks.batches)

    def _begin(self, number: int) -> Tensor:
        """What the first layer reads of a chunk."""
        return self.stack.begin(self.chunks.batches[number])[0]

    def _chunk(self, number: int, name: str, layer: int) -> Chunk:
        hidden = self.work.get(name)["hidden"]
        return Chunk(hidden, self.call(number, layer), self._real(number), number in self.chunks.held_out)

    def _real(self, number: int) -> Tensor | slice:
        """Of the positions of a chunk in one row, those that are no padding."""
        batch = self.chunks.batches[number]
        return real_positions(batch, batch.named["input_ids"].shape)

    def _keep(self, name: str, by_chunk: Mapping[int, Tensor]) -> None:
        self.work.put(name, {str(n): value for n, value in by_chunk.items()})

    def _kept(self, name: str) -> dict[int, Tensor]:
        found = self.work.get(name)
        return {n: found[str(n)] for n in sorted(map(int, found))}

    def _drop(self, *names: str) -> None:
        for name in names:
            self.work.drop(name)


class Shares(Protocol):
    """The calibration data, wherever it is."""

    def each(self, step: Callable[Concatenate[Share, P], T], *given: P.args, **named: P.kwargs) -> list[T]:
        """Take a step with every share; what came of it, in their order."""
        ...


@dataclass(frozen=True)
class OneShare:
    """All of the data in this process."""

    share: Share

    def each(self, step: Callable[Concatenate[Share, P], T], *given: P.args, **named: P.kwargs) -> list[T]:
        return [step(self.share, *given, **named)]
