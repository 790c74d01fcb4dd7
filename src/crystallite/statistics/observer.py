"""A model run in stretches: what its layers read and write, without running again what lies before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch, run
from crystallite.operators.low_rank_recurrent import LowRankRecurrent
from crystallite.statistics.layer_io import read_rows, written_rows

__all__ = ["ForwardPlan", "Seen", "observe", "outputs_of"]

_ADDITIONS = {"add", "add_", "__add__", "__iadd__", "__radd__"}


@dataclass(frozen=True)
class Seen:
    """Rows that a layer read and wrote, and what the model then added to what it wrote."""

    inputs: Tensor  # (rows, in_features)
    outputs: Tensor  # (rows, out_features); nothing of a layer that the run ended before
    residual: Tensor | None  # (rows, out_features); None: nothing was added


@dataclass(frozen=True)
class ForwardPlan:
    """The stations of a model, modules that hand a value on from each to the next, and the layers of each stretch.

    Stretch i is station i, with what comes before it for the first one; the last stretch is what follows all stations.
    A stage is some layers of a stretch that read the same tensor, so that they can be fitted together.
    """

    boundaries: tuple[str, ...]
    segments: tuple[tuple[tuple[str, ...], ...], ...]  # stretch → stage → names of layers
    reused: frozenset[str]  # layers that run more than once in a call
    unused: frozenset[str]  # layers that do not run

    @classmethod
    def of(cls, model: nn.Module, names: Sequence[str], batch: Batch) -> ForwardPlan:
        """How the model passes through the named layers on this batch.

        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> found = ForwardPlan.of(net, ["0", "2"], Batch(0, 1, (torch.zeros(1, 2),)))
        >>> found.boundaries, found.segments
        (('0', '1', '2'), ((('0',),), (), (('2',),), ()))
        """
        calls: list[tuple[str, Any, Any]] = []  # holding the tensors, so that none can take another's place
        ended: list[tuple[str, Any]] = []
        # the layers of a recurrent module hand on their final states too
        inside = {f"{n}.layers".lstrip(".") for n, m in model.named_modules() if isinstance(m, LowRankRecurrent)}
        chains = {
            name: [f"{name}.{place}" if name else place for place in module._modules]
            for name, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and name not in inside
        }
        watched = dict.fromkeys([*names, *(child for chain in chains.values() for child in chain)])

        def began(name: str) -> Callable[..., None]:
            return lambda module, inputs: calls.append((name, inputs[0] if inputs else None, len(ended)))

        def done(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: ended.append((name, output))

        with ExitStack() as hooks:
            for name in watched:
                module = model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(began(name)).remove)
                hooks.callback(module.register_forward_hook(done(name)).remove)
            run(model, batch)
        starts: dict[str, list[Any]] = {}
        for name, value, _ in calls:
            starts.setdefault(name, []).append(value)
        results = dict(ended)
        sound = [chain for chain in chains.values() if _hands_on(chain, starts, results)]
        sizes = [sum(p.numel() for child in chain for p in model.get_submodule(child).parameters()) for chain in sound]
        boundaries = tuple(sound[sizes.index(max(sizes))]) if sound else ()
        reused = frozenset(name for name in names if len(starts.get(name, ())) > 1)
        unused = frozenset(name for name in names if name not in starts)
        segments: list[list[list[str]]] = [[] for _ in range(len(boundaries) + 1)]
        place, before = 0, None
        for name, value, ends in calls:
            finished = {boundary for boundary, _ in ended[:ends]}
            here = sum(boundary in finished for boundary in boundaries)
            if name in names and name not in reused:
                if here == place and segments[here] and value is before and value is not None:
                    segments[here][-1].append(name)
                else:
                    segments[here].append([name])
                place, before = here, value
        plan = tuple(tuple(tuple(layer_group) for layer_group in segment) for segment in segments)
        return cls(boundaries, plan, reused, unused)


def _hands_on(chain: Sequence[str], starts: Mapping[str, list[Any]], results: Mapping[str, Any]) -> bool:
    """Whether each module of a list runs once, and the first thing it reads is what the one before it returned."""
    if any(len(starts.get(name, ())) != 1 for name in chain):
        return False
    carry = [_first(results[name]) for name in chain[:-1]]
    return all(value is not None and value is starts[name][0] for value, name in zip(carry, chain[1:], strict=True))


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


class _Arrived(Exception):
    """Ends a run of a model that has shown all that was to be seen."""


class _Additions(TorchFunctionMode):
    """Tells what is added to tensors that were written by watched layers."""

    def __init__(self, added: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.added, self.turn = added, count()
        self.written: dict[int, tuple[str, Tensor, int]] = {}  # address → layer, what it wrote, and its turn

    def write(self, name: str, output: Tensor) -> None:
        """A layer has written this."""
        self.written[output.data_ptr()] = (name, output, next(self.turn))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _ADDITIONS and len(args) == 2 and all(isinstance(a, Tensor) for a in args):
            # of two watched layers the later one writes into the other's stream
            own, other = max((args, args[::-1]), key=lambda pair: self._place(pair[0]))
            name, tensor, _ = self.written.get(own.data_ptr(), ("", None, 0))
            if tensor is not None and own.shape == tensor.shape == other.shape:
                del self.written[own.data_ptr()]
                self.added(name, other)
        return func(*args, **(kwargs or {}))

    def _place(self, tensor: Tensor) -> int:
        return self.written[tensor.data_ptr()][2] if tensor.data_ptr() in self.written else -1


@contextmanager
def _entered(model: nn.Module, boundaries: Sequence[str], carry: Any) -> Iterator[None]:
    """Stations that are passed without running them: the last one returns what was handed over."""
    modules: list[Any] = [model.get_submodule(name) for name in boundaries]
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = lambda *_, **__: carry  # nothing reads what the others return, as each reads the one before
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
    carry: Any,
    names: Sequence[str],
    rows: Callable[[torch.Size], Tensor],
    until: str | None = None,
) -> tuple[dict[str, Seen], Any]:
    """What the named layers of a stretch read and write, and what is then added to it; and what the station returns.

    handed: what the station before returned on this batch; rows: those to keep, by the shape of positions; until: a
    layer before which the run ends, and then nothing is returned for the station. What it reads is seen too.
    """
    found: dict[str, list[Any]] = {}
    returned: Any = None

    def added(name: str, other: Tensor) -> None:
        found[name][2] = written_rows(model.get_submodule(name), other, rows)

    additions = _Additions(added)

    def done(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            found[name] = [read_rows(module, inputs[0], rows), written_rows(module, output, rows), None]
            additions.write(name, output)

        return hook

    def arrive(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal returned
        returned = output
        raise _Arrived

    def arrive_before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        read = read_rows(module, inputs[0], rows)
        found[str(until)] = [read, read[:, :0], None]
        raise _Arrived

    with ExitStack() as stack:
        for name in names:
            stack.callback(model.get_submodule(name).register_forward_hook(done(name)).remove)
        if until is not None:
            stack.callback(model.get_submodule(until).register_forward_pre_hook(arrive_before).remove)
        elif segment < len(plan.boundaries):
            boundary = model.get_submodule(plan.boundaries[segment])
            stack.callback(boundary.register_forward_hook(arrive).remove)
        stack.enter_context(_entered(model, plan.boundaries[:segment], carry))
        stack.enter_context(additions)
        stack.enter_context(suppress(_Arrived))
        run(model, batch)
    missing = [name for name in names if name not in found]
    if missing:
        raise InvalidOption(f"{missing[0]}: runs on some batches of the calibration only; name it in ignore=")
    return {name: Seen(*one) for name, one in found.items()}, returned


def outputs_of(model: nn.Module, batch: Batch, plan: ForwardPlan, segment: int, carry: Any) -> Any:
    """What the model returns if it is run from a stretch on."""
    with _entered(model, plan.boundaries[:segment], carry):
        return run(model, batch)
