"""Linear layers that follow each other in an `nn.Sequential`: replaced together, put back one by one."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import nn

from crystallite.models.layers import has_hooks, in_several_places
from crystallite.operators.chain import ELEMENTWISE, BlockChain
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.reorganization.cost_model import CostModel

__all__ = ["Run", "chain", "channel_pair", "find_runs", "stages"]


@dataclass(frozen=True)
class Run:
    """Consecutive places of an nn.Sequential: linear layers, and the elementwise modules between each two of them."""

    parent: str
    places: tuple[str, ...]  # all of them, from the first layer to the last
    names: tuple[str, ...]  # full names of the layers
    layers: tuple[nn.Linear, ...]
    activations: tuple[nn.Module, ...]  # one between two layers; an nn.Sequential where there are more or none


def find_runs(model: nn.Module, usable: Container[str]) -> Iterator[Run]:
    """The longest runs of at least two layers whose names are usable.

    They may become one operator only if nothing but their nn.Sequential calls them: see `calls`.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 1))
    >>> [(run.places, run.names) for run in find_runs(net, {"0", "3", "5"})]
    [(('0', '1', '2', '3'), ('0', '3'))]
    """
    several = in_several_places(model)
    for parent, module in model.named_modules():
        if type(module) is not nn.Sequential or has_hooks(module):
            continue
        stretch: list[tuple[str, nn.Module]] = []
        for place, child in [*module._modules.items(), ("", None)]:  # named_children would skip a reused activation
            name = f"{parent}.{place}" if parent else place
            between = stretch and type(child) in ELEMENTWISE
            if child is not None and (
                (type(child) is nn.Linear and name in usable and child not in several)
                or (between and not has_hooks(child))
            ):
                stretch.append((place, child))
            else:
                yield from _run(parent, stretch)
                stretch = []


def _run(parent: str, stretch: list[tuple[str, nn.Module]]) -> Iterator[Run]:
    layers: dict[str, nn.Linear] = {}
    between: list[list[nn.Module]] = []
    last = 0
    for i, (place, child) in enumerate(stretch):
        if isinstance(child, nn.Linear):
            layers[f"{parent}.{place}" if parent else place] = child
            between.append([])
            last = i
        else:
            between[-1].append(child)
    if len(layers) > 1:
        places = tuple(place for place, _ in stretch[: last + 1])  # what follows the last layer stays where it is
        activations = tuple(m[0] if len(m) == 1 else nn.Sequential(*m) for m in between[:-1])
        yield Run(parent, places, tuple(layers), tuple(layers.values()), activations)


def chain(run: Run, cost_model: CostModel) -> BlockChain | None:
    """The run as one chain, or None if that would not pay."""
    found = BlockChain.from_dense(run.layers, run.activations)
    return found if cost_model.is_faster("chain", found.dense_macs, found.macs, found.n_blocks) else None


def channel_pair(
    run: Run, alternative: int, cost_model: CostModel, channels: int | None, form: str | None
) -> BlockFeedForward | None:
    """A run of two layers channel by channel, or None if that saves nothing over an alternative's multiply-adds.

    form: if given, that one whatever it saves.
    """
    if len(run.layers) != 2:
        return None
    first, second = run.layers
    found = BlockFeedForward.from_dense(first, run.activations[0], second, channels=channels, form=form)
    if form is not None:
        return found
    fewer = found.form == "channels" and found.macs < alternative
    is_faster = cost_model.is_faster("feed-forward", found.dense_macs, found.macs, found.n_blocks)
    return found if fewer and is_faster else None


def stages(operator: BlockChain | BlockFeedForward) -> list[nn.Module]:
    """The modules of the run that an operator replaced, one for each of its places."""
    if isinstance(operator, BlockChain):
        layers, activations = operator.to_dense(), list(operator.activations)
    else:
        pair = operator.to_dense()
        layers, activations = [pair.first, pair.second], [pair.activation]
    found: list[nn.Module] = [layers[0]]
    for activation, layer in zip(activations, layers[1:], strict=True):
        found += activation if type(activation) is nn.Sequential else [activation]
        found.append(layer)
    return found
