"""Which layers of a model separate together, and which block each of their neurons shall belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.graph.trace import Spaces, trace
from crystallite.models.layers import find_units
from crystallite.operators.recurrent_layer import GATES
from crystallite.partitioning.weights import edges, owner
from crystallite.structure.decompose import decompose

__all__ = [
    "Chain",
    "Partition",
    "decorrelated_partition",
    "find_chains",
    "joint_components",
    "own_neurons",
    "random_partition",
]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_SWEEPS = 20  # over all inputs, of which few are needed
_LEAST = 1e-9  # of all that is shared, which an exchange must gain: rounding could go round in circles


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


@dataclass(frozen=True)
class Partition:
    """A block for every neuron of some chains: labels[chain][group] is (neurons,) with values 0 … blocks − 1."""

    blocks: int
    chains: tuple[Chain, ...]
    labels: tuple[Mapping[str, np.ndarray], ...]

    def __post_init__(self) -> None:
        for chain, labels in zip(self.chains, self.labels, strict=True):
            for group, size in chain.sizes.items():
                found = labels.get(group)
                if found is None or found.shape != (size,) or set(np.unique(found)) != set(range(self.blocks)):
                    got = "none" if found is None else f"shape {found.shape} with {sorted(set(found.tolist()))[:8]}"
                    raise InvalidOption(
                        f"{chain.layers[0]}: expected {size} labels for {group} that use all of 0 … {self.blocks - 1}, "
                        f"got {got}"
                    )

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for chain in self.chains for name in chain.layers)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the weights belong to."""
        return tuple(dict.fromkeys(owner(name)[0] for name in self.layers))

    def sides(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Labels of the rows and of the columns of a layer's weight."""
        for chain, labels in zip(self.chains, self.labels, strict=True):
            if layer in chain.layers:
                rows, columns = chain.tiling(layer)
                return np.tile(labels[chain.writes[layer]], rows), np.tile(labels[chain.reads[layer]], columns)
        raise InvalidOption(f"{layer}: not in this partition; it has {', '.join(self.layers)}")

    def mask(self, layer: str) -> Tensor:
        """(rows, columns) bool: weights inside blocks."""
        outputs, inputs = self.sides(layer)
        return torch.from_numpy(outputs[:, None] == inputs)


def find_chains(
    model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = (), example: Any = None
) -> tuple[Chain, ...]:
    """The weights of a model that can be separated, those together that share hidden neurons.

    Hidden neurons join layers where only linear layers, convolutions and batch norms hold weights for them: an MLP is
    one chain, and so are a stack of convolutions and each feed-forward pair of a transformer, plain or gated. A norm
    over the neurons, as in a residual stream, mixes all of them, so it ends a chain. A recurrent network is a chain of
    its own; a unit of a layer is in the same block in both directions. Grouped convolutions are left alone.

    - `targets`: patterns of layer names. None: all layers that are joined with another.
    - `example`: inputs of the model, as for `trace`.

    >>> find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    (Chain(0 → 2: in 8, hidden 1 16, out 4),)
    """
    units = {unit.name: unit.module for unit in find_units(model, targets or ("*",), ignore) if not unit.reason}
    usable = {name for name, module in units.items() if type(module) is nn.Linear or _is_plain_convolution(module)}
    recurrent = [_recurrent_chain(name, module) for name, module in units.items() if isinstance(module, nn.RNNBase)]
    if not usable and not recurrent:
        raise InvalidOption(f"no layer to separate matches targets {targets} and ignore {list(ignore)}")
    spaces = trace(model, example)
    layers = {layer.name: layer for layer in spaces.layers if layer.name in usable}
    hidden = {((space,),) for space in own_neurons(model, spaces, (nn.Linear, *_CONVOLUTIONS, _BATCH_NORM))}
    joined: list[list[str]] = []
    for name, layer in layers.items():
        ends = {layer.rows, layer.columns} & hidden
        met = [chain for chain in joined if any({layers[n].rows, layers[n].columns} & ends for n in chain)]
        joined = [chain for chain in joined if chain not in met] + [[*(n for chain in met for n in chain), name]]
    chains = [_chain([n for n in layers if n in chain], layers, hidden, model) for chain in joined] + recurrent
    chains = [chain for chain in chains if targets is not None or len(chain.layers) > 1] or chains
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return tuple(sorted(chains, key=lambda chain: order[owner(chain.layers[0])[0]]))


def _is_plain_convolution(module: nn.Module) -> bool:
    return isinstance(module, _CONVOLUTIONS) and module.groups == 1


def _recurrent_chain(name: str, module: nn.RNNBase) -> Chain:
    prefix, directions = f"{name}." if name else "", ("", "_reverse")[: 1 + module.bidirectional]
    sizes = {"in": module.input_size}
    writes, reads, tiles = dict[str, str](), dict[str, str](), dict[str, tuple[int, int]]()
    for layer in range(module.num_layers):
        before, own = f"hidden {layer}" if layer else "in", f"hidden {layer + 1}"
        sizes[own] = module.hidden_size
        for direction in directions:
            for kind, read in (("ih", before), ("hh", own)):
                weight = f"{prefix}weight_{kind}_l{layer}{direction}"
                writes[weight], reads[weight] = own, read
                tiles[weight] = GATES[module.mode], len(directions) if read not in ("in", own) else 1
    return Chain(tuple(writes), writes, reads, sizes, tiles)


def _chain(names: list[str], layers: dict[str, Any], hidden: set[Any], model: nn.Module) -> Chain:
    writes, reads = dict[str, str](), dict[str, str]()
    sizes, groups = dict[str, int](), dict[Any, str]()
    for name in names:
        layer, weight = layers[name], model.get_parameter(f"{name}.weight" if name else "weight")
        for axis, side, found, size in (
            (layer.columns, "in", reads, weight.shape[1]),
            (layer.rows, "out", writes, weight.shape[0]),
        ):
            key = axis if axis in hidden else (side, axis)  # what enters and what leaves separate apart
            if key not in groups:
                inside = axis in hidden
                count = sum(group.startswith("hidden" if inside else side) for group in groups.values()) + inside
                groups[key] = f"hidden {count}" if inside else side + (f" {count + 1}" if count else "")
            found[name] = groups[key]
            sizes[groups[key]] = int(size)
    return Chain(tuple(names), writes, reads, sizes)


def own_neurons(model: nn.Module, spaces: Spaces, kinds: tuple[type, ...]) -> set[int]:
    """Spaces whose order is free and for which only modules of these kinds hold tensors."""
    strangers = {
        space
        for (tensor, _), axis in spaces.places.items()
        for part in axis
        for space in part
        if not isinstance(model.get_submodule(tensor.rpartition(".")[0]), kinds)
    }
    return {i for i, space in enumerate(spaces.spaces) if not space.fixed and not space.within} - strangers


def random_partition(chains: Sequence[Chain], blocks: int, seed: int = 0) -> Partition:
    """Every group of neurons shared out at random to blocks of equal size (±1).

    `decorrelated_partition`, `cluster_partition` and `assign_by_explained_variance` start here. Trained with labels for
    long enough, hidden neurons shared out at random end nearly as good as chosen ones; a network that has modules of
    its own should be split along them: pass those as a `Partition`.

    >>> chains = find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    >>> int(random_partition(chains, 2).mask("0").sum())
    64
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 2:
        raise InvalidOption(f"blocks must be an integer of at least 2, got {blocks!r}")
    generator = np.random.default_rng(seed)
    for chain in chains:
        for name in chain.layers:
            size = min(chain.sizes[chain.reads[name]], chain.sizes[chain.writes[name]])
            if size < blocks:
                raise InvalidOption(f"{name}: {size} neurons are too few for {blocks} blocks; ignore this layer")
    labels = tuple(
        {group: generator.permutation(np.arange(size) % blocks) for group, size in chain.sizes.items()}
        for chain in chains
    )
    return Partition(blocks, tuple(chains), labels)


def decorrelated_partition(
    chains: Sequence[Chain], blocks: int, samples: Mapping[str, Tensor], seed: int = 0
) -> Partition:
    """As `random_partition`, but inputs that say nearly the same go to different blocks.

    So every block sees something of everything: of an image, every k-th pixel. That matters most where an output can
    read one block only. Starting at random, inputs of two blocks change places as long as that lessens the sum of
    squared covariances inside blocks.

    samples: (samples, features) that the first layer of each chain reads, by its name. O(features²) for each.
    """
    random, found = random_partition(chains, blocks, seed), []
    for chain, labels in zip(random.chains, random.labels, strict=True):
        first = chain.layers[0]
        read = samples[first].detach().cpu().double().numpy()
        read = read - read.mean(0)
        read /= max(float(np.abs(read).max(initial=0)), 1e-300)
        own = chain.reads[first]
        found.append({**labels, own: _spread((read.T @ read) ** 2, labels[own])})
    return Partition(blocks, random.chains, tuple(found))


def _spread(alike: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Labels in which no exchange of two elements lessens what those with one label have in common."""
    np.fill_diagonal(alike, 0)
    labels, every = labels.copy(), np.arange(len(labels))
    shared = np.stack([alike[:, labels == b].sum(1) for b in range(labels.max() + 1)], 1)  # (elements, blocks)
    least = _LEAST * shared.sum()
    for _ in range(_SWEEPS):
        before = labels.copy()
        for i in every:
            block = labels[i]
            gain = shared[i, block] + shared[every, labels] - shared[i, labels] - shared[:, block] + 2 * alike[i]
            j = int(np.argmax(np.where(labels == block, 0, gain)))
            if labels[j] != block and gain[j] > least:
                moved = alike[:, i] - alike[:, j]
                shared[:, block] -= moved
                shared[:, labels[j]] += moved
                labels[i], labels[j] = labels[j], block
        if np.array_equal(labels, before):
            break
    return labels


def joint_components(chain: Chain, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Component of every neuron of a chain under the nonzero weights of its layers, by group; −1 is dormant.

    Numbered without gaps. One pass over each matrix.

    >>> chain = find_chains(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))[0]
    >>> {k: v.tolist() for k, v in joint_components(chain, {"0": np.eye(2), "2": np.array([[0.0, 1.0]])}).items()}
    {'in': [0, 1], 'hidden 1': [0, 1], 'out': [1]}
    """
    start = dict(zip(chain.sizes, np.cumsum([0, *chain.sizes.values()]).tolist(), strict=False))
    total = sum(chain.sizes.values())
    first, second = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
    for name in chain.layers:
        outputs, inputs = start[chain.writes[name]], start[chain.reads[name]]
        met = edges(torch.as_tensor(weights[name]), chain.tiling(name))
        for rows, cols in decompose(met, name=name).blocks:  # a star joins what a block joins
            first.append(np.full(len(rows) + len(cols), inputs + cols[0]))
            second.append(np.concatenate([inputs + cols, outputs + rows]))
    ends = np.concatenate(first), np.concatenate(second)
    _, found = connected_components(coo_array((np.ones(len(ends[0]), bool), ends), shape=(total, total)), False)
    touched = np.unique(ends[1])
    label = np.full(total, -1)
    label[touched] = np.unique(found[touched], return_inverse=True)[1]
    return dict(zip(chain.sizes, np.split(label, list(start.values())[1:]), strict=True))
