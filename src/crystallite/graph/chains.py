"""`find_chains`: layers joined by hidden neurons, which separate together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.graph.neuron_groups import CONVOLUTIONS, neuron_groups
from crystallite.graph.trace import Axis, Layer, Mode, trace
from crystallite.models.layers import find_units
from crystallite.operators.experts import holds_stacks

__all__ = ["Chain", "find_chains"]


@dataclass(frozen=True)
class Chain:
    """Weights joined by hidden neurons. Neurons that several of them read or write have one group name.

    A weight goes by the name of its layer, or by its own where a layer has several: `gru.weight_hh_l0`. The neurons of
    a convolution are its channels, those of a recurrent network its hidden units.
    """

    layers: tuple[str, ...]  # in the order in which they run
    writes: dict[str, str]  # layer → the group of its outputs
    reads: dict[str, str]  # layer → the group of its inputs
    sizes: dict[str, int]  # group → neurons
    tiles: dict[str, tuple[int, int]] = field(default_factory=dict)  # layer → how often its groups stand along rows
    # (gates) and columns (directions); once where it is not said

    def tiling(self, layer: str) -> tuple[int, int]:
        """How often the groups of a layer stand along its rows and columns."""
        return self.tiles.get(layer, (1, 1))

    @property
    def read_on(self) -> bool:
        """Whether layers that are not in the chain read what its last one writes, and nothing else does."""
        return self.writes[self.layers[-1]].startswith("hidden")

    def __repr__(self) -> str:
        return f"Chain({' → '.join(self.layers)}: {', '.join(f'{n} {s}' for n, s in self.sizes.items())})"


def find_chains(
    model: nn.Module,
    targets: Sequence[str] | None = None,
    ignore: Sequence[str] = (),
    example: Any = None,
    modes: Sequence[Mode] = ("evaluation", "training"),
) -> tuple[Chain, ...]:
    """The weights of a model that can be separated, those together that share hidden neurons.

    Hidden neurons join layers where only linear layers, convolutions and batch norms hold weights for them: an MLP is
    one chain, and so are a stack of convolutions and each feed-forward pair of a transformer, plain or gated, gate and
    value in one layer or in two. A norm over the neurons, as in a residual stream, mixes all of them, so it ends a
    chain. A recurrent network is a chain of its own; a unit of a layer is in the same block in both directions. Grouped
    convolutions are left alone.

    - `targets`: patterns of layer names. None: all layers that are joined with another, or the only one there is.
    - `example`, `modes`: inputs of the model, and where the chains shall hold, as for `trace`.

    >>> find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    (Chain(0 → 2: in 8, hidden 1 16, out 4),)
    """
    units = {
        unit.name: unit.module
        for unit in find_units(model, targets or ("*",), ignore)
        if not (unit.reason or unit.shared)
    }
    usable = {name for name, module in units.items() if isinstance(module, nn.Linear) or _is_plain_convolution(module)}
    chains = {name: _recurrent_chain(name, module) for name, module in units.items() if isinstance(module, nn.RNNBase)}
    if not usable and not chains:
        raise InvalidOption(
            f"no linear layer, convolution or recurrent network that can be separated matches targets "
            f"{targets or ['*']} and ignore {list(ignore)}"
        )
    spaces = trace(model, example, modes)
    layers = {layer.name: layer for layer in spaces.layers if layer.name in usable}
    hidden = {axis for axis, group in neuron_groups(model, spaces).items() if not group.heads}  # attention is no chain
    joined: list[list[str]] = []
    ends = {
        name: {_repeated(axis)[0] for axis in (layer.rows, layer.columns)} & hidden for name, layer in layers.items()
    }
    for name in layers:
        met = [chain for chain in joined if any(ends[n] & ends[name] for n in chain)]
        joined = [chain for chain in joined if chain not in met] + [[*(n for chain in met for n in chain), name]]
    for names in joined:
        chain = _chain([layer for name, layer in layers.items() if name in names], hidden, model)
        chains[chain.layers[0]] = chain
    found = [chains[name] for name in units if name in chains]
    if targets is not None or len(found) == 1:
        return tuple(found)
    if several := tuple(chain for chain in found if len(chain.layers) > 1):
        return several
    experts = "experts in stacks are not separated, " if any(map(holds_stacks, model.modules())) else ""
    raise InvalidOption(
        f"no two layers share hidden neurons, {experts}and layers that stand alone, as in attention, are cut only "
        f"where they are named: pass targets=, such as {found[0].layers[0]!r}"
    )


def _is_plain_convolution(module: nn.Module) -> bool:
    return isinstance(module, CONVOLUTIONS) and module.groups == 1


def _recurrent_chain(name: str, module: nn.RNNBase) -> Chain:
    prefix, directions = f"{name}." if name else "", ("", "_reverse")[: 1 + module.bidirectional]
    gates = len(module.get_parameter("weight_hh_l0")) // module.hidden_size
    sizes = {"in": module.input_size}
    writes, reads, tiles = dict[str, str](), dict[str, str](), dict[str, tuple[int, int]]()
    for layer in range(module.num_layers):
        before, own = f"hidden {layer}" if layer else "in", f"hidden {layer + 1}"
        sizes[own] = module.hidden_size
        for direction in directions:
            for kind, read in (("ih", before), ("hh", own)):
                weight = f"{prefix}weight_{kind}_l{layer}{direction}"
                writes[weight], reads[weight] = own, read
                tiles[weight] = gates, len(directions) if read not in ("in", own) else 1
    return Chain(tuple(writes), writes, reads, sizes, tiles)


def _chain(layers: Sequence[Layer], hidden: set[Axis], model: nn.Module) -> Chain:
    writes, reads = dict[str, str](), dict[str, str]()
    sizes, groups = dict[str, int](), dict[tuple[str, Axis], str]()
    tiles = dict[str, tuple[int, int]]()
    for layer in layers:
        weight = model.get_submodule(layer.name).get_parameter("weight")
        for whole, side, found, size in (
            (layer.columns, "in", reads, weight.shape[1]),
            (layer.rows, "out", writes, weight.shape[0]),
        ):
            axis, times = _repeated(whole)
            kind = "hidden"
            if axis not in hidden:
                axis, times, kind = whole, 1, side  # what enters and what leaves separate apart
            if (kind, axis) not in groups:
                count = sum(other == kind for other, _ in groups) + 1
                groups[kind, axis] = kind if kind != "hidden" and count == 1 else f"{kind} {count}"
            found[layer.name] = groups[kind, axis]
            sizes[groups[kind, axis]] = size // times
            if times > 1:
                rows, columns = tiles.get(layer.name, (1, 1))
                tiles[layer.name] = (times, columns) if side == "out" else (rows, times)
    return Chain(tuple(layer.name for layer in layers), writes, reads, sizes, tiles)


def _repeated(axis: Axis) -> tuple[Axis, int]:
    """The axis that stands so often along another: twice where one layer writes gate and value of each neuron."""
    return (axis[:1], len(axis)) if len({*axis}) == 1 else (axis, 1)
