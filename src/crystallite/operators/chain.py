"""`BlockChain`: consecutive linear layers that separate end to end, as independent subnetworks side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.errors import InvalidMatrix
from crystallite.structure.levels import chain_labels

__all__ = ["ELEMENTWISE", "BlockChain", "SubnetworkGroup"]

# What may stand between two layers without mixing neurons.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    nn.LogSigmoid, nn.Threshold, nn.Identity, nn.Dropout,
)  # fmt: skip


class BlockChain(nn.Module):
    """Linear layers with elementwise functions between them, as k subnetworks that share no neuron.

    The hidden permutations of the layers are folded into the stored weights: inputs are gathered once, outputs once,
    and nothing moves in between. Subnetworks of equal sizes run as one batched product per layer.

    >>> _ = torch.manual_seed(0)
    >>> layers = [nn.Linear(4, 4), nn.Linear(4, 2)]
    >>> with torch.no_grad():
    ...     layers[0].weight[:2, 2:] = layers[0].weight[2:, :2] = 0
    ...     layers[1].weight[0, 2:] = layers[1].weight[1, :2] = 0
    >>> chain = BlockChain.from_dense(layers, [nn.ReLU()])
    >>> chain
    BlockChain(4 → 4 → 2, subnetworks=2, 12 of 24 multiply-adds)
    >>> len(chain.subnetworks())
    2
    """

    inputs: Tensor  # input position of each column of the first layer's blocks, subnetwork after subnetwork
    outputs: Tensor  # place of each output among what the subnetworks emit; those of no subnetwork come last
    idle_bias: Tensor  # what the outputs of no subnetwork emit

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Iterable[nn.Module],
        activations: Iterable[nn.Module],
        inputs: Tensor,
        outputs: Tensor,
        idle_bias: Tensor,
    ) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.groups = nn.ModuleList(groups)
        self.activations = nn.ModuleList(activations)
        self.register_buffer("inputs", inputs)
        self.register_buffer("outputs", outputs)
        self.idle_bias = nn.Parameter(idle_bias)

    @classmethod
    def from_dense(cls, layers: Sequence[nn.Linear], activations: Sequence[nn.Module]) -> BlockChain:
        """Cut a chain of layers along the components of its nonzero weights, neurons shared between layers."""
        for i, (before, after) in enumerate(pairwise(layers)):
            if before.out_features != after.in_features:
                raise InvalidMatrix(f"layer {i + 1}: expected {before.out_features} inputs, got {after.in_features}")
        if len(activations) != len(layers) - 1:
            raise InvalidMatrix(
                f"expected {len(layers) - 1} activations between {len(layers)} layers, got {len(activations)}"
            )
        labels = chain_labels([layer.weight.detach() for layer in layers])
        names = np.unique(np.concatenate(labels))
        members = [[np.flatnonzero(label == name) for label in labels] for name in names[names >= 0]]
        members = [m for m in members if len(m[-1])]  # a subnetwork without an output computes nothing
        members.sort(key=lambda m: [len(part) for part in m], reverse=True)
        groups = [
            SubnetworkGroup.cut(layers, list(equal))
            for _shape, equal in groupby(members, key=lambda m: [len(p) for p in m])
        ]
        placed = _joined([m[-1] for m in members])
        idle = np.setdiff1d(np.arange(layers[-1].out_features), placed)
        order = torch.from_numpy(np.argsort(np.concatenate([placed, idle]), kind="stable"))
        last = layers[-1]
        idle_bias = (
            last.weight.new_zeros(len(idle)) if last.bias is None else last.bias.detach()[torch.from_numpy(idle)]
        )
        inputs = torch.from_numpy(_joined([m[0] for m in members]))
        sizes = [layers[0].in_features, *(layer.out_features for layer in layers)]
        device = last.weight.device
        return cls(sizes, groups, activations, inputs.to(device), order.to(device), idle_bias.clone())

    @property
    def in_features(self) -> int:
        return self.sizes[0]

    @property
    def out_features(self) -> int:
        return self.sizes[-1]

    @property
    def n_blocks(self) -> int:
        return sum(group.count for group in self.subnetwork_groups)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(w.numel() for group in self.subnetwork_groups for w in group.weights)

    @property
    def dense_macs(self) -> int:
        return sum(a * b for a, b in pairwise(self.sizes))

    @property
    def subnetwork_groups(self) -> list[SubnetworkGroup]:
        return [group for group in self.groups if isinstance(group, SubnetworkGroup)]

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise InvalidMatrix(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        flat = x.reshape(-1, self.in_features).index_select(1, self.inputs)
        parts, start = [], 0
        for group in self.subnetwork_groups:
            stop = start + group.count * group.in_features
            parts.append(group(flat[:, start:stop], self.activations))
            start = stop
        if len(self.idle_bias) or not parts:
            parts.append(self.idle_bias.expand(flat.shape[0], -1))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return joined.index_select(1, self.outputs).view(*x.shape[:-1], self.out_features)

    def subnetworks(self) -> list[tuple[nn.Sequential, Tensor, Tensor]]:
        """Each subnetwork as a network of its own, with the inputs it reads and the outputs it writes.

        y[:, outputs] = subnetwork(x[:, inputs]) for each of them, and `idle_bias` elsewhere, is the whole chain.
        """
        found = []
        written = torch.argsort(self.outputs)
        row = column = 0
        for group in self.subnetwork_groups:
            for i in range(group.count):
                stages: list[nn.Module] = []
                for depth, (weight, bias) in enumerate(zip(group.weights, group.biases, strict=True)):
                    layer = nn.Linear(weight.shape[2], weight.shape[1], device=weight.device, dtype=weight.dtype)
                    with torch.no_grad():
                        layer.weight.copy_(weight[i])
                        layer.bias.copy_(bias[i, 0])
                    stages.append(layer)
                    if depth < len(self.activations):
                        stages.append(self.activations[depth])
                reads = self.inputs[column : column + group.in_features]
                writes = written[row : row + group.out_features]
                found.append((nn.Sequential(*stages), reads, writes))
                row, column = row + group.out_features, column + group.in_features
        return found

    def __repr__(self) -> str:
        sizes = " → ".join(map(str, self.sizes))
        return f"BlockChain({sizes}, subnetworks={self.n_blocks}, {self.macs} of {self.dense_macs} multiply-adds)"


class SubnetworkGroup(nn.Module):
    """Subnetworks of equal sizes, their weights stacked layer by layer."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)  # (subnetworks, outputs, inputs) for each layer
        self.biases = nn.ParameterList(biases)  # (subnetworks, 1, outputs)

    @classmethod
    def cut(cls, layers: Sequence[nn.Linear], members: list[list[np.ndarray]]) -> SubnetworkGroup:
        weights, biases = [], []
        for depth, layer in enumerate(layers):
            bias = layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
            parts = [(m[depth + 1], m[depth]) for m in members]
            weights.append(torch.stack([layer.weight.detach()[rows][:, cols] for rows, cols in parts]))
            biases.append(torch.stack([bias.detach()[rows][None] for rows, _ in parts]))
        return cls(weights, biases)

    @property
    def count(self) -> int:
        return len(self.weights[0])

    @property
    def in_features(self) -> int:
        return self.weights[0].shape[2]

    @property
    def out_features(self) -> int:
        return self.weights[len(self.weights) - 1].shape[1]

    def forward(self, x: Tensor, activations: nn.ModuleList) -> Tensor:
        """(batch, subnetworks · inputs) → (batch, subnetworks · outputs)."""
        state = x.view(x.shape[0], self.count, self.in_features).transpose(0, 1)  # (subnetworks, batch, inputs)
        for depth, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            state = torch.baddbmm(bias, state, weight.transpose(1, 2))
            if depth < len(activations):
                state = activations[depth](state)
        return state.transpose(0, 1).reshape(x.shape[0], self.count * self.out_features)


def _joined(indices: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(indices) if indices else np.zeros(0, np.intp)
