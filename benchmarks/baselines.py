"""What others would do at the same cost, without training: pruning by a score, plain SVD, random blocks.

Each makes every group of layers, or every layer, smaller by the same share, and leaves the other weights as they are.
Groups are told by the benchmark, not found by the library that they are compared with.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.operators.linear import BlockLinear


@dataclass(frozen=True)
class Group:
    """Neurons (or heads, or channels) between layers: those that write them, and the one that reads them.

    width: numbers of a neuron's output that go together, as those of an attention head; spread: inputs of the reader
    for each of them, as the places of a channel behind `Flatten`.
    """

    writers: tuple[str, ...]
    reader: str
    width: int = 1
    spread: int = 1


def layers_of(model: nn.Module, ignore: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Linear layers and convolutions by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and not any(part in name for part in ignore)
    }


def positions(model: nn.Module, names: Sequence[str], batch: Any) -> dict[str, int]:
    """How often each layer's weight is used for one sample: places of an image, or 1 where tokens are counted alike."""
    found: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name] = math.prod(output.shape[2:]) if isinstance(module, nn.Conv2d) else 1

        return count

    hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    call(model, batch)
    for one in hooks:
        one.remove()
    return found


def macs(model: nn.Module, names: Mapping[str, int]) -> int:
    """Multiply-adds of some layers, whatever has become of them; names: layer → uses for each sample."""
    return sum(
        uses * sum(p.numel() for p in model.get_submodule(name).parameters() if p.ndim > 1)
        for name, uses in names.items()
    )


@torch.inference_mode()
def call(model: nn.Module, batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def input_norms(model: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> dict[str, Tensor]:
    """Root of the sum of squares of each input (channel) of the layers."""
    sums: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def add(module: nn.Module, inputs: Any, output: Any) -> None:
            x = inputs[0] if isinstance(module, nn.Linear) else inputs[0].movedim(1, -1)
            sums[name] = sums.get(name, torch.zeros(())) + (x.reshape(-1, x.shape[-1]).double() ** 2).sum(0)

        return add

    hooks = [model.get_submodule(name).register_forward_hook(hook(name)) for name in names]
    for batch in batches:
        call(model, batch)
    for one in hooks:
        one.remove()
    return {name: value.sqrt().float() for name, value in sums.items()}


def pruned(
    model: nn.Module, groups: Sequence[Group], names: Mapping[str, int], budget: float,
    norms: Mapping[str, Tensor] | None = None,
) -> nn.Module:  # fmt: skip
    """Without the neurons of least score: the norm of a neuron's weights, in and out.

    norms: of the inputs; then weights are multiplied by them, which is Wanda's score summed over a neuron.
    """
    scores = [_scores(model, group, norms) for group in groups]

    def made(share: float) -> nn.Module:
        small = copy.deepcopy(model)
        for group, score in zip(groups, scores, strict=True):
            kept = score.topk(max(1, round(share * len(score)))).indices.sort().values
            outputs = _places(kept, group.width)
            for name in group.writers:
                _replace(small, name, rows=outputs)
            _replace(small, group.reader, columns=_places(outputs, group.spread))
        return small

    return _largest(made, names, budget * macs(model, names))


def _scores(model: nn.Module, group: Group, norms: Mapping[str, Tensor] | None) -> Tensor:
    """(neurons,)"""
    total = torch.zeros(())
    for name in group.writers:
        weight = _scaled(model, name, norms)
        total = total + (weight.flatten(1) ** 2).sum(1).view(-1, group.width).sum(1)
    weight = _scaled(model, group.reader, norms)
    into = (weight.transpose(0, 1).flatten(1) ** 2).sum(1)
    return total + into.view(-1, group.width * group.spread).sum(1)


def _scaled(model: nn.Module, name: str, norms: Mapping[str, Tensor] | None) -> Tensor:
    weight = model.get_submodule(name).get_parameter("weight").detach()
    return weight if norms is None else weight * norms[name].view(1, -1, *[1] * (weight.ndim - 2))


def _places(kept: Tensor, width: int) -> Tensor:
    return (kept[:, None] * width + torch.arange(width)).flatten()


def _replace(model: nn.Module, name: str, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """The layer with some of its outputs and inputs."""
    old: Any = model.get_submodule(name)
    weight, bias = old.weight.detach(), old.bias
    if rows is not None:
        weight, bias = weight[rows], None if bias is None else bias.detach()[rows]
    if columns is not None:
        weight = weight[:, columns]
    if isinstance(old, nn.Conv2d):
        new: Any = nn.Conv2d(
            weight.shape[1], weight.shape[0], old.kernel_size, old.stride, old.padding, bias=bias is not None
        )
    else:
        new = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    _put(model, name, new, weight, bias)


def _put(model: nn.Module, name: str, new: Any, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    model.set_submodule(name, new)


def decomposed(model: nn.Module, names: Mapping[str, int], budget: float) -> nn.Module:
    """Every layer as two, by the SVD of its weight."""
    factors = {
        name: torch.linalg.svd(model.get_submodule(name).get_parameter("weight").detach().flatten(1), False)
        for name in names
    }

    def made(share: float) -> nn.Module:
        small = copy.deepcopy(model)
        for name in names:
            left, values, right = factors[name]
            old: Any = small.get_submodule(name)
            outputs, inputs = len(left), right.shape[1]
            rank = max(1, int(share * outputs * inputs / (outputs + inputs)))
            up, down = left[:, :rank] * values[:rank], right[:rank]
            pair = nn.Sequential(*_pair(old, rank))
            _put(pair, "0", pair[0], down.view_as(pair[0].weight), None)
            _put(pair, "1", pair[1], up.view_as(pair[1].weight), old.bias)
            small.set_submodule(name, pair)
        return small

    return _largest(made, names, budget * macs(model, names))


def _pair(old: Any, rank: int) -> tuple[nn.Module, nn.Module]:
    if isinstance(old, nn.Conv2d):
        first = nn.Conv2d(old.in_channels, rank, old.kernel_size, old.stride, old.padding, bias=False)
        return first, nn.Conv2d(rank, old.out_channels, 1, bias=old.bias is not None)
    return nn.Linear(old.in_features, rank, False), nn.Linear(rank, old.out_features, old.bias is not None)


def random_blocks(model: nn.Module, names: Mapping[str, int], budget: float, seed: int) -> nn.Module:
    """Every linear layer as 1/budget blocks of equal size (±1) at random; what lies between them is dropped."""
    blocks = round(1 / budget)
    chance = torch.Generator().manual_seed(seed)
    small = copy.deepcopy(model)
    for name in names:
        old: Any = small.get_submodule(name)
        sides = [torch.randperm(n, generator=chance).numpy() % blocks for n in old.weight.shape[:2]]
        cells = [tuple((side == block).nonzero()[0] for side in sides) for block in range(blocks)]
        small.set_submodule(name, BlockLinear.from_blocks(old.weight.detach(), old.bias, cells))
    return small


def _largest(made: Callable[[float], nn.Module], names: Mapping[str, int], limit: float) -> nn.Module:
    """The model of the largest share whose multiply-adds do not exceed the limit."""
    low, high = 0.0, 1.0
    best = None
    for _ in range(8):
        middle = (low + high) / 2
        small = made(middle)
        if macs(small, names) <= limit:
            low, best = middle, small
        else:
            high = middle
    if best is None:
        raise ValueError("no share is small enough")
    return best
