"""`BlockFeedForward`: the d–4d–d pair of a transformer, plain or gated, rebuilt from blocks that share its neurons."""

from __future__ import annotations

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

__all__ = ["BlockFeedForward", "FeedForward"]

_CHANNELS = 4  # d–4d–d is four channels of width d
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
      (paper, section 4.4).

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

    def __init__(
        self, form: str, sizes: Sequence[int], channels: list[_Channel], activation: nn.Module, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.form = form
        self.in_features, self.hidden_features, self.out_features = sizes
        self.channels: Sequence[_Channel] = nn.ModuleList(channels)  # type: ignore[assignment]  # it holds nothing else
        self.activation = activation
        self.bias = None if bias is None else nn.Parameter(bias)

    @classmethod
    def from_dense(
        cls, first: nn.Linear, activation: nn.Module, second: nn.Linear, gate: nn.Linear | None = None,
        channels: int | None = None,
    ) -> BlockFeedForward:  # fmt: skip
        """Cut a pair along its nonzero weights; `gate` and `first` share the hidden neurons, and so their blocks.

        channels: into how many the hidden neurons are split for the form "channels" (default 4).
        """
        _check(first, second, gate, channels)
        reads = first.weight.detach().abs()
        if gate is not None:
            reads = torch.maximum(reads, gate.weight.detach().abs())
        writes = second.weight.detach()
        hidden = np.arange(first.out_features)
        parts = np.array_split(hidden, channels or min(_CHANNELS, len(hidden)))
        forms = {
            "pair": [_pair(reads, writes)],
            "layers": [_layers(reads, writes, hidden)],
            "channels": [_layers(reads, writes, part) for part in parts],
        }
        readers = 1 if gate is None else 2
        form = min(forms, key=lambda name: sum(readers * _macs(r) + _macs(w) for r, w in forms[name]))
        cut = [_Channel.cut(first, gate, second, *runs, folded=form == "pair") for runs in forms[form]]
        bias = None if second.bias is None else second.bias.detach().clone()
        return cls(form, (first.in_features, len(hidden), second.out_features), cut, activation, bias)

    def describe(self) -> dict[str, Any]:
        """Sizes and the activation, without weights and tables."""
        return {
            "form": self.form,
            "sizes": [self.in_features, self.hidden_features, self.out_features],
            "channels": [channel.describe() for channel in self.channels],
            "activation": self.activation,
            "bias": self.bias is not None,
        }

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> BlockFeedForward:
        """A pair of these sizes, not filled."""
        _, _, outputs = sizes = description["sizes"]
        channels = [_Channel.from_description(channel, outputs) for channel in description["channels"]]
        bias = torch.empty(outputs) if description["bias"] else None
        return cls(description["form"], sizes, channels, description["activation"], bias)

    def index_limits(self) -> dict[str, int]:
        """What the entries of each index table must stay below."""
        limits = [channel.limits(self.in_features, self.hidden_features) for channel in self.channels]
        return {f"channels.{i}.{name}": limit for i, each in enumerate(limits) for name, limit in each.items()}

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(stack.numel() for part in self.modules() if isinstance(part, _Stacks) for stack in part.weights)

    @property
    def dense_macs(self) -> int:
        readers = 1 if self.channels[0].gate is None else 2
        return self.hidden_features * (readers * self.in_features + self.out_features)

    @property
    def n_blocks(self) -> int:
        """Subnetworks of a pair; otherwise the blocks of both layers in all channels."""
        if self.form == "pair":
            pair = zip(self.channels[0].first.weights, self.channels[0].second.weights, strict=True)
            return sum(len(reads) for reads, writes in pair if reads.numel() + writes.numel())
        both = (stacks for channel in self.channels for stacks in (channel.first, channel.second))
        return sum(len(stack) for stacks in both for stack in stacks.weights if stack.numel())

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise InvalidMatrix(f"expected {self.in_features} input features, got shape {tuple(x.shape)}")
        flat = as_rows(x)
        parts = [channel(flat, self.activation) for channel in self.channels]
        y: Tensor = sum(parts[1:], parts[0])
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def to_dense(self) -> FeedForward:
        """The modules this was cut from, bit for bit, with zeros between the blocks: the arguments of `from_dense`."""
        size = (self.in_features, self.hidden_features)
        first = _dense([(c.first, c.hidden, c.inputs) for c in self.channels], *size)
        gates = [(c.gate, c.hidden, c.inputs) for c in self.channels if c.gate is not None]
        seconds = [(c.second, torch.argsort(c.outputs), c.read) for c in self.channels]
        second = _dense(seconds, self.hidden_features, self.out_features, self.bias)
        return FeedForward(first, self.activation, second, _dense(gates, *size) if gates else None)

    def __repr__(self) -> str:
        sizes = f"{self.in_features} → {self.hidden_features} → {self.out_features}"
        cost = f"{self.macs} of {self.dense_macs} multiply-adds"
        return f'BlockFeedForward({sizes}, form="{self.form}", blocks={self.n_blocks}, {cost})'


class _Channel(nn.Module):
    """Some hidden neurons with all that they read and write: gather → blocks → σ → shuffle → blocks → gather."""

    inputs: Tensor  # input position of each column of the first layer's blocks
    hidden: Tensor  # hidden neuron of each row of the first layer's blocks
    shuffle: Tensor | None  # R: place of each column of the second layer's blocks among these rows; None: the same
    outputs: Tensor  # place of each output among the rows of the second layer's blocks

    def __init__(self, first: _Stacks, gate: _Stacks | None, second: _Stacks, tables: dict[str, Tensor]) -> None:
        super().__init__()
        self.first, self.gate, self.second = first, gate, second
        for name in ("inputs", "hidden", "shuffle", "outputs"):
            self.register_buffer(name, tables.get(name))

    @classmethod
    def cut(
        cls, first: nn.Linear, gate: nn.Linear | None, second: nn.Linear, reads: _Runs, writes: _Runs, folded: bool
    ) -> _Channel:
        hidden, read = _order(reads, 0), _order(writes, 1)
        place = torch.zeros(second.in_features, dtype=torch.int64)
        place[hidden] = torch.arange(len(hidden))
        tables = {"inputs": _order(reads, 1), "hidden": hidden, "outputs": torch.argsort(_order(writes, 0))}
        tables |= {} if folded else {"shuffle": place[read]}
        return cls(
            _Stacks.cut(first.weight, first.bias, reads),
            None if gate is None else _Stacks.cut(gate.weight, gate.bias, reads),
            _Stacks.cut(second.weight, None, writes),  # the bias is added once, to the sum of the channels
            {name: table.to(first.weight.device) for name, table in tables.items()},
        )

    def describe(self) -> dict[str, Any]:
        parts = {"first": self.first, "gate": self.gate, "second": self.second}
        described = {name: None if part is None else part.describe() for name, part in parts.items()}
        return described | {"shuffled": self.shuffle is not None}

    @classmethod
    def from_description(cls, description: dict[str, Any], outputs: int) -> _Channel:
        first, second = (_Stacks.from_description(description[name]) for name in ("first", "second"))
        gate = None if description["gate"] is None else _Stacks.from_description(description["gate"])
        sizes = {"inputs": first.columns, "hidden": first.rows, "outputs": outputs}
        sizes |= {"shuffle": second.columns} if description["shuffled"] else {}
        tables = {name: torch.empty(size, dtype=torch.int64) for name, size in sizes.items()}
        return cls(first, gate, second, tables)

    def limits(self, in_features: int, hidden_features: int) -> dict[str, int]:
        limits = {"inputs": in_features, "hidden": hidden_features, "outputs": self.second.rows}
        return limits if self.shuffle is None else limits | {"shuffle": self.first.rows}

    @property
    def read(self) -> Tensor:
        """Hidden neuron of each column of the second layer's blocks."""
        return self.hidden if self.shuffle is None else self.hidden[self.shuffle]

    def forward(self, x: Tensor, activation: nn.Module) -> Tensor:
        """(batch, inputs) → (batch, outputs), without the second layer's bias."""
        pieces = self.first.split(x.index_select(1, self.inputs))
        hidden: list[Tensor] = self.first(pieces)
        if self.gate is None:
            hidden = [activation(u) for u in hidden]
        else:
            hidden = [activation(g) * u for g, u in zip(self.gate(pieces), hidden, strict=True)]
        if self.shuffle is not None:
            hidden = self.second.split(_joined(hidden).index_select(1, self.shuffle))
        return _joined(self.second(hidden)).index_select(1, self.outputs)


class _Stacks(nn.Module):
    """The blocks of one matrix, those of a run stacked; what they read and write comes as one stack for each run."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)  # (blocks, rows, columns)
        self.biases = nn.ParameterList(biases)  # (blocks, 1, rows); empty without a bias

    @classmethod
    def cut(cls, weight: Tensor, bias: Tensor | None, runs: _Runs) -> _Stacks:
        weights = [torch.stack([weight.detach()[rows][:, cols] for rows, cols in run]) for run in runs]
        biases = [] if bias is None else [torch.stack([bias.detach()[rows][None] for rows, _ in run]) for run in runs]
        return cls(weights, biases)

    def describe(self) -> dict[str, Any]:
        return {"stacks": [list(stack.shape) for stack in self.weights], "bias": len(self.biases) > 0}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> _Stacks:
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
    parts: list[tuple[_Stacks, Tensor, Tensor]], in_features: int, out_features: int, bias: Tensor | None = None
) -> nn.Linear:
    """One layer from the blocks, rows and columns of every channel, with the bias given or that of the blocks."""
    like, has_bias = parts[0][0].weights[0], bias is not None or len(parts[0][0].biases) > 0
    dense = nn.Linear(in_features, out_features, has_bias, "meta", like.dtype).to_empty(device=like.device)
    with torch.no_grad():
        dense.weight.zero_()
        if bias is not None:
            dense.bias.copy_(bias)
        for stacks, rows, cols in parts:
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


def _layers(reads: Tensor, writes: Tensor, hidden: np.ndarray) -> tuple[_Runs, _Runs]:
    """Each layer of some hidden neurons in its own blocks."""
    first = [(hidden[rows], cols) for rows, cols in _blocks(reads[hidden], "first.weight")]
    second = [(rows, hidden[cols]) for rows, cols in _blocks(writes[:, hidden], "second.weight")]
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


def _check(first: nn.Linear, second: nn.Linear, gate: nn.Linear | None, channels: int | None) -> None:
    if second.in_features != first.out_features:
        raise InvalidMatrix(f"second: expected {first.out_features} inputs, got {second.in_features}")
    if gate is not None and gate.weight.shape != first.weight.shape:
        raise InvalidMatrix(f"gate: expected shape {tuple(first.weight.shape)}, got {tuple(gate.weight.shape)}")
    most = first.out_features
    if channels is not None and not (isinstance(channels, int) and 1 <= channels <= most):
        raise InvalidOption(f"channels must be an integer from 1 to {most}, the hidden neurons, got {channels!r}")
