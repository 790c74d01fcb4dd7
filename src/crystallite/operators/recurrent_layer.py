"""One recurrent layer in one direction as its Frobenius blocks: what it holds, and the two ways to run it.

`run` goes block by block through the whole sequence in compiled code: the fast way, without gradients, on the CPU.
`forward` puts each independent part together as an ordinary recurrent layer and calls PyTorch's own: any device and
dtype, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidMap
from crystallite.core.parallel import over_tasks
from crystallite.operators.frobenius import Block, FrobeniusForm, Maps
from crystallite.operators.runtime import recurrent_kernels as kernels
from crystallite.operators.runtime.instructions import PANEL

__all__ = ["GATES", "BlockRecurrentLayer", "Steps", "from_panels", "run_native"]

GATES = {"RNN_TANH": 1, "RNN_RELU": 1, "GRU": 3, "LSTM": 4}
_KINDS = {mode: getattr(kernels, mode) for mode in GATES}
_NATIVE: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
    "GRU": torch.gru,
    "LSTM": torch.lstm,
}

_NATIVE_UNITS = 128  # smaller independent parts share a call to PyTorch's kernels
_MACS_PER_THREAD = 40_000_000  # about a millisecond: below, waking a thread costs more than it saves
_THREADED_BATCH = 4


class Steps(NamedTuple):
    """How the rows of some sequences lie in time: `counts[t]` of them have a step t, the longest come first.

    While a graph is traced, length and batch may be symbols; they stay so unless the counts are asked for."""

    length: int
    batch: int
    packed: np.ndarray | None = None  # (length,) int64; None: all sequences are as long

    @property
    def counts(self) -> np.ndarray:
        return np.full(self.length, self.batch, np.int64) if self.packed is None else self.packed

    @property
    def starts(self) -> np.ndarray:
        """The row at which each time begins."""
        return np.cumsum(self.counts) - self.counts

    def reversed_rows(self, device: torch.device) -> Tensor:
        """The row of each sequence's steps from last to first, as rows of the same packing."""
        starts = self.starts
        time = np.repeat(np.arange(len(self.counts)), self.counts)
        sequence = np.arange(len(time)) - starts[time]
        lengths = (self.counts[:, None] > np.arange(self.batch)).sum(0)
        return torch.from_numpy(starts[lengths[sequence] - 1 - time] + sequence).to(device)


