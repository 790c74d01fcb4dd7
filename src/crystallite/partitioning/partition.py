"""Which block each neuron of a chain of layers shall belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.graph.chains import Chain
from crystallite.partitioning.weights import edges, owner
from crystallite.structure.decompose import decompose, expand_columns

__all__ = ["Partition", "decorrelated_partition", "joint_components", "random_partition", "sharing_inputs"]

_SWEEPS = 20  # over all inputs, of which few are needed
_LEAST = 1e-9  # of all that is shared, which an exchange must gain: rounding could go round in circles


@dataclass(frozen=True)
class Partition:
    """A block for every neuron of some chains: labels[chain][group] is (neurons,) with values 0 … blocks − 1.

    Inputs may be read by further blocks: copies[chain][group] is (blocks, neurons) bool, True where a block reads a
    copy of an input beside its own.
    """

    blocks: int
    chains: tuple[Chain, ...]
    labels: tuple[Mapping[str, np.ndarray], ...]
    copies: tuple[Mapping[str, np.ndarray], ...] = ()

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
        for chain, copies in zip(self.chains, self.copies, strict=True) if self.copies else ():
            for group, found in copies.items():
                shape = self.blocks, chain.sizes.get(group, 0)
                if group in chain.writes.values() or found.shape != shape or found.dtype != bool:
                    raise InvalidOption(
                        f"{chain.layers[0]}: expected {shape} booleans as copies of inputs that no layer of the chain "
                        f"writes, got {found.dtype} of shape {found.shape} for {group}"
                    )

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(name for chain in self.chains for name in chain.layers)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that the weights belong to."""
        return tuple(dict.fromkeys(owner(name)[0] for name in self.layers))

    def members(self, layer: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rows and columns of a layer's weight in each block: a row is in one, a column in those that read it."""
        number, chain = self._chain_of(layer)
        rows, columns = chain.written(layer), chain.read(layer)
        written, read = (self._inside(number, group) for group in (chain.writes[layer], chain.reads[layer]))
        return [(np.flatnonzero(own[rows]), np.flatnonzero(seen[columns]))
                for own, seen in zip(written, read, strict=True)]  # fmt: skip

    def mask(self, layer: str) -> Tensor:
        """(rows, columns) bool: weights inside blocks."""
        members = self.members(layer)
        inside = np.zeros([1 + max(int(own.max()) for own in side) for side in zip(*members, strict=True)], bool)
        for rows, columns in members:
            inside[np.ix_(rows, columns)] = True
        return torch.from_numpy(inside)

    # inputs that several blocks read

    def row_labels(self, layer: str) -> np.ndarray | None:
        """The block of each row of a layer's weight if blocks read copies of its inputs, else None."""
        number, chain = self._chain_of(layer)
        if not self._shared(number, chain.reads[layer]):
            return None
        return np.asarray(self.labels[number][chain.writes[layer]][chain.written(layer)])

    def expand(self, layer: str, weight: Tensor) -> Tensor:
        """A layer's weight with a column for every copy of an input; as it is if there are none."""
        labels = self.row_labels(layer)
        return weight if labels is None else expand_columns(weight, labels)

    @property
    def expanded(self) -> Partition:
        """The partition of the expanded weights: shared inputs once for every block, so that no neuron is in two."""
        chains, labels = [], []
        for number, (chain, own) in enumerate(zip(self.chains, self.labels, strict=True)):
            shared = {group: size for group, size in chain.sizes.items() if self._shared(number, group)}
            wide = {group: self.blocks * size for group, size in shared.items()}
            chains.append(replace(chain, sizes=chain.sizes | wide))
            labels.append({**own, **{g: np.repeat(np.arange(self.blocks), size) for g, size in shared.items()}})
        return Partition(self.blocks, tuple(chains), tuple(labels))

    def _shared(self, number: int, group: str) -> bool:
        return bool(self.copies) and group in self.copies[number] and bool(self.copies[number][group].any())

    def _inside(self, number: int, group: str) -> np.ndarray:
        """(blocks, neurons) bool: which block has or reads which neuron."""
        own: np.ndarray = self.labels[number][group] == np.arange(self.blocks)[:, None]
        return own | self.copies[number][group] if self._shared(number, group) else own

    def _chain_of(self, layer: str) -> tuple[int, Chain]:
        for number, chain in enumerate(self.chains):
            if layer in chain.layers:
                return number, chain
        raise InvalidOption(f"{layer}: not in this partition; it has {', '.join(self.layers)}")


def random_partition(chains: Sequence[Chain], blocks: int, seed: int = 0) -> Partition:
    """Every group of neurons shared out at random to blocks of equal size (±1).

    `decorrelated_partition`, `cluster_partition` and `assign_by_explained_variance` start here. Trained with labels for
    long enough, hidden neurons shared out at random end nearly as good as chosen ones; a network that has modules of
    its own should be split along them: pass those as a `Partition`.

    >>> from torch import nn
    >>> from crystallite.graph.chains import find_chains
    >>> chains = find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    >>> int(random_partition(chains, 2).mask("0").sum())
    64
    """
    if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 2:
        raise InvalidOption(f"blocks must be an integer of at least 2, got {blocks!r}")
    generator = np.random.default_rng(seed)
    for chain in chains:
        for name in chain.layers:
            group = min(chain.reads[name], chain.writes[name], key=lambda group: chain.sizes[group])
            if (size := chain.sizes[group]) < blocks:
                what = "attention heads" if group.startswith("heads") else "neurons"
                raise InvalidOption(f"{name}: {size} {what} are too few for {blocks} blocks; ignore this layer")
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


def sharing_inputs(partition: Partition, layers: Sequence[str]) -> Partition:
    """The same, but every block reads all inputs of the chains in which one of these layers reads inputs.

    The blocks are then independent given the inputs: weights that read them are all kept, and a block has its own
    neurons and outputs still.

    >>> from torch import nn
    >>> from crystallite.graph.chains import find_chains
    >>> chains = find_chains(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    >>> shared = sharing_inputs(random_partition(chains, 2), ["0"])
    >>> int(shared.mask("0").sum()), int(shared.mask("2").sum())
    (128, 32)
    """
    copies = []
    before = partition.copies or ({},) * len(partition.chains)
    for chain, labels, own in zip(partition.chains, partition.labels, before, strict=True):
        groups = {chain.reads[name] for name in layers if name in chain.layers} - {*chain.writes.values()}
        every = np.arange(partition.blocks)[:, None]
        copies.append({**own, **{group: labels[group] != every for group in sorted(groups)}})
    if missing := [name for name in layers if not any(name in chain.layers for chain in partition.chains)]:
        raise InvalidOption(f"shared_inputs: {missing[0]} is not separated; the chains have {partition.layers}")
    return replace(partition, copies=tuple(copies) if any(copies) else ())


def joint_components(chain: Chain, weights: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Component of every neuron of a chain under the nonzero weights of its layers, by group; −1 is dormant.

    Numbered without gaps. One pass over each matrix.

    >>> from torch import nn
    >>> from crystallite.graph.chains import find_chains
    >>> chain = find_chains(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))[0]
    >>> {k: v.tolist() for k, v in joint_components(chain, {"0": np.eye(2), "2": np.array([[0.0, 1.0]])}).items()}
    {'in': [0, 1], 'hidden 1': [0, 1], 'out': [1]}
    """
    start = dict(zip(chain.sizes, np.cumsum([0, *chain.sizes.values()]).tolist(), strict=False))
    total = sum(chain.sizes.values())
    first, second = [np.zeros(0, np.intp)], [np.zeros(0, np.intp)]
    for name in chain.layers:
        outputs, inputs = start[chain.writes[name]], start[chain.reads[name]]
        met = edges(torch.as_tensor(weights[name]), chain.written(name), chain.read(name))
        for rows, cols in decompose(met, name=name).blocks:  # a star joins what a block joins
            first.append(np.full(len(rows) + len(cols), inputs + cols[0]))
            second.append(np.concatenate([inputs + cols, outputs + rows]))
    ends = np.concatenate(first), np.concatenate(second)
    _, found = connected_components(coo_array((np.ones(len(ends[0]), bool), ends), shape=(total, total)), False)
    touched = np.unique(ends[1])
    label = np.full(total, -1)
    label[touched] = np.unique(found[touched], return_inverse=True)[1]
    return dict(zip(chain.sizes, np.split(label, list(start.values())[1:]), strict=True))
