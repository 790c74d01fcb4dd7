"""Whether inputs are like those that a model was fitted on, told by what a few of its layers read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError
from crystallite.data.batch import Batch, batches, evaluating
from crystallite.models.record import CompressedOptions, Familiar, find_record
from crystallite.operators.conv import BlockConv, Convolution
from crystallite.operators.low_rank import LowRankConv

__all__ = ["Unfamiliar", "describe", "known_inputs", "score_always_", "scoring", "unfamiliar"]

_LAYERS = 4  # that are looked at, from the first to the last
_DIRECTIONS = 32  # in which what a layer reads is looked at
_USUAL = 0.99  # of the samples held out count as familiar
_LEAST_USUAL = 0.1  # that a sample may score at least
_LEAST = 1e-6  # of the mean variance, that a direction is taken to have at least


@dataclass
class Unfamiliar:
    """How many samples were unlike those that a model was fitted on."""

    count: int = 0
    samples: int = 0

    def add(self, scores: Tensor) -> None:
        """Take in the scores of some samples; those above 1 are unlike."""
        self.count += int((scores > 1).sum())
        self.samples += len(scores)

    @property
    def share(self) -> float:
        return self.count / max(self.samples, 1)

    def __str__(self) -> str:
        return f"{self.share:.0%} of the {self.samples:,} inputs are unlike those that it was fitted on (1% is usual)"


def known_inputs(model: nn.Module) -> tuple[Familiar, ...]:
    """What is known of the inputs that a model was fitted on: nothing of one that was not fitted."""
    found = find_record(model)
    return found.options.inputs if found is not None and isinstance(found.options, CompressedOptions) else ()


def unfamiliar(model: nn.Module, data: Any) -> Unfamiliar | None:
    """How many samples of some data are unlike those that a model was fitted on; None if it was not fitted."""
    known, found = known_inputs(model), Unfamiliar()
    if not known:
        return None
    with evaluating(model), scoring(model, known, found.add):
        for batch in batches(data):
            batch.run(model)
    return found


def describe(
    model: nn.Module, names: Sequence[str], fitted: Iterable[Batch], held_out: Iterable[Batch]
) -> tuple[Familiar, ...]:
    """What some of these layers read on the data that a model was fitted on, in some hundred numbers each.

    Of what a layer reads, 32 sums are looked at, always the same: they have a mean and a covariance. A sample scores
    the mean over its positions of the squared distance from that mean, in units of that covariance, above its usual
    value and times the root of the number of positions. It may score so much that 99 % of the samples held out do not
    in any layer.

    >>> _ = torch.manual_seed(0)
    >>> net, x = nn.Sequential(nn.Linear(8, 2)), torch.randn(200, 8)
    >>> known = describe(net, ["0"], [Batch(0, 100, (x[:100],))], [Batch(0, 100, (x[100:],))])
    >>> seen = Unfamiliar()
    >>> with scoring(net, known, seen.add):
    ...     _ = net(torch.randn(50, 8)), net(3 * torch.randn(50, 8))
    >>> 45 <= seen.count <= 55
    True
    """
    present = [name for name in names if name in dict(model.named_modules())]
    spread = range(_LAYERS if present else 0)
    chosen = list(dict.fromkeys(present[round(i * (len(present) - 1) / (_LAYERS - 1))] for i in spread))
    sums: dict[str, list[Any]] = {name: [0, 0.0, 0.0] for name in chosen}

    def add(read: dict[str, _Read]) -> None:
        for name, each in read.items():
            rows, total = each.sums[each.real].double(), sums[name]
            total[:] = total[0] + len(rows), total[1] + rows.sum(0), total[2] + rows.T @ rows

    with _reading(model, list(sums), add):
        for batch in fitted:
            batch.run(model)
    known = tuple(_familiar(name, *found) for name, found in sums.items() if found[0])
    distances = [_Distance.of(one) for one in known]
    scores: list[Tensor] = []  # (layers, samples)

    def judge(read: dict[str, _Read]) -> None:
        if len(read) == len(known):
            scores.append(_scores(distances, read))

    with _reading(model, [one.layer for one in known], judge):
        for batch in held_out:
            batch.run(model)
    if not scores:
        return ()
    every = torch.cat(scores, 1)
    usual = every.quantile(_USUAL, 1).clamp_min(_LEAST_USUAL)
    usual = usual * (every / usual[:, None]).amax(0).quantile(_USUAL).clamp_min(1)  # in all layers together
    return tuple(replace(one, usual=most) for one, most in zip(known, usual.tolist(), strict=True))


@contextmanager
def scoring(model: nn.Module, known: Sequence[Familiar], done: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `done` with the scores of the samples of each run of the model meanwhile; those above 1 are unlike."""
    distances, usual = [_Distance.of(one) for one in known], torch.tensor([one.usual for one in known])[:, None]

    def judge(read: dict[str, _Read]) -> None:
        if len(read) == len(known):  # else some layers did not run
            done((_scores(distances, read) / usual).amax(0))

    with _reading(model, [one.layer for one in known], judge):
        yield


