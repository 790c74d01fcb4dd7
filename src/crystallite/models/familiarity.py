"""Whether inputs are like those that a model was fitted on, told by what a few of its layers read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from scipy import special
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError
from crystallite.data.batch import Batch, batches, evaluating
from crystallite.models.record import CompressedOptions, Familiar, find_record
from crystallite.operators.conv import BlockConv, Convolution
from crystallite.operators.low_rank import LowRankConv

__all__ = [
    "Readings",
    "Unfamiliar",
    "chosen_of",
    "describe",
    "known_inputs",
    "known_of",
    "score_always_",
    "scoring",
    "unfamiliar",
]

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
    found = {present[i]: Readings(present[i]) for i in chosen_of(len(present))}

    def add(read: dict[str, _Read]) -> None:
        for name, each in read.items():
            found[name].add(each, held_out=False)

    with _reading(model, list(found), add):
        for batch in fitted:
            batch.run(model)
    known = [each.familiar for each in found.values() if each.count]
    distances = [_Distance.of(one) for one in known]
    scores: list[Tensor] = []  # (layers, samples)

    def judge(read: dict[str, _Read]) -> None:
        if len(read) == len(known):
            scores.append(_scores(distances, read))

    with _reading(model, [one.layer for one in known], judge):
        for batch in held_out:
            batch.run(model)
    return _with_usual(known, scores)


def chosen_of(count: int) -> list[int]:
    """Which of so many layers are looked at.

    >>> chosen_of(30), chosen_of(2), chosen_of(0)
    ([0, 10, 19, 29], [0, 1], [])
    """
    return list(dict.fromkeys(round(i * (count - 1) / (_LAYERS - 1)) for i in range(_LAYERS if count else 0)))


class Readings:
    """What one layer read, for whoever sees it without running the whole model; `known_of` makes use of it."""

    def __init__(self, layer: str) -> None:
        self.layer, self.count = layer, 0
        self.total = self.squares = torch.zeros((), dtype=torch.float64)
        self.held: list[_Read] = []

    def see(self, module: nn.Module, value: Tensor, samples: int, mask: Tensor | None, held_out: bool) -> None:
        """Take in what the layer read of a batch; mask: (samples, positions), 0 at padding."""
        self.add(_by_sample(module, value, samples, mask), held_out)

    def add(self, read: _Read, held_out: bool) -> None:
        if held_out:
            self.held.append(read)
            return
        rows = read.sums[read.real].double()
        self.count, self.total, self.squares = (
            self.count + len(rows), self.total + rows.sum(0), self.squares + rows.T @ rows,
        )  # fmt: skip

    def join(self, other: Readings) -> None:
        """Take in what others saw of other samples."""
        self.count, self.total = self.count + other.count, self.total + other.total
        self.squares, self.held = self.squares + other.squares, self.held + other.held

    @property
    def familiar(self) -> Familiar:
        return _familiar(self.layer, self.count, self.total, self.squares)

    def to_tensors(self) -> dict[str, Tensor]:
        found = {"count": torch.tensor(self.count), "total": self.total, "squares": self.squares}
        for number, read in enumerate(self.held):
            found |= {f"sums {number}": read.sums, f"real {number}": read.real}
        return found

    @classmethod
    def from_tensors(cls, layer: str, tensors: dict[str, Tensor]) -> Readings:
        found = cls(layer)
        found.count, found.total, found.squares = int(tensors["count"]), tensors["total"], tensors["squares"]
        numbers = range(sum(name.startswith("sums ") for name in tensors))
        found.held = [_Read(tensors[f"sums {number}"], tensors[f"real {number}"]) for number in numbers]
        return found


def known_of(readings: Sequence[Readings]) -> tuple[Familiar, ...]:
    """What is known of the inputs of layers that all read the same batches: as `describe` gives it."""
    known = [each.familiar for each in readings if each.count]
    distances = [_Distance.of(one) for one in known]
    held = zip(*(each.held for each in readings if each.count), strict=True)
    return _with_usual(
        known, [_scores(distances, dict(zip([d.layer for d in distances], reads, strict=True))) for reads in held]
    )


def _with_usual(known: Sequence[Familiar], scores: Sequence[Tensor]) -> tuple[Familiar, ...]:
    """How much a sample may score in each layer; scores: of samples held out, (layers, samples) by batch."""
    if not scores:
        return ()
    every = torch.cat(list(scores), 1)
    usual = _most(every).clamp_min(_LEAST_USUAL)
    usual = usual * _most((every / usual[:, None]).amax(0, keepdim=True)).clamp_min(1)  # in all layers together
    return tuple(replace(one, usual=most) for one, most in zip(known, usual.tolist(), strict=True))


def _most(scores: Tensor) -> Tensor:
    """(rows,) What all but 1 % of samples score at most, by the scores of some, (rows, samples).

    The quantile of fewer than a hundred is about their largest, and one of so many others scores more: then it is the
    bound for one more sample of a normal distribution that is known by these alone, where that is larger.
    """
    found, count = scores.quantile(_USUAL, 1), scores.shape[1]
    if 1 < count < 1 / (1 - _USUAL):
        spread = scores.std(1) * math.sqrt(1 + 1 / count)
        found = found.maximum(scores.mean(1) + float(special.stdtrit(count - 1, _USUAL)) * spread)
    return found


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


@lru_cache(maxsize=32)  # made again, they cost more than what is done with them
def _directions(width: int) -> Tensor:
    """(width, directions) orthonormal columns in which all features take part: waves of a cosine transform."""
    count = min(_DIRECTIONS, width)
    with torch.inference_mode(False):  # else who trains later could not use them
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
