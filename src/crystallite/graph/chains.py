"""`find_chains`: layers joined by hidden neurons, which separate together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import batches, evaluating
from crystallite.graph.neuron_groups import CONVOLUTIONS, NeuronGroup, head_group, neuron_groups
from crystallite.graph.trace import Axis, Layer, Mode, Spaces, trace
from crystallite.graph.trials import acts_alone
from crystallite.models.layers import find_units
from crystallite.operators.experts import holds_stacks

__all__ = ["Chain", "find_chains"]


@dataclass(frozen=True)
class Chain:
    """Weights joined by hidden neurons. Neurons that several of them read or write have one group name.

    A weight goes by the name of its layer, or by its own where a layer has several: `gru.weight_hh_l0`. The neurons of
    a convolution are its channels, those of a recurrent network its hidden units, those of attention its heads.
    """

    layers: tuple[str, ...]  # in the order in which they run
    writes: dict[str, str]  # layer → the group of its outputs
    reads: dict[str, str]  # layer → the group of its inputs
    sizes: dict[str, int]  # group → neurons
    # layer → the neuron of each row or column of its weight, where they are not simply all of them in order: gates and
    # directions of recurrent networks, gate and value in one layer, attention heads
    rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    columns: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def written(self, layer: str) -> np.ndarray:
        """(rows of a layer's weight,) the neuron that each is, among those of the group that it writes."""
        return np.array(self.rows.get(layer) or range(self.sizes[self.writes[layer]]))

    def read(self, layer: str) -> np.ndarray:
        """(columns of a layer's weight,) the neuron that each is, among those of the group that it reads."""
        return np.array(self.columns.get(layer) or range(self.sizes[self.reads[layer]]))

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
    heads: bool = False,
) -> tuple[Chain, ...]:
    """The weights of a model that can be separated, those together that share hidden neurons.

    Hidden neurons join layers where only linear layers, convolutions and batch norms hold weights for them: an MLP is
    one chain, and so are a stack of convolutions and each feed-forward pair of a transformer, plain or gated, gate and
    value in one layer or in two. A norm over the neurons, as in a residual stream, mixes all of them, so it ends a
    chain. A recurrent network is a chain of its own; a unit of a layer is in the same block in both directions. Grouped
    convolutions are left alone.

    - `targets`: patterns of layer names. None: all layers that are joined with another, or the only one there is.
    - `example`, `modes`: inputs of the model, and where the chains shall hold, as for `trace`.
    - `heads`: whether heads join the layers of an attention, if all of them match the targets and the heads go alone
      in a trial on the example: queries, keys, values and what reads them are then one chain, whose hidden neurons are
      the heads. Heads of queries that share keys and values are one. Costs two runs for each attention.

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
    hidden = {axis for axis, group in neuron_groups(model, spaces).items() if not group.heads}
    attentions = _attentions(model, spaces, layers.keys(), example) if heads and example is not None else []
    joined = [list(group.layers) for group in attentions]
    ends = {
        name: {_repeated(axis)[0] for axis in (layer.rows, layer.columns)} & hidden
        for name, layer in layers.items()
        if not any(name in chain for chain in joined)
    }
    for name in ends:
        met = [chain for chain in joined if any(ends[n] & ends[name] for n in chain if n in ends)]
        joined = [chain for chain in joined if chain not in met] + [[*(n for chain in met for n in chain), name]]
    for names in joined:
        own = [layer for name, layer in layers.items() if name in names]
        within = next((group for group in attentions if names[0] in group.layers), None)
        chain = _chain(own, hidden, model, within)
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
    writes, reads = dict[str, str](), dict[str, str]()
    rows, columns = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for layer in range(module.num_layers):
        before, own = f"hidden {layer}" if layer else "in", f"hidden {layer + 1}"
        sizes[own] = module.hidden_size
        for direction in directions:
            for kind, read in (("ih", before), ("hh", own)):
                weight = f"{prefix}weight_{kind}_l{layer}{direction}"
                writes[weight], reads[weight] = own, read
                rows[weight] = (*range(sizes[own]),) * gates
                if read not in ("in", own):
                    columns[weight] = (*range(sizes[read]),) * len(directions)
    return Chain(tuple(writes), writes, reads, sizes, rows, columns)


def _attentions(model: nn.Module, spaces: Spaces, usable: Collection[str], example: Any) -> list[NeuronGroup]:
    """The heads of every attention that has layers of its own, all of which may be separated."""
    found = [group for one in spaces.attentions if (group := head_group(model, one)) and {*usable} >= {*group.layers}]
    count = Counter(name for group in found for name in group.layers)
    batch = next(batches(example if isinstance(example, (Tensor, Mapping)) else [(tuple(example),)]))
    with evaluating(model):
        return [g for g in found if all(count[name] == 1 for name in g.layers) and acts_alone(model, g, batch)]


def _chain(layers: Sequence[Layer], hidden: set[Axis], model: nn.Module, attention: NeuronGroup | None) -> Chain:
    writes, reads = dict[str, str](), dict[str, str]()
    sizes, groups = dict[str, int](), dict[tuple[str, Axis], str]()
    rows, columns = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for layer in layers:
        weight = model.get_submodule(layer.name).get_parameter("weight")
        for whole, side, found, places, size in (
            (layer.columns, "in", reads, columns, weight.shape[1]),
            (layer.rows, "out", writes, rows, weight.shape[0]),
        ):
            (axis, times), kind, heads = _repeated(whole), "hidden", _heads(attention, layer.name, side)
            if heads is not None:
                axis, kind, places[layer.name] = (), "heads", tuple(heads.tolist())
                size = int(heads.max()) + 1
            elif axis not in hidden:
                axis, kind = whole, side  # what enters and what leaves separate apart
            elif times > 1:
                size //= times
                places[layer.name] = (*range(size),) * times
            if (kind, axis) not in groups:
                count = sum(other == kind for other, _ in groups) + 1
                groups[kind, axis] = kind if kind != "hidden" and count == 1 else f"{kind} {count}"
            found[layer.name] = groups[kind, axis]
            sizes[groups[kind, axis]] = size
    return Chain(tuple(layer.name for layer in layers), writes, reads, sizes, rows, columns)


def _heads(attention: NeuronGroup | None, name: str, side: str) -> Tensor | None:
    """The heads along a side of a layer of an attention; None: what it reads and writes outside of that."""
    if attention is None:
        return None
    return attention.columns.get(name) if side == "in" else attention.rows.get(name)


def _repeated(axis: Axis) -> tuple[Axis, int]:
    """The axis that stands so often along another: twice where one layer writes gate and value of each neuron."""
    return (axis[:1], len(axis)) if len({*axis}) == 1 else (axis, 1)