def run_native(
    mode: str, data: Tensor, steps: Steps, states: tuple[Tensor, ...], weights: list[Tensor], backward: bool,
    training: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Output (rows, hidden) and final states (batch, hidden) of one layer in one direction, by PyTorch's kernels.

    weights: for inputs and for states, and the biases if there are some.
    """
    if backward and steps.packed is not None:
        rows = steps.reversed_rows(data.device)
        data = data.index_select(0, rows)
    initial = [state[None] for state in states]
    call, initially = _NATIVE[mode], initial if mode == "LSTM" else initial[0]
    tail = (len(weights) > 2, 1, 0.0, training, False)
    if steps.packed is not None:
        output, *final = call(data, torch.from_numpy(steps.packed), initially, weights, *tail)
        output = output.index_select(0, rows) if backward else output
    else:
        sequence = data.view(steps.length, steps.batch, data.shape[1])
        output, *final = call(sequence.flip(0) if backward else sequence, initially, weights, *tail, False)
        output = (output.flip(0) if backward else output).flatten(0, 1)
    return output, *(state[0] for state in final)


class BlockRecurrentLayer(nn.Module):
    """The blocks of one layer and direction, and the index tables that say which units they are.

    input_weights: (gates·units, inputs read) for each input block, rows as the form's gate columns.
    recurrent_weights: (blocks, panels, feedback, 16) for each stack, see `instructions.PANEL`.
    communication_weights: (gates·units, sources) for each block that hears others.
    bias_ih, bias_hh: (gates·hidden,) as the form's gate columns.

    A layer of no inputs is given what its gates get from elsewhere instead, and has no bias_ih.
    """

    permutations: ClassVar[tuple[str, ...]] = ("order",)  # tables in which every index must stand once

    order: Tensor
    component: Tensor
    rank: Tensor
    sources: Tensor
    columns: Tensor

    def __init__(
        self,
        mode: str,
        inputs: int,
        form: FrobeniusForm,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mode, self.inputs, self.form = mode, inputs, form

        def empty(*shape: int) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        def table(size: int) -> Tensor:
            return torch.zeros(size, device=device, dtype=torch.int64)

        gates, blocks = form.gates, form.blocks
        self.input_weights = nn.ParameterList(empty(gates * i.size, i.columns) for i in form.inputs)
        self.recurrent_weights = nn.ParameterList(
            empty(len(stack), -(-gates * blocks[stack[0]].size // PANEL), blocks[stack[0]].feedback, PANEL)
            for stack in form.stacks
        )
        self.communication_weights = nn.ParameterList(
            empty(gates * blocks[i].size, blocks[i].sources) for i in form.hearing
        )
        self.bias_ih = nn.Parameter(empty(gates * form.hidden)) if bias and inputs else None
        self.bias_hh = nn.Parameter(empty(gates * form.hidden)) if bias else None
        for name in ("order", "component", "rank"):
            self.register_buffer(name, table(form.hidden))
        self.register_buffer("sources", table(sum(b.sources for b in blocks)))
        self.register_buffer("columns", table(sum(i.columns for i in form.inputs)))
        self._column_bounds = list(pairwise(accumulate((i.columns for i in form.inputs), initial=0)))
        bounds = pairwise(accumulate((blocks[i].sources for i in form.hearing), initial=0))
        self._source_bounds = dict(zip(form.hearing, bounds, strict=True))

    def _dtype_and_device(self) -> Tensor:
        return next(self.parameters())

    def index_limits(self) -> dict[str, int]:
        """What the entries of each index table must stay below."""
        hidden = self.form.hidden
        return {"order": hidden, "component": hidden, "rank": hidden, "sources": hidden, "columns": self.inputs}

    def check_tables(self) -> None:
        """Refuse tables that would read what is not computed yet."""
        self.form.check_tables(*(table.cpu().numpy() for table in (self.sources, self.columns, self.rank)))

    # from and to dense weights

    @torch.no_grad()
    def load_dense(self, maps: Maps, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> None:
        """Take the blocks out of dense weights, whose entries outside them are dropped."""
        for name, table in maps._asdict().items():
            getattr(self, name).copy_(torch.from_numpy(table))
        gates, hidden = self.form.gates, self.form.hidden
        by_unit = w_hh.view(gates, hidden, hidden)[:, self.order][:, :, self.order]
        for stack, weight in zip(self.form.stacks, self.recurrent_weights, strict=True):
            for i, panels in zip(stack, weight, strict=True):
                block = self.form.blocks[i]
                own = by_unit[:, _span(block), _span(block)]
                lines = own.permute(2, 0, 1) if block.feedback == block.size else own.diagonal(dim1=1, dim2=2)[None]
                if block.feedback:
                    panels.copy_(_to_panels(lines.reshape(block.feedback, -1)))
        for i, weight in zip(self.form.hearing, self.communication_weights, strict=True):
            block = self.form.blocks[i]
            weight.copy_(by_unit[:, _span(block)][:, :, self.sources_of(i)].flatten(0, 1))
        by_column = torch.empty_like(w_ih)
        by_column[self._gate_columns().flatten()] = w_ih.view(gates, hidden, -1)[:, self.order].flatten(0, 1)
        for i, weight in zip(range(len(self.form.inputs)), self.input_weights, strict=True):
            weight.copy_(by_column[self._input_rows(i)][:, self.columns_of(i)])
        for mine, theirs in ((self.bias_ih, b_ih), (self.bias_hh, b_hh)):
            if mine is not None and theirs is not None:
                mine[self._gate_columns()] = theirs.view(gates, hidden)[:, self.order]

    def dense_weights(self) -> tuple[Tensor, ...]:
        """Input and recurrent weights with zeros between the blocks, and biases, in PyTorch's order.

        Gradients flow to the blocks.
        """
        gates, hidden = self.form.gates, self.form.hidden
        w_ih = self._dtype_and_device().new_zeros(gates * hidden, self.inputs)
        for i, weight in enumerate(self.input_weights):
            rows = torch.arange(gates * hidden, device=w_ih.device)[self._input_rows(i)]
            w_ih = w_ih.index_put((rows[:, None], self.columns_of(i)), weight)
        columns = self._dense_rows()
        return w_ih[columns], self.weight, *(bias[columns] for bias in self._biases())

    @property
    def weight(self) -> Tensor:
        """(gates·hidden, hidden): the recurrent weight of the dense module."""
        position = torch.argsort(self.order)
        return self._recurrent_between(0, self.form.hidden)[:, position][:, :, position].flatten(0, 1)

    @property
    def bias(self) -> Tensor | None:
        """(gates·hidden,): that of the product with states in the dense module."""
        return None if self.bias_hh is None else self.bias_hh[self._dense_rows()]

    def _dense_rows(self) -> Tensor:
        """The gate column of each row of the dense module's weights."""
        return self._gate_columns()[:, torch.argsort(self.order)].flatten()

    def _biases(self) -> list[Tensor]:
        return [bias for bias in (self.bias_ih, self.bias_hh) if bias is not None]

    def _recurrent_between(self, first: int, stop: int) -> Tensor:
        """(gates, units, units): the recurrent weights of the units at positions first…stop−1, zeros between blocks."""
        gates = self.form.gates
        dense = self._dtype_and_device().new_zeros(gates, stop - first, stop - first)
        inside = [first <= block.first < stop for block in self.form.blocks]
        for stack, weight in zip(self.form.stacks, self.recurrent_weights, strict=True):
            for i, panels in zip(stack, weight, strict=True):
                block = self.form.blocks[i]
                if inside[i] and block.feedback:
                    dense[:, _span(block, first), _span(block, first)] = from_panels(panels, gates, block)
        for i, weight in zip(self.form.hearing, self.communication_weights, strict=True):
            if inside[i]:
                block = self.form.blocks[i]
                heard = weight.view(gates, block.size, -1)
                dense[:, _span(block, first)].index_copy_(2, self.sources_of(i) - first, heard)
        component, rank = self.component[first:stop], self.rank[first:stop]
        return dense * ((component[:, None] == component) & (rank[:, None] >= rank))  # where small blocks share one

    def sources_of(self, block: int) -> Tensor:
        """The positions that a block hears outside of it."""
        return self.sources[slice(*self._source_bounds[block])]

    def columns_of(self, input_block: int) -> Tensor:
        """The inputs that an input block reads."""
        return self.columns[slice(*self._column_bounds[input_block])]

    def _input_rows(self, input_block: int) -> slice:
        block = self.form.inputs[input_block]
        return slice(self.form.gates * block.first, self.form.gates * (block.first + block.size))

    def _gate_columns(self) -> Tensor:
        return torch.from_numpy(self.form.gate_columns).to(self.order.device)

    # PyTorch's kernels

    def forward(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output (rows, hidden) and final states (batch, hidden) from data (rows, inputs) and initial states."""
        made = []
        for reads, first, stop in self.form.bins(_NATIVE_UNITS):
            columns, weights = self.part_weights(reads, first, stop)
            initial = tuple(state[:, self.order[first:stop]] for state in states)
            given = data.index_select(1, columns)
            made.append(run_native(self.mode, given, steps, initial, weights, backward, self.training))
        position = torch.argsort(self.order)
        output, *final = (torch.cat(pieces, -1).index_select(-1, position) for pieces in zip(*made, strict=True))
        return output, tuple(final)

    def part_weights(self, reads: int, first: int, stop: int) -> tuple[Tensor, list[Tensor]]:
        """The inputs that the units at positions first…stop−1 read, and their weights and biases as PyTorch's.

        They must hear no others, as those of a bin of the form do; `reads`: their input block, or −1: they read none.
        """
        gates, rows = self.form.gates, self._gate_columns()[:, first:stop].flatten()
        if reads < 0:
            columns = self.order.new_zeros(1)
            w_ih = self._dtype_and_device().new_zeros(gates * (stop - first), 1)
        else:
            columns = self.columns_of(reads)
            w_ih = self.input_weights[reads].index_select(0, rows - gates * self.form.inputs[reads].first)
        w_hh = self._recurrent_between(first, stop).flatten(0, 1)
        return columns, [w_ih, w_hh, *(bias[rows] for bias in self._biases())]

    # compiled blocks

    def run(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool, output: Tensor, column: int
    ) -> tuple[Tensor, ...]:
        """Like `forward`, without gradients and on the CPU; output[:, column:] receives the states."""
        form, data = self.form, data.detach().contiguous()
        threads = _threads(len(data) * form.macs, steps.batch)
        hidden, *cell = (state.index_select(1, self.order) for state in states)
        gates, inner = self._given(data, threads)
        previous = gates.new_empty(len(data) if form.hearing else 0, form.hidden)
        nothing = previous[:0]
        columns = self.order.numpy() + column
        if columns.min() < 0 or columns.max() >= output.shape[1]:  # compiled code would write elsewhere
            raise InvalidMap(f"order: expected the units 0…{form.hidden - 1}")
        for stack, weight in zip(form.stacks, self.recurrent_weights, strict=True):
            blocks = [form.blocks[i] for i in stack]
            for i in stack:
                if form.blocks[i].sources:
                    self._hear(i, previous, gates, inner, threads)
            last = blocks[0].depth + 1 == form.depth  # nobody hears these
            touched = (gates, inner, hidden, cell[0] if cell else nothing, output, nothing if last else previous)
            call = partial(
                _run_share, _KINDS[self.mode], form.gates, weight.detach().contiguous().numpy(),
                np.array([b.first for b in blocks]), blocks[0].size, steps, backward, columns,
                [tensor.numpy() for tensor in touched],
            )  # fmt: skip
            shares = _shares(len(stack), steps.batch, threads)
            over_tasks(len(shares), shares, call)
        return tuple(torch.empty_like(state).index_copy_(1, self.order, state) for state in (hidden, *cell))

    def _given(self, data: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        """What gates get from inputs and biases (rows, gates·hidden + 16), and the GRU's inner bias (1, hidden + 16).

        The last columns are room for the compiled product, which writes whole panels.
        """
        form = self.form
        bias = data.new_zeros(1, form.gates * form.hidden + PANEL)
        inner = data.new_zeros(1, form.hidden + PANEL)
        for own in self._biases():
            bias[0, :-PANEL] += own
        if self.mode == "GRU" and self.bias_hh is not None:
            new = self._gate_columns()[2]
            bias[0, new] = 0 if self.bias_ih is None else self.bias_ih[new]
            inner[0, :-PANEL] = self.bias_hh[new]
        gates = data.new_empty(len(data), bias.shape[1])
        if not self.inputs:
            mine = data.index_select(1, torch.argsort(self._dense_rows()))
            torch.add(mine, bias[:, :-PANEL], out=gates[:, :-PANEL])
        column = 0
        for i, weight in enumerate(self.input_weights):
            _add_product(bias, data, self.columns_of(i), weight.detach(), gates, column, threads)
            column += len(weight)
        if self.inputs and column < form.gates * form.hidden:  # units that read nothing
            gates[:, column:] = bias[:, column:]
        if self.mode == "GRU" and form.hearing:
            inner = torch.from_numpy(inner.numpy().repeat(len(data), 0))  # NumPy wakes none of PyTorch's threads
        return gates, inner

    def _hear(self, i: int, previous: Tensor, gates: Tensor, inner: Tensor, threads: int) -> None:
        """Add what a block hears from others: one product over the whole sequence."""
        block, weight = self.form.blocks[i], self.communication_weights[self.form.hearing.index(i)].detach()
        sources = self.sources_of(i)
        outer = 2 * block.size if self.mode == "GRU" else len(weight)
        _add_product(gates, previous, sources, weight[:outer], gates, self.form.gates * block.first, threads)
        if self.mode == "GRU":  # what goes into n is multiplied by r first
            _add_product(inner, previous, sources, weight[outer:], inner, block.first, threads)


def _threads(macs: int, batch: int) -> int:
    """How many threads of our own a call is worth.

    PyTorch's threads spin for milliseconds after a product and would keep ours from their cores: so it is either
    PyTorch's for the products and one for the steps, or ours for both.
    """
    return max(1, min(torch.get_num_threads(), macs // _MACS_PER_THREAD)) if batch >= _THREADED_BATCH else 1


def _add_product(
    start: Tensor, left: Tensor, columns: Tensor, weight: Tensor, out: Tensor, column: int, threads: int
) -> None:
    """out[:, column:] = start[:, column:] + left[:, columns] @ weight.T, where start has one row or as many as out.

    `columns` ascend, so they are all between the first and the last if they are as many.
    """
    first, stop = int(columns[0]), int(columns[-1]) + 1
    if first < 0 or stop > left.shape[1]:  # compiled code would read elsewhere
        raise InvalidMap(f"sources and columns: expected indices 0…{left.shape[1] - 1}, got {first}…{stop - 1}")
    if stop - first != len(columns):
        left, first, stop = torch.from_numpy(left.numpy().take(columns.numpy(), 1)), 0, len(columns)
    if threads == 1:
        mine = slice(column, column + len(weight))
        torch.addmm(start[:, mine], left[:, first:stop], weight.t(), out=out[:, mine])
        return
    panels = np.empty((-(-len(weight) // PANEL), len(columns), PANEL), weight.numpy().dtype)
    kernels.pack(weight.contiguous().numpy(), panels)
    arrays = start.numpy(), left.numpy(), first, panels, out.numpy(), column
    over_tasks(threads, _ranges(len(out), threads), lambda rows: kernels.add_product(*arrays, *rows))


def _run_share(
    kind: int, width: int, weight: np.ndarray, first: np.ndarray, size: int, steps: Steps, backward: bool,
    columns: np.ndarray, arrays: list[np.ndarray], share: tuple[slice, int, int],
) -> None:  # fmt: skip
    blocks, low, high = share
    gates, inner, hidden, cell, output, previous = arrays
    kernels.run_blocks(
        kind, width, gates, inner, weight[blocks], first[blocks], size, steps.counts, steps.starts, backward, low, high,
        hidden, cell, columns, output, previous,
    )  # fmt: skip


def _shares(blocks: int, batch: int, threads: int) -> list[tuple[slice, int, int]]:
    """(blocks, first sequence, last sequence + 1) for each thread: split the blocks, or the batch if they are few."""
    if blocks % threads == 0:
        return [(slice(a, b), 0, batch) for a, b in _ranges(blocks, threads)]
    return [(slice(0, blocks), a, b) for a, b in _ranges(batch, threads)]


def _ranges(count: int, parts: int) -> list[tuple[int, int]]:
    """0…count cut into nearly equal ranges."""
    return list(pairwise(count * i // parts for i in range(parts + 1)))


def _span(block: Block, origin: int = 0) -> slice:
    return slice(block.first - origin, block.first + block.size - origin)


def _to_panels(lines: Tensor) -> Tensor:
    """(depth, width) → (panels, depth, 16), the last panel filled up with zeros."""
    padded = F.pad(lines, (0, -lines.shape[1] % PANEL))
    return padded.view(len(lines), -1, PANEL).transpose(0, 1)


def from_panels(panels: Tensor, gates: int, block: Block) -> Tensor:
    """(gates, units, units): what the units of a block hear from each other, or each from itself."""
    lines = panels.transpose(0, 1).flatten(1)[:, : gates * block.size].view(-1, gates, block.size)
    return lines.permute(1, 2, 0) if block.feedback == block.size else torch.diag_embed(lines[0])
