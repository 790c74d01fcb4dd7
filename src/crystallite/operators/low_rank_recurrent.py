"""`LowRankRecurrent`: RNN, GRU and LSTM whose products with inputs and states may be smaller."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.core.parallel import compiled
from crystallite.operators.low_rank import LowRankLinear
from crystallite.operators.recurrent_layer import GATES, Steps, run_native
from crystallite.operators.recurrent_stack import RecurrentStack
from crystallite.operators.runtime import recurrent_kernels as kernels
from crystallite.operators.runtime.engine import can_run_compiled

__all__ = ["LowRankRecurrent", "LowRankRecurrentLayer"]

_lstm, _gru, _rnn = kernels._lstm, kernels._gru, kernels._rnn


class LowRankRecurrent(RecurrentStack):
    """A recurrent network with smaller products: the drop-in for `nn.RNN`, `nn.GRU` and `nn.LSTM`.

    Each layer and direction multiplies its inputs, and its states, by one matrix for all gates: an `nn.Linear`, or two
    of low rank. Input, initial states, outputs and final states are those of the module replaced, packed sequences
    included. Products with inputs are one for the whole sequence.
    With gradients, or on other devices and dtypes than float32 and float64 on the CPU, the factors are multiplied and
    PyTorch's own kernels run: the same function, but states then cost what they cost in the dense module.

    >>> dense = nn.GRU(8, 16)
    >>> whole = LowRankRecurrent.from_dense(dense)
    >>> x = torch.randn(5, 1, 8)
    >>> torch.allclose(whole(x)[0], dense(x)[0], atol=1e-6)
    True
    >>> LowRankRecurrent("GRU", 8, 16, [(2, 4)])
    LowRankRecurrent(GRU(8, 16), ranks 2 and 4, 368 of 1152 multiply-adds)
    """

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        ranks: Sequence[tuple[int, int]],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer: type[LowRankRecurrentLayer] | None = None,
    ) -> None:
        """ranks: for inputs and for states of each layer and direction, forward before backward; 0: a full matrix.

        layer: what each of them is made of, by default a `LowRankRecurrentLayer`.
        """
        super().__init__(mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        sizes = self._input_sizes("ranks", ranks)
        make = LowRankRecurrentLayer if layer is None else layer
        self.layers = nn.ModuleList(
            make(mode, size, hidden_size, *pair, bias, device, dtype) for size, pair in zip(sizes, ranks, strict=True)
        )

    @classmethod
    def from_dense(cls, module: nn.RNNBase, layer: type[LowRankRecurrentLayer] | None = None) -> LowRankRecurrent:
        """The same network with full matrices, whose `input` and `recurrent` layers can then be replaced.

        layer: as for the constructor.
        """
        if not isinstance(module, nn.RNNBase) or module.mode not in GATES or module.proj_size:
            raise InvalidOption(f"expected an nn.RNN, nn.GRU or nn.LSTM without projection, got {module}")
        weight, count = next(module.parameters()), module.num_layers * (1 + module.bidirectional)
        result = cls(
            module.mode, module.input_size, module.hidden_size, [(0, 0)] * count, module.num_layers, module.bias,
            module.batch_first, module.dropout, module.bidirectional, weight.device, weight.dtype, layer,
        )  # fmt: skip
        stored = iter(module.parameters())  # of each layer and direction: ih, hh, and their biases
        for part in result.parts():
            weights = [next(stored), next(stored)]
            biases = [next(stored), next(stored)] if module.bias else [None, None]
            for linear, own, bias in zip((part.input, part.recurrent), weights, biases, strict=True):
                with torch.no_grad():
                    linear.weight.copy_(own)
                    if bias is not None:
                        linear.bias.copy_(bias)
        result.requires_grad_(any(p.requires_grad for p in module.parameters()))
        return result.train(module.training)

    def describe(self) -> dict[str, Any]:
        """Sizes, settings and ranks, without weights."""
        return self.settings() | {"ranks": [list(part.ranks) for part in self.parts()]}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> LowRankRecurrent:
        """A network of these sizes, not filled."""
        ranks = [(int(inputs), int(states)) for inputs, states in description["ranks"]]
        return cls(**cls.checked_settings(description, "ranks") | {"ranks": ranks})

    def parts(self) -> list[LowRankRecurrentLayer]:
        """Each layer and direction."""
        return [part for part in self.layers if isinstance(part, LowRankRecurrentLayer)]

    @property
    def macs(self) -> int:
        """Multiply-accumulates for one time step of one sequence."""
        return sum(p.numel() for p in self.parameters() if p.ndim > 1)

    def __repr__(self) -> str:
        ranks = "; ".join(part.extra_repr() for part in self.parts())
        return (
            f"{type(self).__name__}({self._dense_repr()}, ranks {ranks}, "
            f"{self.macs} of {self.dense_macs} multiply-adds)"
        )


class LowRankRecurrentLayer(nn.Module):
    """One layer in one direction: `input` and `recurrent`, each an `nn.Linear` to all gates or two of low rank."""

    def __init__(
        self, mode: str, inputs: int, hidden: int, input_rank: int = 0, recurrent_rank: int = 0, bias: bool = True,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mode, self.inputs, self.hidden, self.gates = mode, inputs, hidden, GATES[mode]
        kind = {"device": device, "dtype": dtype}
        self.input: Any = _linear(inputs, self.gates * hidden, input_rank, bias, kind)
        self.recurrent: Any = _linear(hidden, self.gates * hidden, recurrent_rank, bias, kind)

    @property
    def ranks(self) -> tuple[int, int]:
        """Of the products with inputs and with states; 0: a full matrix."""
        return _rank(self.input), _rank(self.recurrent)

    def extra_repr(self) -> str:
        return " and ".join(str(rank or "full") for rank in self.ranks)

    def dense_weights(self) -> tuple[Tensor, ...]:
        """Input and recurrent weights and biases as the dense module has them; gradients flow to the factors."""
        return self.input.weight, self.recurrent.weight, *self._biases()

    def _biases(self) -> list[Tensor]:
        return [part.bias for part in (self.input, self.recurrent) if part.bias is not None]

    def forward(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output (rows, hidden) and final states (batch, hidden) from data (rows, inputs) and initial states."""
        if not isinstance(self.recurrent, nn.Linear):
            kind = next(self.parameters()).dtype
            if all(value.dtype == kind and can_run_compiled(value, self) for value in (data, *states)):
                return self.run_steps(data, steps, states, backward)
        return self.run_native(data, steps, states, backward)

    def run_native(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """In PyTorch's kernels, with the product of the factors for the states."""
        last = self.input
        if isinstance(last, LowRankLinear):
            data, last = last.down(data), last.up
        weights = [last.weight, self.recurrent.weight, *self._biases()]
        output, *final = run_native(self.mode, data, steps, states, weights, backward, self.training)
        return output, tuple(final)

    @torch.no_grad()
    def run_steps(
        self, data: Tensor, steps: Steps, states: tuple[Tensor, ...], backward: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Two thin products for each step, and the gates in compiled code: without gradients, on the CPU."""
        given = self.input(data)
        down, up = (factor.weight.t() for factor in (self.recurrent.down, self.recurrent.up))
        hidden, *cell = (state.clone(memory_format=torch.contiguous_format) for state in states)
        bias, inner, batch = self.recurrent.bias, data.new_zeros(self.hidden), steps.batch
        if bias is not None:
            outer = 2 * self.hidden if self.mode == "GRU" else len(bias)  # the GRU multiplies the rest by r
            given[:, :outer] += bias[:outer]
            inner = bias.detach()[outer:] if self.mode == "GRU" else inner
        middle, own = data.new_empty(batch, down.shape[1]), data.new_empty(batch, up.shape[1])
        output = data.new_empty(len(data), self.hidden)
        arrays = [value.numpy() for value in (given, own, inner, hidden, cell[0] if cell else own, output)]
        kind, times = getattr(kernels, self.mode), list(zip(steps.counts.tolist(), steps.starts.tolist(), strict=True))
        for count, start in reversed(times) if backward else times:
            torch.mm(torch.mm(hidden[:count], down, out=middle[:count]), up, out=own[:count])
            _step(kind, start, count, *arrays)
        return output, (hidden, *cell)


@compiled
def _step(kind, start, count, given, own, inner, hidden, cell, output):
    """One time step of the first `count` sequences: given (rows, gates·units) from inputs, own the same from states."""
    for r in range(count):
        row, now = start + r, hidden[r]
        if kind == kernels.LSTM:
            _lstm(given[row], own[r], now, cell[r])
        elif kind == kernels.GRU:
            _gru(given[row], own[r], inner, now)
        else:
            _rnn(kind == kernels.RNN_RELU, given[row], own[r], now)
        output[row] = now


def _linear(inputs: int, outputs: int, rank: int, bias: bool, kind: dict[str, Any]) -> nn.Module:
    if not rank:
        return nn.Linear(inputs, outputs, bias, **kind)
    return LowRankLinear(nn.Linear(inputs, rank, False, **kind), nn.Linear(rank, outputs, bias, **kind))


def _rank(module: Any) -> int:
    return module.rank if isinstance(module, LowRankLinear) else 0
