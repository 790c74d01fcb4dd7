"""Which layers of a model separate together, and which block each of their neurons shall belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from crystallite.errors import InvalidOption
from crystallite.reorganization.graph import Spaces, trace
from crystallite.reorganization.units import find_units
from crystallite.structure.decompose import decompose

__all__ = [
    "Chain",
    "Partition",
    "find_chains",
    "joint_components",
    "own_neurons",
    "random_partition",
    "spread_partition",
]

_BATCH_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Chain:
    """Linear layers joined by hidden neurons. Neurons that several layers read or write have one group name."""

    layers: tuple[str, ...]  # in the order in which they run
    writes: dict[str, str]  # layer → the group of its outputs
    reads: dict[str, str]  # layer → the group of its inputs
    sizes: dict[str, int]  # group → neurons

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

    def sides(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Labels of a layer's outputs and of its inputs."""
        for chain, labels in zip(self.chains, self.labels, strict=True):
            if layer in chain.layers:
                return labels[chain.writes[layer]], labels[chain.reads[layer]]
        raise InvalidOption(f"{layer}: not in this partition; it has {', '.join(self.layers)}")

    def mask(self, layer: str) -> Tensor:
        """(outputs, inputs) bool: weights inside blocks."""
        outputs, inputs = self.sides(layer)
        return torch.from_numpy(outputs[:, None] == inputs)


def find_chains(
    model: nn.Module, targets: Sequence[str] | None = None, ignore: Sequence[str] = (), example: Any = None
) -> tuple[Chain, ...]:
    """The linear layers of a model, those together that share hidden neurons.

    Hidden neurons join layers where only linear layers and batch norms hold weights for them: an MLP is one chain, each
    feed-forward pair of a transformer is one, plain or gated. A norm over the neurons, as in a residual stream, mixes
    all of them, so it ends a chain.

    - `targets`: patterns of layer names. None: all layers that are joined with another.
    - `example`: inputs of the model, as for `trace`.

    >>> find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    (Chain(0 → 2: in 8, hidden 1 16, out 4),)
    """
    units = find_units(model, targets or ("*",), ignore)
    usable = {unit.name for unit in units if not unit.reason and type(unit.module) is nn.Linear}
    if not usable:
        raise InvalidOption(f"no linear layer to separate matches targets {targets} and ignore {list(ignore)}")
    spaces = trace(model, example)
    layers = {layer.name: layer for layer in spaces.layers if layer.name in usable}
    hidden = {((space,),) for space in own_neurons(model, spaces, (nn.Linear, _BATCH_NORM))}
    joined: list[list[str]] = []
    for name, layer in layers.items():
        ends = {layer.rows, layer.columns} & hidden
        met = [chain for chain in joined if any({layers[n].rows, layers[n].columns} & ends for n in chain)]
        joined = [chain for chain in joined if chain not in met] + [[*(n for chain in met for n in chain), name]]
    chains = [_chain([n for n in layers if n in chain], layers, hidden, model) for chain in joined]
    chains = [chain for chain in chains if targets is not None or len(chain.layers) > 1] or chains
    return tuple(sorted(chains, key=lambda chain: list(layers).index(chain.layers[0])))


def _chain(names: list[str], layers: dict[str, Any], hidden: set[Any], model: nn.Module) -> Chain:
    writes, reads = dict[str, str](), dict[str, str]()
    sizes, groups = dict[str, int](), dict[Any, str]()
    for name in names:
        layer, module = layers[name], model.get_submodule(name)
        for axis, side, found, size in (
            (layer.columns, "in", reads, module.in_features),
            (layer.rows, "out", writes, module.out_features),
        ):
            key = axis if axis in hidden else (side, axis)  # what enters and what leaves separate apart
            if key not in groups:
                inside = axis in hidden
                count = sum(group.startswith("hidden" if inside else side) for group in groups.values()) + inside
                groups[key] = f"hidden {count}" if inside else side + (f" {count + 1}" if count else "")
            found[name] = groups[key]
            sizes[groups[key]] = int(size)  # type: ignore[arg-type]
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

    Fitted and trained afterwards, a random partition ends as good as a chosen one, unless the network has modules of
    its own; pass those as a `Partition`.

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


def spread_partition(chains: Sequence[Chain], blocks: int, samples: Mapping[str, Tensor], seed: int = 0) -> Partition:
    """As `random_partition`, but inputs that say nearly the same go to different blocks.

    So every block sees something of everything, which matters where an output can read one block only. Inputs are put
    in the order of a hierarchical clustering by correlation, and each run of k of them is shared out at random.

    samples: (samples, features) that the first layer of each chain reads, by its name. O(features²) for each.
    """
    random = random_partition(chains, blocks, seed)
    generator, found = np.random.default_rng(seed), []
    for chain, labels in zip(random.chains, random.labels, strict=True):
        first = chain.layers[0]
        order = _by_correlation(samples[first].detach().cpu().double().numpy())
        runs = [generator.permutation(blocks)[: len(order) - i] for i in range(0, len(order), blocks)]
        own = np.empty(len(order), np.intp)
        own[order] = np.concatenate(runs)
        found.append({**labels, chain.reads[first]: own})
    return Partition(blocks, random.chains, tuple(found))


def _by_correlation(samples: np.ndarray) -> np.ndarray:
    """Features in an order in which correlated ones stand together; constant ones last."""
    varies = samples.std(0) > 0
    alive, constant = np.flatnonzero(varies), np.flatnonzero(~varies)
    if len(alive) < 3:
        return np.concatenate([alive, constant])
    distance = np.clip(1 - np.corrcoef(samples[:, alive].T), 0, 2)
    tree = linkage(distance[np.triu_indices(len(alive), 1)], "average")
    return np.concatenate([alive[leaves_list(tree)], constant])


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
        for rows, cols in decompose(weights[name], name=name).blocks:  # a star joins what a block joins
            first.append(np.full(len(rows) + len(cols), inputs + cols[0]))
            second.append(np.concatenate([inputs + cols, outputs + rows]))
    ends = np.concatenate(first), np.concatenate(second)
    _, found = connected_components(coo_array((np.ones(len(ends[0]), bool), ends), shape=(total, total)), False)
    touched = np.unique(ends[1])
    label = np.full(total, -1)
    label[touched] = np.unique(found[touched], return_inverse=True)[1]
    return dict(zip(chain.sizes, np.split(label, list(start.values())[1:]), strict=True))
