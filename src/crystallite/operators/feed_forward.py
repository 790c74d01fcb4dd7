"""`BlockFeedForward`: the d–cd–d pair of a transformer, plain or gated, rebuilt from blocks that share its neurons."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.runtime.engine import as_rows
from crystallite.structure.decompose import decompose
from crystallite.structure.levels import chain_labels

__all__ = ["FORMS", "BlockFeedForward", "FeedForward", "Stacks"]

FORMS = ("pair", "layers", "channels")
_Indices = TypeVar("_Indices", bound=tuple[np.ndarray, ...])
_Block = tuple[np.ndarray, np.ndarray]  # rows and columns
_Runs = list[list[_Block]]  # blocks in the order they are stored, consecutive ones of equal shape together


class FeedForward(NamedTuple):
    """The dense modules of y = second(activation(first(x))), or second(activation(gate(x)) · first(x))."""

    first: nn.Linear
    activation: nn.Module
    second: nn.Linear
    gate: nn.Linear | None


class BlockFeedForward(nn.Module):
    """A feed-forward pair with the interface of the pair, in the form that needs the fewest multiply-adds.

    - "pair": subnetworks from inputs through hidden neurons to outputs; the hidden order is folded into the weights.
    - "layers": each layer in its own blocks, with one shuffle R = Q₂P₁⁻¹ of the hidden neurons between them.
    - "channels": the hidden neurons in consecutive channels, W₁^q and W₂^q each in their own blocks, outputs summed
      (paper, section 4.4). Blocks of equal shape are one batched product, whichever channel they are in: the channels
      run in parallel.

    Of equals the one that moves less is taken, in this order. The activation must act on each neuron alone.

    >>> first, second = nn.Linear(4, 8), nn.Linear(8, 4)
    >>> with torch.no_grad():
    ...     first.weight[::2, 2:] = first.weight[1::2, :2] = second.weight[2:, ::2] = second.weight[:2, 1::2] = 0
    >>> block = BlockFeedForward.from_dense(first, nn.GELU(), second)
    >>> block
    BlockFeedForward(4 → 8 → 4, form="pair", blocks=2, 32 of 64 multiply-adds)
    >>> torch.equal(block.to_dense().second.weight, second.weight)
    True
    """

    inputs: Tensor  # input position of each column of the first layer's blocks
    hidden: Tensor  # hidden neuron of each row of the first layer's blocks
    shuffle: Tensor | None  # R: place of each column of the second layer's blocks among these rows; None: the same
    outputs: Tensor  # place of each output of each channel among the rows of the second layer's blocks

    def __init__(
        self,
        form: str,
        sizes: Sequence[int],
        n_channels: int,
        stacks: tuple[Stacks, Stacks | None, Stacks],
        tables: dict[str, Tensor],
        activation: nn.Module,
        bias: Tensor | None,
    ) -> None:
        super().__init__()
        self.form, self.n_channels = form, n_channels
        self.in_features, self.hidden_features, self.out_features = sizes
        self.first, self.gate, self.second = stacks
        for name in ("inputs", "hidden", "shuffle", "outputs"):
            self.register_buffer(name, tables.get(name))
        self.activation = activation
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_dense(
        cls, first: nn.Linear, activation: nn.Module, second: nn.Linear, gate: nn.Linear | None = None,
        channels: int | None = None, form: str | None = None,
    ) -> BlockFeedForward:  # fmt: skip
        """The pair cut along its nonzero weights; `gate` and `first` share the hidden neurons, and so their blocks.

        Args:
            first: d → cd.
            activation: Acts on each hidden neuron alone.
            second: cd → d.
            gate: The other layer of a gated pair.
            channels: Into how many the hidden neurons are split for the form "channels"; default: c = hidden / d.
            form: "pair", "layers" or "channels"; default: the one with the fewest multiply-adds.

        Raises:
            InvalidMatrix: Shapes do not fit.
            InvalidOption: No such form, or not so many channels.
        """
        _check(first, second, gate, channels, form)
        reads = first.weight.detach().abs()
        if gate is not None:
            reads = torch.maximum(reads, gate.weight.detach().abs())
        writes = second.weight.detach()
        hidden = np.arange(first.out_features)
        count = channels or max(1, round(len(hidden) / max(first.in_features, 1)))
        cuts = {
            "pair": lambda: _pair(reads, writes),
            "layers": lambda: _layers(reads, writes, [hidden]),
            "channels": lambda: _layers(reads, writes, np.array_split(hidden, count)),
        }
        forms = {name: cuts[name]() for name in (FORMS if form is None else (form,))}
        readers = 1 if gate is None else 2
        best = min(forms, key=lambda name: readers * _macs(forms[name][0]) + _macs(forms[name][1]))
        order, read = _order(forms[best][0], 0), _order(forms[best][1], 1)
        place = torch.zeros(len(hidden), dtype=torch.int64)
        place[order] = torch.arange(len(order))
        tables = {"inputs": _order(forms[best][0], 1), "hidden": order, "shuffle": place[read]}
        tables["outputs"] = torch.argsort(_order(forms[best][1], 0))
        if best == "pair":
            del tables["shuffle"]  # the hidden order is folded into the weights
        stacks = (
            Stacks.cut(first.weight, first.bias, forms[best][0]),
            None if gate is None else Stacks.cut(gate.weight, gate.bias, forms[best][0]),
            Stacks.cut(second.weight, None, forms[best][1]),  # the bias is added once, to the sum of the channels
        )
        bias = None if second.bias is None else second.bias.detach().clone()
        sizes = first.in_features, len(hidden), second.out_features
        on_device = {name: table.to(first.weight.device) for name, table in tables.items()}
        return cls(best, sizes, count if best == "channels" else 1, stacks, on_device, activation, bias)

    def part(self, blocks: Sequence[int]) -> BlockFeedForward:
        """Some subnetworks of the form "pair", by number, as a pair of their own without the bias of outputs.

        It reads and writes their features one after the other, in this order. Others are not read.
        """
        both = [[block for stack in layer.weights for block in stack] for layer in (self.first, self.second)]
        runs = [list(run) for _, run in groupby(blocks, key=lambda b: (both[0][b].shape, both[1][b].shape))]
        first, gate, second = (
            None if layer is None else layer.chosen(runs) for layer in (self.first, self.gate, self.second)
        )
        assert first is not None
        assert second is not None
        sizes = first.columns, first.rows, second.rows
        tables = {name: torch.arange(n) for name, n in zip(("inputs", "hidden", "outputs"), sizes, strict=True)}
        return BlockFeedForward("pair", sizes, 1, (first, gate, second), tables, copy.deepcopy(self.activation), None)

    def describe(self) -> dict[str, Any]:
        """Sizes and the activation, without weights and tables."""
        parts = {"first": self.first, "gate": self.gate, "second": self.second}
        return {
            "form": self.form,
            "sizes": [self.in_features, self.hidden_features, self.out_features],
            "channels": self.n_channels,
            **{name: None if part is None else part.describe() for name, part in parts.items()},
            "shuffled": self.shuffle is not None,
            "activation": self.activation,
            "bias": self.bias is not None,
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BlockFeedForward:
        """A pair of these sizes, not filled."""
        _, hidden, outputs = sizes = description["sizes"]
        channels = description["channels"]
        if not (isinstance(channels, int) and 1 <= channels <= max(hidden, 1)):
            raise InvalidOption(f"channels must be an integer from 1 to {hidden}, the hidden neurons, got {channels!r}")
        parts = (description[name] for name in ("first", "gate", "second"))
        first, gate, second = (None if part is None else Stacks.from_description(part) for part in parts)
        if first is None or second is None:
            raise InvalidOption("a feed-forward pair has a first and a second layer")
        if second.rows != channels * outputs:
            raise InvalidOption(f"second: expected {channels * outputs} rows, got {second.rows}")
        lengths = {"inputs": first.columns, "hidden": first.rows, "outputs": channels * outputs}
        lengths |= {"shuffle": second.columns} if description["shuffled"] else {}
        tables = {name: torch.empty(length, dtype=torch.int64) for name, length in lengths.items()}
        bias = torch.empty(outputs) if description["bias"] else None
        stacks = first, gate, second
        return cls(description["form"], sizes, channels, stacks, tables, description["activation"], bias)

    def index_limits(self) -> dict[str, int]:
        """What the entries of each index table must stay below."""
        limits = {"inputs": self.in_features, "hidden": self.hidden_features, "outputs": self.second.rows}
        return limits if self.shuffle is None else limits | {"shuffle": self.first.rows}

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(stack.numel() for part in self.modules() if isinstance(part, Stacks) for stack in part.weights)

    @property
    def dense_macs(self) -> int:
        readers = 1 if self.gate is None else 2
        return self.hidden_features * (readers * self.in_features + self.out_features)

    @property
    def n_blocks(self) -> int:
        """Subnetworks of a pair; otherwise the blocks of both layers in all channels."""
        if self.form == "pair":
            pair = zip(self.first.weights, self.second.weights, strict=True)
            return sum(len(reads) for reads, writes in pair if reads.numel() + writes.numel())
        return sum(len(stack) for both in (self.first, self.second) for stack in both.weights if stack.numel())

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise InvalidMatrix(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        pieces = self.first.split(as_rows(x).index_select(1, self.inputs))
        hidden: list[Tensor] = self.first(pieces)
        if self.gate is None:
            hidden = [self.activation(u) for u in hidden]
        else:
            hidden = [self.activation(g) * u for g, u in zip(self.gate(pieces), hidden, strict=True)]
        if self.shuffle is not None:
            hidden = self.second.split(_joined(hidden).index_select(1, self.shuffle))
        y = _joined(self.second(hidden)).index_select(1, self.outputs)
        if self.n_channels > 1:
            y = y.unflatten(1, (self.n_channels, self.out_features)).sum(1)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def to_dense(self) -> FeedForward:
        """The modules this was cut from, bit for bit, with zeros between the blocks: the arguments of `from_dense`."""
        size = (self.in_features, self.hidden_features)
        first = _dense(self.first, self.hidden, self.inputs, *size)
        gate = None if self.gate is None else _dense(self.gate, self.hidden, self.inputs, *size)
        read = self.hidden if self.shuffle is None else self.hidden[self.shuffle]
        rows = torch.argsort(self.outputs) % max(self.out_features, 1)
        second = _dense(self.second, rows, read, self.hidden_features, self.out_features, self.bias)
        return FeedForward(first, self.activation, second, gate)

    def __repr__(self) -> str:
        sizes = f"{self.in_features} → {self.hidden_features} → {self.out_features}"
        cost = f"{self.macs} of {self.dense_macs} multiply-adds"
        return f'BlockFeedForward({sizes}, form="{self.form}", blocks={self.n_blocks}, {cost})'


class Stacks(nn.Module):
    """The blocks of one matrix, those of a run stacked; what they read and write comes as one stack for each run."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)  # (blocks, rows, columns)
        self.biases = nn.ParameterList(biases)  # (blocks, 1, rows); empty without a bias

    @classmethod
    def cut(cls, weight: Tensor, bias: Tensor | None, runs: _Runs) -> Stacks:
        height = max(len(weight), 1)  # rows count on from channel to channel
        weights = [torch.stack([weight.detach()[rows % height][:, cols] for rows, cols in run]) for run in runs]
        biases = [] if bias is None else [torch.stack([bias.detach()[rows][None] for rows, _ in run]) for run in runs]
        return cls(weights, biases)

    def chosen(self, runs: Sequence[Sequence[int]]) -> Stacks:
        """Copies of some blocks, by number, a stack for each run."""
        weights, biases = ([block for stack in stacks for block in stack] for stacks in (self.weights, self.biases))
        made = [
            [torch.stack([blocks[b].detach() for b in run]) for run in runs] for blocks in (weights, biases) if blocks
        ]
        return Stacks(made[0], made[1] if len(made) > 1 else [])

    def bias(self) -> Tensor | None:
        """(rows of all blocks,)."""
        return torch.cat([bias.detach().flatten() for bias in self.biases]) if len(self.biases) else None

    def describe(self) -> dict[str, Any]:
        return {"stacks": [list(stack.shape) for stack in self.weights], "bias": len(self.biases) > 0}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Stacks:
        shapes = description["stacks"]
        biases = [torch.empty(blocks, 1, rows) for blocks, rows, _ in shapes] if description["bias"] else []
        return cls([torch.empty(*shape) for shape in shapes], biases)

    @property
    def rows(self) -> int:
        """Rows of all blocks."""
        return sum(len(stack) * stack.shape[1] for stack in self.weights)

    @property
    def columns(self) -> int:
        """Columns of all blocks."""
        return sum(len(stack) * stack.shape[2] for stack in self.weights)

    def split(self, x: Tensor) -> list[Tensor]:
        """(batch, columns of all blocks) → (blocks, batch, columns) for each run."""
        widths = [len(stack) * stack.shape[2] for stack in self.weights]
        pieces = zip(x.split(widths, 1), self.weights, strict=True)
        return [piece.unflatten(1, (len(stack), stack.shape[2])).transpose(0, 1) for piece, stack in pieces]

    def forward(self, pieces: list[Tensor]) -> list[Tensor]:
        biases = self.biases if len(self.biases) else [None] * len(pieces)
        return [_product(*parts) for parts in zip(pieces, self.weights, biases, strict=True)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(blocks, batch, columns) × (blocks, rows, columns) + (blocks, 1, rows) → (blocks, batch, rows)."""
    blocks, rows, _ = weight.shape
    if not weight.numel():  # dormant rows
        return x.new_zeros(blocks, x.shape[1], rows) + (0 if bias is None else bias)  # never the bias itself
    if blocks == 1:
        return F.linear(x[0], weight[0], None if bias is None else bias[0, 0])[None]
    turned = weight.transpose(1, 2)
    return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias, x, turned)


def _joined(pieces: list[Tensor]) -> Tensor:
    """(blocks, batch, rows) for each run → (batch, rows of all blocks)."""
    flat = [piece.transpose(0, 1).flatten(1) for piece in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


def _dense(
    stacks: Stacks, rows: Tensor, cols: Tensor, in_features: int, out_features: int, bias: Tensor | None = None
) -> nn.Linear:
    """One layer from blocks, their rows and their columns, with the bias given or that of the blocks."""
    like, has_bias = stacks.weights[0], bias is not None or len(stacks.biases) > 0
    dense = nn.Linear(in_features, out_features, has_bias, "meta", like.dtype).to_empty(device=like.device)
    with torch.no_grad():
        dense.weight.zero_()
        if bias is not None:
            dense.bias.copy_(bias)
        row = column = 0
        for run, stack in enumerate(stacks.weights):
            for number, block in enumerate(stack):
                into, read = rows[row : row + block.shape[0]], cols[column : column + block.shape[1]]
                dense.weight[into[:, None], read[None, :]] = block
                if len(stacks.biases):
                    dense.bias[into] = stacks.biases[run][number, 0]
                row, column = row + block.shape[0], column + block.shape[1]
    return dense


def _pair(reads: Tensor, writes: Tensor) -> tuple[_Runs, _Runs]:
    """Both layers cut along the components of the whole, so that the second reads what the first emits, in order."""
    nothing = np.zeros(0, np.intp)
    labels = chain_labels([reads, writes])
    count = max(int(label.max(initial=-1)) for label in labels) + 1
    inputs, hidden, outputs = ([np.flatnonzero(label == k) for k in range(-1, count)] for label in labels)
    # neurons of no component, the first of each list, emit their bias and read nothing
    parts = [(nothing, hidden[0], nothing), (nothing, nothing, outputs[0])]
    parts += zip(inputs[1:], hidden[1:], outputs[1:], strict=True)
    runs = _in_runs([part for part in parts if len(part[1]) + len(part[2])])
    return [[(h, i) for i, h, _ in run] for run in runs], [[(o, h) for _, h, o in run] for run in runs]


def _layers(reads: Tensor, writes: Tensor, channels: list[np.ndarray]) -> tuple[_Runs, _Runs]:
    """Each layer of each channel of hidden neurons in its own blocks; outputs of channel q count on from q·outputs."""
    first, second = list[_Block](), list[_Block]()
    for q, hidden in enumerate(channels):
        first += [(hidden[rows], cols) for rows, cols in _blocks(reads[hidden], "first.weight")]
        found = _blocks(writes[:, hidden], "second.weight")
        second += [(rows + q * len(writes), hidden[cols]) for rows, cols in found]
    return _in_runs(first), _in_runs(second)


def _blocks(matrix: Tensor, name: str) -> list[_Block]:
    """The blocks of a matrix, and its dormant rows as one that reads nothing."""
    structure = decompose(matrix, name=name)
    dormant = [(structure.dormant_rows, np.zeros(0, np.intp))] if len(structure.dormant_rows) else []
    return structure.blocks + dormant


def _in_runs(blocks: list[_Indices]) -> list[list[_Indices]]:
    def sizes(block: _Indices) -> tuple[int, ...]:
        return tuple(map(len, block))

    return [list(run) for _, run in groupby(sorted(blocks, key=sizes, reverse=True), key=sizes)]


def _order(runs: _Runs, side: int) -> Tensor:
    """Rows (side 0) or columns (1), block after block."""
    return torch.from_numpy(np.concatenate([block[side] for run in runs for block in run]))


def _macs(runs: _Runs) -> int:
    return sum(len(rows) * len(cols) for run in runs for rows, cols in run)


def _check(first: nn.Linear, second: nn.Linear, gate: nn.Linear | None, channels: int | None, form: str | None) -> None:
    if form not in (*FORMS, None):
        raise InvalidOption(f"form must be one of {', '.join(FORMS)}, or None for the cheapest, got {form!r}")
    if second.in_features != first.out_features:
        raise InvalidMatrix(f"second: expected {first.out_features} inputs, got {second.in_features}")
    if gate is not None and gate.weight.shape != first.weight.shape:
        raise InvalidMatrix(f"gate: expected shape {tuple(first.weight.shape)}, got {tuple(gate.weight.shape)}")
    most = first.out_features
    if channels is not None and not (isinstance(channels, int) and 1 <= channels <= most):
        raise InvalidOption(f"channels must be an integer from 1 to {most}, the hidden neurons, got {channels!r}")
