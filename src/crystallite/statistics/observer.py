"""A model run in segments: what its layers read and write, without running again what lies before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, evaluating
from crystallite.data.outputs import equal_up_to_rounding, tensors
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.statistics.layer_io import matrix_of, read_rows, written_rows
from crystallite.statistics.watching import Enough, LayerCall, watching

__all__ = ["Carry", "ForwardPlan", "Seen", "observe", "outputs_of"]

_ADDITIONS = {"add", "add_", "__add__", "__iadd__", "__radd__"}
Carry = tuple[Any, ...]  # what each boundary that is passed without running it returns, in their order


@dataclass(frozen=True)
class Seen:
    """Rows that a layer read and wrote, and what the model then added to what it wrote."""

    inputs: Tensor  # (rows, in_features)
    outputs: Tensor  # (rows, out_features); nothing of a layer that the run ended before
    residual: Tensor | None  # (rows, out_features); None: nothing was added


@dataclass(frozen=True)
class ForwardPlan:
    """The boundaries of a model, modules that each read what the one before returned, and the layers of each segment.

    Segment i is boundary i, with what comes before it for the first one; the last segment is what follows all
    boundaries. A group is some layers of a segment that read the same tensor, so that they can be fitted together. A
    layer that runs several times is in the segment of its first call; where its calls lie in several segments, there
    are no boundaries.
    """

    boundaries: tuple[str, ...]
    segments: tuple[tuple[tuple[str, ...], ...], ...]  # segment → group → names of layers
    reused: frozenset[str]  # layers that run more than once in a call
    unused: frozenset[str]  # layers that do not run
    carry_all: bool = False  # later code reads what earlier boundaries returned, not the last one alone
    routed: frozenset[str] = frozenset()  # layers that run only where something is sent to them: experts

    @classmethod
    def of(
        cls, model: nn.Module, names: Sequence[str], batch: Batch, routed: frozenset[str] = frozenset()
    ) -> ForwardPlan:
        """How the model passes through the named layers on this batch, in evaluation mode.

        Runs from each boundary are compared with a whole run: what the layers read and what the model returns must be
        the same. If later code also reads what earlier boundaries returned (hidden states of all layers, a feature
        pyramid, skips), these are kept for each batch; if the runs still differ, the model has no boundaries and is
        always run whole.

        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> found = ForwardPlan.of(net, ["0", "2"], Batch(0, 1, (torch.zeros(1, 2),)))
        >>> found.boundaries, found.segments
        (('0', '1', '2'), ((('0',),), (), (('2',),), ()))
        """
        with evaluating(model):
            trace = _Trace.of(model, names, batch)
            boundaries = trace.boundaries(model)
            boundaries = () if trace.meets_again(boundaries) else boundaries
            plan = cls(boundaries, (), trace.reused, trace.unused, routed=routed)
            for found in (plan, replace(plan, carry_all=True)):
                if _runs_like_the_whole(found, model, names, batch):
                    break
            else:
                found = replace(plan, boundaries=())
        return replace(found, segments=trace.segments(found.boundaries))


@dataclass(frozen=True)
class _Trace:
    """The calls of layers and of modules in lists, in a whole run."""

    names: Sequence[str]
    chains: list[list[str]]  # names of the modules of each list
    calls: list[tuple[str, Any, int]]  # name, what it read, how many calls had ended; in the order of their beginning
    ended: list[tuple[str, Any]]  # name, what it returned

    @classmethod
    def of(cls, model: nn.Module, names: Sequence[str], batch: Batch) -> _Trace:
        calls: list[tuple[str, Any, int]] = []  # holding the tensors, so that none can take another's place
        ended: list[tuple[str, Any]] = []
        # the layers of a recurrent module hand on their final states too
        inside = {f"{n}.layers".lstrip(".") for n, m in model.named_modules() if isinstance(m, LowRankRecurrent)}
        chains = [
            [f"{name}.{place}" if name else place for place in module._modules]
            for name, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and name not in inside
        ]

        def began(name: str) -> Callable[..., None]:
            return lambda module, inputs: calls.append((name, inputs[0] if inputs else None, len(ended)))

        def done(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: ended.append((name, output))

        with ExitStack() as hooks:
            for name in dict.fromkeys([*names, *(child for chain in chains for child in chain)]):
                module = model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(began(name)).remove)
                hooks.callback(module.register_forward_hook(done(name)).remove)
            batch.run(model)
        return cls(names, chains, calls, ended)

    @property
    def starts(self) -> dict[str, list[Any]]:
        """What each module read, call by call."""
        found: dict[str, list[Any]] = {}
        for name, value, _ in self.calls:
            found.setdefault(name, []).append(value)
        return found

    @property
    def reused(self) -> frozenset[str]:
        starts = self.starts
        return frozenset(name for name in self.names if len(starts.get(name, ())) > 1)

    @property
    def unused(self) -> frozenset[str]:
        return frozenset(self.names) - self.starts.keys()

    def boundaries(self, model: nn.Module) -> tuple[str, ...]:
        """The list with most parameters of those whose modules hand a value on from each to the next."""
        starts, results = self.starts, dict(self.ended)
        sound = [chain for chain in self.chains if _hands_on(chain, starts, results)]
        sizes = [sum(p.numel() for child in chain for p in model.get_submodule(child).parameters()) for chain in sound]
        return tuple(sound[sizes.index(max(sizes))]) if sound else ()

    def meets_again(self, boundaries: Sequence[str]) -> bool:
        """Whether a layer runs in several segments."""
        where: dict[str, set[int]] = {}
        for name, _, ends in self.calls:
            where.setdefault(name, set()).add(self._segment(boundaries, ends))
        return any(len(where[name]) > 1 for name in self.reused)

    def _segment(self, boundaries: Sequence[str], ends: int) -> int:
        finished = {boundary for boundary, _ in self.ended[:ends]}
        return sum(boundary in finished for boundary in boundaries)

    def segments(self, boundaries: Sequence[str]) -> tuple[tuple[tuple[str, ...], ...], ...]:
        """The layers of each segment, those together that read the same tensor one after the other."""
        segments: list[list[list[str]]] = [[] for _ in range(len(boundaries) + 1)]
        place, before, known, starts = 0, None, set[str](), self.starts
        for name, value, ends in self.calls:
            here = self._segment(boundaries, ends)
            if name in self.names and name not in known:
                known.add(name)
                group = segments[here][-1] if segments[here] else []
                again = bool(group) and [id(v) for v in starts[group[0]]] == [id(v) for v in starts[name]]
                if here == place and value is before and value is not None and again:
                    group.append(name)
                else:
                    segments[here].append([name])
                place, before = here, value
        return tuple(tuple(tuple(group) for group in segment) for segment in segments)


def _hands_on(chain: Sequence[str], starts: Mapping[str, list[Any]], results: Mapping[str, Any]) -> bool:
    """Whether each module of a list runs once, and the first thing it reads is what the one before it returned."""
    if any(len(starts.get(name, ())) != 1 for name in chain):
        return False
    carry = [_first(results[name]) for name in chain[:-1]]
    return all(value is not None and value is starts[name][0] for value, name in zip(carry, chain[1:], strict=True))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _runs_like_the_whole(plan: ForwardPlan, model: nn.Module, names: Sequence[str], batch: Batch) -> bool:
    """Whether runs from each boundary show and return what a whole run does, also when they are repeated.

    A second run from the same values differs where the model writes into them in place.
    """
    with watching(model, names) as whole:
        expected = tensors(batch.run(model))
        read = {name: [_read(call) for call in calls] for name, calls in whole.items()}
    carry: Carry = ()
    for segment in range(len(plan.boundaries)):
        _, carry = observe(model, batch, plan, segment, carry, (), lambda leading: torch.arange(0))
        for _ in range(2):
            try:
                with watching(model, names) as calls:
                    found = tensors(outputs_of(model, batch, plan, segment + 1, carry))
            except Exception:  # whatever the model's code raises where it reads a value of another boundary
                return False
            if found.keys() != expected.keys() or not _same(list(found.values()), list(expected.values())):
                return False
            if any(calls[name] and not _same(list(map(_read, calls[name])), read[name]) for name in names):
                return False
    return True


def _read(call: LayerCall) -> Any:
    return call.inputs[0] if call.inputs else None


def _same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = [(a, b) for a, b in zip(found, expected, strict=False) if isinstance(b, Tensor)]
    return len(found) == len(expected) and all(a.shape == b.shape and equal_up_to_rounding(a, b) for a, b in pairs)


class _Additions(TorchFunctionMode):
    """Reports what is added to tensors that were written in watched calls of layers."""

    def __init__(self, added: Callable[[tuple[str, int], Tensor], None]) -> None:
        super().__init__()
        self.added, self.turn = added, count()
        self.written: dict[int, tuple[tuple[str, int], Tensor, int]] = {}  # address → call, what it wrote, its turn

    def write(self, call: tuple[str, int], output: Tensor) -> None:
        """A layer has written this."""
        if output.numel():  # nothing has no address of its own
            self.written[output.data_ptr()] = (call, output, next(self.turn))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ADDITIONS and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
            # of two watched layers the later one writes into the other's stream
            own, other = max((args, args[::-1]), key=lambda pair: self._place(pair[0]))
            call, tensor, _ = self.written.get(own.data_ptr(), (("", 0), None, 0))
            if tensor is not None and own.shape == tensor.shape == other.shape:
                del self.written[own.data_ptr()]
                self.added(call, other)
        return func(*args, **(kwargs or {}))

    def _place(self, tensor: Tensor) -> int:
        return self.written[tensor.data_ptr()][2] if tensor.data_ptr() in self.written else -1


@contextmanager
def _passing(model: nn.Module, boundaries: Sequence[str], carry: Carry) -> Iterator[None]:
    """Boundaries that are passed without running them: each returns what it is given here."""
    modules: list[Any] = [model.get_submodule(name) for name in boundaries]
    own = [vars(module).get("forward") for module in modules]
    for module, value in zip(modules, carry, strict=True):
        module.forward = lambda *_, value=value, **__: value
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def observe(
    model: nn.Module,
    batch: Batch,
    plan: ForwardPlan,
    segment: int,
    carry: Carry,
    names: Sequence[str],
    rows: Callable[[torch.Size], Tensor],
    until: str | None = None,
) -> tuple[dict[str, Seen], Carry]:
    """What the named layers of a segment read and write, what is then added to it, and the carry of the next segment.

    carry: what the boundaries before returned on this batch; rows: those to keep, by the shape of positions; until: a
    layer before which the run ends, and then the carry is empty. What it reads is seen too.
    """
    found: dict[str, list[list[Any]]] = {}  # of each call: what it read, wrote, and what was added
    carried: Carry = ()

    def added(call: tuple[str, int], other: Tensor) -> None:
        name, number = call
        found[name][number][2] = written_rows(model.get_submodule(name), other, rows)

    additions = _Additions(added)

    def done(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            calls = found.setdefault(name, [])
            additions.write((name, len(calls)), output)
            calls.append([read_rows(module, inputs[0], rows), written_rows(module, output, rows), None])

        return hook

    def arrive(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal carried
        carried = (*carry, output) if plan.carry_all else (output,) * (segment + 1)
        raise Enough

    def arrive_before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        read = read_rows(module, inputs[0], rows)
        found[str(until)] = [[read, read[:, :0], None]]
        raise Enough

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(done(name)).remove)
        if until is not None:
            stack.callback(model.get_submodule(until).register_forward_pre_hook(arrive_before).remove)
        elif segment < len(plan.boundaries):
            boundary = model.get_submodule(plan.boundaries[segment])
            stack.callback(boundary.register_forward_hook(arrive).remove)
        stack.enter_context(_passing(model, plan.boundaries[:segment], carry))
        stack.enter_context(additions)
        stack.enter_context(suppress(Enough))
        batch.run(model)
    missing = [name for name in (*names, *([until] if until else ())) if name not in found]
    for name in plan.routed.intersection(missing):
        weight = matrix_of(model.get_submodule(name))
        found[name] = [[weight.new_zeros(0, weight.shape[1]), weight.new_zeros(0, len(weight)), None]]
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidOption(f"{missing[0]}: runs on some batches of the calibration only; name it in ignore=")
    return {name: _together(calls) for name, calls in found.items()}, carried


def _together(calls: Sequence[Sequence[Any]]) -> Seen:
    """What was seen in all calls of a layer."""
    if len(calls) == 1:
        return Seen(*calls[0])
    read, written, added = zip(*calls, strict=True)
    return Seen(torch.cat(read), torch.cat(written), None if any(a is None for a in added) else torch.cat(added))


def outputs_of(model: nn.Module, batch: Batch, plan: ForwardPlan, segment: int, carry: Carry) -> Any:
    """What the model returns if it is run from a segment on."""
    with _passing(model, plan.boundaries[:segment], carry):
        return batch.run(model)