def score_always_(model: nn.Module, known: Sequence[Familiar], done: Callable[[str, Tensor], None]) -> None:
    """Have `done` called with a layer and the scores of its samples whenever it runs, also in copies of the model.

    For parts of a model that run on their own, on inputs without padding.
    """

    def keep(one: Familiar) -> Callable[..., None]:
        distance = _Distance.of(one)

        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor) and args[0].ndim:
                done(one.layer, distance.excess(_by_sample(module, args[0], len(args[0]), None)) / one.usual)

        return hook

    for one in known:
        model.get_submodule(one.layer).register_forward_pre_hook(keep(one))


@dataclass(frozen=True)
class _Read:
    """Sums of what a layer read, sample by sample."""

    sums: Tensor  # (samples, positions, directions)
    real: Tensor  # (samples, positions) False: padding


@contextmanager
def _reading(model: nn.Module, names: Sequence[str], done: Callable[[dict[str, _Read]], None]) -> Iterator[None]:
    """Hands on what layers read in each run of the model; runs may overlap in threads."""
    now = threading.local()

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim), None)
        now.samples, now.mask, now.read = 0 if first is None else len(first), kwargs.get("attention_mask"), {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            read = getattr(now, "read", None)
            if read is not None and name not in read and args and isinstance(args[0], Tensor):
                read[name] = _by_sample(module, args[0].detach(), now.samples, now.mask)

        return hook

    def end(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        read, now.read = now.read, None
        done(read)

    with ExitStack() as hooks:
        if names:
            hooks.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            hooks.callback(model.register_forward_hook(end).remove)
        for name in names:
            hooks.callback(model.get_submodule(name).register_forward_pre_hook(keep(name)).remove)
        yield


def _by_sample(module: nn.Module, value: Tensor, samples: int, mask: Any) -> _Read:
    """Where the first axis does not count samples, all of it is taken to belong to each of them."""
    if isinstance(module, Convolution | LowRankConv | BlockConv):
        value = value.movedim(-1 - len(module.kernel_size), -1)
    leading, width = value.shape[:-1], value.shape[-1]
    sums = value.float() @ _directions(width).to(value.device)
    real = torch.ones(leading, dtype=torch.bool)
    if isinstance(mask, Tensor) and mask.shape == leading:
        real = mask.bool().cpu()
    if not leading or leading[0] != samples:
        sums, real = sums.reshape(1, -1, sums.shape[-1]), real.reshape(1, -1)
        sums, real = sums.expand(samples, -1, -1), real.expand(samples, -1)
    return _Read(sums.reshape(samples, -1, sums.shape[-1]).cpu(), real.reshape(samples, -1))


def _directions(width: int) -> Tensor:
    """(width, directions) orthonormal columns in which all features take part: waves of a cosine transform."""
    count = min(_DIRECTIONS, width)
    waves = torch.linspace(0, width - 1, count).round()
    found = torch.cos(math.pi / width * (torch.arange(width) + 0.5)[:, None] * waves)
    return found / found.norm(dim=0)


def _familiar(name: str, count: int, total: Tensor, squares: Tensor) -> Familiar:
    mean = total / count
    covariance = squares / count - mean[:, None] * mean
    rows, columns = torch.tril_indices(len(mean), len(mean))
    return Familiar(name, tuple(mean.tolist()), tuple(covariance[rows, columns].tolist()), 1.0)


def _scores(known: Sequence[_Distance], read: dict[str, _Read]) -> Tensor:
    """(layers, samples)."""
    return torch.stack([one.excess(read[one.layer]) for one in known])


@dataclass(frozen=True)
class _Distance:
    """How far what a layer reads is from what it read before."""

    layer: str
    mean: Tensor
    inverse: Tensor  # of the covariance

    @classmethod
    def of(cls, known: Familiar) -> _Distance:
        count = len(known.mean)
        lower = torch.zeros(count, count, dtype=torch.float64)
        lower[tuple(torch.tril_indices(count, count))] = torch.tensor(known.covariance, dtype=torch.float64)
        covariance = lower + lower.tril(-1).T
        covariance.diagonal().add_(_LEAST * covariance.diagonal().mean() + torch.finfo(torch.float32).tiny)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed:
            raise CheckpointError(f"{known.layer}: what it read is no covariance; save the model again")
        return cls(known.layer, torch.tensor(known.mean), torch.cholesky_inverse(root).float())

    def excess(self, read: _Read) -> Tensor:
        """(samples,) by how much the mean square over positions is above what it was, in units of its spread.

        The mean of more positions spreads less, as one over the root of their number.
        """
        away, count = read.sums - self.mean, read.real.sum(1).clamp_min(1)
        squares = ((away @ self.inverse) * away).sum(2) * read.real
        return (squares.sum(1) / count / len(self.mean) - 1) * count.sqrt()
