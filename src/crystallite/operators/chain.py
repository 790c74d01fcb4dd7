"""`BlockChain`: consecutive linear layers as their blocks, with nothing moved between them that need not be."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.chain_layer import ChainLayer
from crystallite.operators.runtime.engine import (
    Block,
    Plan,
    array,
    as_rows,
    can_plan,
    can_run_compiled,
    in_order,
    joined,
    run,
)  # fmt: skip
from crystallite.structure.bipartite import BipartiteStructure
from crystallite.structure.decompose import decompose, expand_columns

__all__ = ["ELEMENTWISE", "BlockChain"]

# What may stand between two layers without mixing neurons.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    nn.LogSigmoid, nn.Threshold, nn.Identity, nn.Dropout,
)  # fmt: skip
_COMPILED = {nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid"}  # and GELU


class BlockChain(nn.Module):
    """Linear layers with elementwise functions between them, each layer as its blocks.

    The order of hidden neurons is free, so it is chosen: where the partitions of consecutive layers agree, or that of
    the first is finer, R = Q₂P₁⁻¹ is folded into the stored weights and nothing moves; elsewhere one shuffle is left.
    Inputs are gathered once, outputs once.

    >>> _ = torch.manual_seed(0)
    >>> layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    >>> with torch.no_grad():
    ...     layers[0].weight[:2, 2:] = layers[0].weight[2:, :2] = 0
    ...     layers[1].weight[0, 2:] = layers[1].weight[1, :2] = 0
    >>> chain = BlockChain.from_dense(layers, [nn.ReLU()])
    >>> chain
    BlockChain(4 → 4 → 2, blocks=2 → 2, shuffles=0, subnetworks=2, 12 of 24 multiply-adds)
    >>> len(chain.subnetworks())
    2
    """

    empty: Tensor
    outputs: Tensor | None  # place of each output among the rows of the last layer; None: as they come

    def __init__(self, layers: Iterable[ChainLayer], activations: Iterable[nn.Module], outputs: Tensor | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        made = list(self._layers())
        self.sizes = (made[0].in_features, *(layer.out_features for layer in made))
        self.in_features, self.out_features = self.sizes[0], self.sizes[-1]
        self.activations = nn.ModuleList(activations)
        self.register_buffer("outputs", outputs)
        self.register_buffer("empty", made[0].empty, persistent=False)
        self._plan = Plan()

    @classmethod
    def from_dense(
        cls, layers: Sequence[nn.Linear], activations: Sequence[nn.Module], row_labels: np.ndarray | None = None
    ) -> BlockChain:
        """Cut each layer along the components of its nonzero weights, and choose the orders of the hidden neurons.

        row_labels: of the first layer. Rows of different labels are in different blocks, even if they read the same
        inputs: each block gathers a copy of what it reads.
        """
        for i, (before, after) in enumerate(pairwise(layers)):
            if before.out_features != after.in_features:
                raise InvalidMatrix(f"layer {i + 1}: expected {before.out_features} inputs, got {after.in_features}")
        if len(activations) != len(layers) - 1:
            raise InvalidMatrix(
                f"expected {len(layers) - 1} activations between {len(layers)} layers, got {len(activations)}"
            )
        for activation in activations:
            mixing = [m for m in activation.modules() if not isinstance(m, (*ELEMENTWISE, nn.Sequential))]
            if mixing:
                raise InvalidOption(f"expected functions of single neurons between layers, got {mixing[0]}")
        weights = [layer.weight.detach() for layer in layers]
        weights[0] = weights[0] if row_labels is None else expand_columns(weights[0], row_labels)
        arranged = _arranged([decompose(weight, name=f"layer {i}") for i, weight in enumerate(weights)])
        arranged[0] = [(rows, cols % layers[0].in_features) for rows, cols in arranged[0][0]], arranged[0][1]
        device = layers[0].weight.device
        made, place = [], np.arange(layers[0].in_features)  # line of each neuron in the state before the layer
        for layer, (blocks, dormant) in zip(layers, arranged, strict=True):
            rows = joined([*(rows for rows, _ in blocks), dormant])
            made.append(ChainLayer.cut(layer, blocks, rows, place[joined([cols for _, cols in blocks])]))
            place = np.argsort(rows, kind="stable")
        made[-1].neurons = None  # `outputs` says it
        outputs = None if in_order(place) else torch.from_numpy(place).to(device)
        return cls(made, copy.deepcopy(list(activations)), outputs)

    def _layers(self) -> Iterator[ChainLayer]:
        for layer in self.layers:
            assert isinstance(layer, ChainLayer)
            yield layer

    # what it is

    @property
    def n_blocks(self) -> int:
        """Blocks of all layers."""
        return sum(layer.n_blocks for layer in self._layers())

    @property
    def n_shuffles(self) -> int:
        """Gathers left between layers."""
        return sum(layer.columns is not None for layer in list(self._layers())[1:])

    @property
    def n_subnetworks(self) -> int:
        """Parts that share no neuron from the first layer to the last; they may read the same inputs."""
        return len(self.members())

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(layer.macs for layer in self._layers())

    @property
    def dense_macs(self) -> int:
        return sum(a * b for a, b in pairwise(self.sizes))

    def to_dense(self) -> list[nn.Linear]:
        """The layers with zeros between their blocks, bit for bit what they were cut from."""
        return [layer.to_dense(reads, rows) for layer, reads, rows in self._with_neurons()]

    def _with_neurons(self) -> Iterator[tuple[ChainLayer, Tensor, Tensor]]:
        """Each layer with the neuron that each column of its blocks reads, and the one that each of its rows is."""
        layers = list(self._layers())
        state = torch.arange(self.in_features, device=self.empty.device)
        for layer in layers:
            reads = state[: layer.reads] if layer.columns is None else state[layer.columns]
            rows = layer.neurons if layer is not layers[-1] else _inverse(self.outputs)
            state = torch.arange(layer.out_features, device=reads.device) if rows is None else rows
            yield layer, reads, state

    # what it does

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise InvalidMatrix(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        if can_run_compiled(x, self, halves=True):
            plan = self._plan if self._plan.valid() else self._planned(x)
            if plan.takes(x):
                return run(plan, x)
        state = as_rows(x).t()
        for i, layer in enumerate(self._layers()):
            state = layer(state)
            if i < len(self.activations):
                state = self.activations[i](state)
        y = state.t() if self.outputs is None else state.t().index_select(1, self.outputs)
        return y.reshape(*x.shape[:-1], self.out_features)

    def _planned(self, x: Tensor) -> Plan:
        self._plan = Plan()
        names = [*(_compiled_name(activation) for activation in self.activations), "none"]
        if can_plan(self, x) and None not in names:
            stages = [layer.stage(name) for layer, name in zip(self._layers(), names, strict=True) if name]
            ends = array(self.outputs), array(None, self.empty), self.in_features, self.out_features
            self._plan = Plan(self, stages, *ends)
        return self._plan

    def subnetworks(self, only: Sequence[int] | None = None) -> list[tuple[nn.Sequential, Tensor, Tensor]]:
        """Each subnetwork as a network of its own, with the inputs it reads and the outputs it writes.

        y[:, outputs] = subnetwork(x[:, inputs]) for each of them, and `idle_outputs` elsewhere, is the whole chain.
        With `only`, those of these numbers, in this order; the weights of others are not read.
        """
        parts = [(layer, reads.cpu(), rows.cpu()) for layer, reads, rows in self._with_neurons()]
        found, networks = [], self.members()
        for members in networks if only is None else [networks[number] for number in only]:
            stages: list[nn.Module] = []
            for depth, (layer, reads, rows) in enumerate(parts):
                stages.append(layer.part(reads, rows, members[depth], members[depth + 1]))
                stages += list(self.activations[depth : depth + 1])
            found.append((nn.Sequential(*stages), torch.from_numpy(members[0]), torch.from_numpy(members[-1])))
        return found

    def subnetwork_macs(self) -> list[int]:
        """Multiply-accumulates of each subnetwork per input vector."""
        sizes = [[w.shape[1] * w.shape[2] for w in layer.weights for _ in range(len(w))] for layer in self._layers()]
        networks = self.blocks_by_subnetwork()[: self.n_subnetworks]
        return [sum(sizes[layer][block] for layer, block in members) for members in networks]

    def idle_outputs(self) -> tuple[Tensor, Tensor]:
        """The outputs of no subnetwork, and what they emit."""
        layer, _, rows = list(self._with_neurons())[-1]
        idle = rows[layer.writes :]
        return idle, layer.empty.new_zeros(len(idle)) if layer.bias is None else layer.bias.detach()[layer.writes :]

    def blocks_by_subnetwork(self) -> list[list[tuple[int, int]]]:
        """(layer, block) of each subnetwork, and of parts that no output depends on after them."""
        _, component = self._components()
        numbers = [(i, block) for i, layer in enumerate(self._layers()) for block in range(layer.n_blocks)]
        found: dict[int, list[tuple[int, int]]] = {}
        for number, own in zip(numbers, component.tolist(), strict=True):
            found.setdefault(own, []).append(number)
        with_output = [members for members in found.values() if members[-1][0] == len(self.layers) - 1]
        ordered = sorted(with_output, key=self._first_output)
        return [*ordered, *(members for members in found.values() if members not in with_output)]

    def _first_output(self, members: list[tuple[int, int]]) -> int:
        last, _, rows = list(self._with_neurons())[-1]
        written = rows[: last.writes].cpu().numpy()
        own = np.isin(last.blocks_of_lines()[0], [block for layer, block in members if layer == len(self.layers) - 1])
        return int(written[own].min())

    def members(self) -> list[list[np.ndarray]]:
        """For each subnetwork its neurons before the first layer, after it, …; parts without an output are none."""
        labels, component = self._components()
        first, first_reads, _ = next(self._with_neurons())
        names = np.append(component, -1)  # of block −1 too
        neurons = [np.maximum(names[after[0]], names[before[1]]) for before, after in pairwise(labels)]
        neurons.append(names[labels[-1][1]])
        reader = component[first.blocks_of_lines()[1]]  # of each column of the first layer: inputs may have several
        inputs = first_reads.cpu().numpy()
        found = [
            [np.unique(inputs[reader == c]), *(np.flatnonzero(layer == c) for layer in neurons)]
            for c in np.unique(neurons[-1]) if c >= 0
        ]  # fmt: skip
        return sorted(found, key=lambda m: int(m[-1][0]))

    def _components(self) -> tuple[list[list[np.ndarray]], np.ndarray]:
        """For each layer the block of each neuron before and after it, and the subnetwork of each block.

        Blocks of all layers count through.
        """
        labels: list[list[np.ndarray]] = [
            [np.full(size, -1) for size in (layer.in_features, layer.out_features)] for layer in self._layers()
        ]
        edges, used = [], 0
        for i, (layer, reads, rows) in enumerate(self._with_neurons()):
            row_block, column_block = layer.blocks_of_lines()
            labels[i][0][reads.cpu().numpy()] = column_block + used
            labels[i][1][rows.cpu().numpy()[: layer.writes]] = row_block + used
            used += layer.n_blocks
            if i:
                met = np.stack([labels[i - 1][1], labels[i][0]])
                edges.append(met[:, (met >= 0).all(0)])
        pairs = np.concatenate(edges, 1) if edges else np.zeros((2, 0), np.int64)
        graph = coo_array((np.ones(pairs.shape[1], bool), (pairs[0], pairs[1])), shape=(used, used))
        return labels, connected_components(graph, directed=False)[1]

    # how it is stored

    def describe(self) -> dict[str, Any]:
        """All that is needed to rebuild the chain around its tensors, as plain values and the activations."""
        return {
            "layers": [layer.describe() for layer in self._layers()],
            "activations": list(self.activations),
            "outputs": self.outputs is not None,
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BlockChain:
        """A chain of that shape whose tensors are not filled."""
        layers = [ChainLayer.from_description(layer) for layer in description["layers"]]
        for before, after in pairwise(layers):
            if before.out_features != after.in_features:
                raise InvalidMatrix(f"expected a layer of {before.out_features} inputs, got {after.in_features}")
        outputs = torch.empty(layers[-1].out_features, dtype=torch.long) if description["outputs"] else None
        return cls(layers, description["activations"], outputs)

    def index_limits(self) -> dict[str, int]:
        """What the values of each index table must stay below."""
        limits = {} if self.outputs is None else {"outputs": self.out_features}
        for i, layer in enumerate(self._layers()):
            limits |= {f"layers.{i}.{name}": limit for name, limit in layer.index_limits().items()}
        return limits

    def __repr__(self) -> str:
        sizes = " → ".join(map(str, self.sizes))
        blocks = " → ".join(str(layer.n_blocks) for layer in self._layers())
        return (
            f"BlockChain({sizes}, blocks={blocks}, shuffles={self.n_shuffles}, subnetworks={self.n_subnetworks}, "
            f"{self.macs} of {self.dense_macs} multiply-adds)"
        )


def _compiled_name(activation: nn.Module) -> str | None:
    """What the kernels call the function that follows a layer; None: they do not know it."""
    parts = activation if isinstance(activation, nn.Sequential) else [activation]
    acting = [p for p in parts if not isinstance(p, nn.Identity) and (p.training or not isinstance(p, nn.Dropout))]
    if not acting:
        return "none"
    if len(acting) > 1:
        return None
    if type(acting[0]) is nn.GELU:
        return "gelu_tanh" if acting[0].approximate == "tanh" else "gelu"
    return _COMPILED.get(type(acting[0]))


def _arranged(structures: Sequence[BipartiteStructure]) -> list[tuple[list[Block], np.ndarray]]:
    """For each layer its blocks in the order they are stored, (rows, columns), and its dormant rows.

    From the last layer back: the neurons before a layer are sorted by the block that reads them, then by the block that
    writes them, and blocks are stored in the order of their first row. So a layer reads in order, and what it reads is
    written in order wherever the blocks that write are not split between those that read.
    """
    last = structures[-1]
    blocks = sorted(last.blocks, key=lambda b: b[0][0])
    if not in_order(joined([rows for rows, _ in blocks])):
        blocks.sort(key=_by_shape)
    arranged = [(blocks, last.dormant_rows)]
    for before in reversed(structures[:-1]):
        reader = np.full(before.shape[0], len(blocks))
        for rank, (_, cols) in enumerate(blocks):
            reader[cols] = rank
        rank_of = np.argsort(sorted(range(before.n_blocks), key=lambda b: _by_shape(before.blocks[b])))
        writer = np.append(rank_of, before.n_blocks)[before.row_block]  # dormant ones, of block −1, last
        place = np.argsort(np.lexsort((writer, reader)))
        arranged[0] = ([(rows, _sorted_by(place, cols)) for rows, cols in blocks], arranged[0][1])
        blocks = [(_sorted_by(place, rows), cols) for rows, cols in before.blocks]
        blocks.sort(key=lambda b: place[b[0][0]])
        arranged.insert(0, (blocks, _sorted_by(place, before.dormant_rows)))
    return arranged


def _by_shape(block: Block) -> tuple[int, int]:
    return -len(block[0]), -len(block[1])


def _sorted_by(place: np.ndarray, neurons: np.ndarray) -> np.ndarray:
    return neurons[np.argsort(place[neurons], kind="stable")]


def _inverse(table: Tensor | None) -> Tensor | None:
    return None if table is None else torch.argsort(table)
