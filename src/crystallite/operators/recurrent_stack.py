"""`RecurrentStack`: the interface of `nn.RNN`, `nn.GRU` and `nn.LSTM` around layers of one's own."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.recurrent_layer import GATES, Steps

__all__ = ["RecurrentStack", "suffixes"]

States = Tensor | tuple[Tensor, Tensor]  # h, or h and c

_CLASSES = {"RNN_TANH": nn.RNN, "RNN_RELU": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
_SETTINGS = ("mode", "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


class RecurrentStack(nn.Module):
    """A recurrent network of several layers and directions, each a module in `layers`, forward before backward.

    A layer is called with data (rows, inputs), `Steps`, its initial states and whether it runs backward, and returns
    its output (rows, hidden) and final states; its `dense_weights` are those of the dense module.
    """

    layers: nn.ModuleList

    def __init__(
        self, mode: str, input_size: int, hidden_size: int, num_layers: int, bias: bool, batch_first: bool,
        dropout: float, bidirectional: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        if mode not in GATES:
            raise InvalidOption(f"mode must be one of {', '.join(GATES)}, got {mode!r}")
        self.mode, self.input_size, self.hidden_size = mode, input_size, hidden_size
        self.num_layers, self.bias, self.batch_first = num_layers, bias, batch_first
        self.dropout, self.bidirectional, self.proj_size = dropout, bidirectional, 0

    def _input_sizes(self, name: str, given: Sized) -> list[int]:
        """What each layer and direction reads; `given`: what its caller says of each, called `name`."""
        directions = 1 + self.bidirectional
        if len(given) != self.num_layers * directions:
            raise InvalidOption(f"{name}: expected {self.num_layers * directions}, got {len(given)}")
        return [self.input_size] * directions + [directions * self.hidden_size] * directions * (self.num_layers - 1)

    def settings(self) -> dict[str, Any]:
        """What the dense module is built with."""
        return {name: getattr(self, name) for name in _SETTINGS}

    @staticmethod
    def checked_settings(description: dict[str, Any], own: str) -> dict[str, Any]:
        """The settings in a description that holds them and its class's `own` list, and nothing else."""
        settings = {name: value for name, value in description.items() if name != own}
        sizes, flags = ("input_size", "hidden_size", "num_layers"), ("bias", "batch_first", "bidirectional")
        fits = settings.keys() == {*_SETTINGS} and settings["mode"] in GATES
        fits = fits and all(type(settings[name]) is int and settings[name] > 0 for name in sizes)
        fits = fits and all(type(settings[name]) is bool for name in flags)
        if not fits or type(settings["dropout"]) not in (int, float) or not 0 <= settings["dropout"] <= 1:
            raise InvalidOption(f"expected the settings {', '.join(_SETTINGS)} and {own}, got {settings!r:.200}")
        return settings

    def _dense_repr(self) -> str:
        options = [f"num_layers={self.num_layers}"] * (self.num_layers > 1) + ["bidirectional"] * self.bidirectional
        return f"{self.mode}({', '.join([str(self.input_size), str(self.hidden_size), *options])})"

    @property
    def dense_macs(self) -> int:
        """Multiply-accumulates of the dense module for one time step of one sequence."""
        sizes = self._input_sizes("layers", self.layers)
        return sum(GATES[self.mode] * self.hidden_size * (self.hidden_size + size) for size in sizes)

    def dense_weights(self) -> dict[str, Tensor]:
        """Weights and biases by the names of the dense module; gradients flow back to where they come from."""
        named: dict[str, Tensor] = {}
        for s, layer in zip(suffixes(self.num_layers, self.bidirectional), self.layers, strict=True):
            own: Any = layer
            names = [f"{kind}_l{s}" for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            named.update(zip(names, own.dense_weights(), strict=False))  # without biases there are two
        return named

    def to_dense(self) -> nn.RNNBase:
        """The dense module with these weights."""
        weights = self.dense_weights()
        kind = weights["weight_hh_l0"]
        options = {"nonlinearity": self.mode[4:].lower()} if self.mode.startswith("RNN") else {}
        dense = _CLASSES[self.mode](
            self.input_size, self.hidden_size, self.num_layers, bias=self.bias, batch_first=self.batch_first,
            dropout=self.dropout, bidirectional=self.bidirectional, device="meta", dtype=kind.dtype, **options,
        ).to_empty(device=kind.device)  # fmt: skip
        dense.load_state_dict({name: value.detach() for name, value in weights.items()})
        dense.requires_grad_(any(p.requires_grad for p in self.parameters()))
        return dense.train(self.training)

    def flatten_parameters(self) -> None:
        """Nothing to do; dense modules have this method."""

    # what it does

    def forward(
        self, input: Tensor | PackedSequence, hx: States | None = None
    ) -> tuple[Tensor | PackedSequence, States]:
        """(output, final states) as `nn.RNN`, `nn.GRU` or `nn.LSTM` return them."""
        if isinstance(input, PackedSequence):
            data, counts = input.data, input.batch_sizes.numpy()
            steps = Steps(len(counts), int(counts[0]), counts)
            self._check_input(data, 2)
            states = self._initial(hx, data, steps.batch, 3)
            if input.sorted_indices is not None:
                states = [state.index_select(1, input.sorted_indices) for state in states]
            output, final = self._run(data, steps, states)
            if input.unsorted_indices is not None:
                final = [state.index_select(1, input.unsorted_indices) for state in final]
            return input._replace(data=output), self._as_hx(final)
        batched = input.dim() == 3
        self._check_input(input, 3 if batched else 2)
        sequence = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            sequence = sequence.transpose(0, 1)
        length, batch, _ = sequence.shape
        if not length:
            raise InvalidMatrix("input: expected at least one time step, got none")
        steps = Steps(length, batch)
        states = self._initial(hx, input, batch, input.dim())
        flat, final = self._run(sequence.reshape(length * batch, self.input_size), steps, states)
        output = flat.view(length, batch, flat.shape[1])
        if not batched:
            return output.squeeze(1), self._as_hx([state.squeeze(1) for state in final])
        return output.transpose(0, 1) if self.batch_first else output, self._as_hx(final)

    def _check_input(self, data: Tensor, dimensions: int) -> None:
        if data.dim() != dimensions or data.shape[-1] != self.input_size:
            raise InvalidMatrix(
                f"input: expected 2 or 3 dimensions, the last of {self.input_size}, got shape {tuple(data.shape)}"
            )
        dtype = self._weight_dtype()
        if data.dtype != dtype and not torch.is_autocast_enabled(data.device.type):
            raise InvalidMatrix(f"input: expected dtype {dtype}, as the weights have, got {data.dtype}")

    def _weight_dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _initial(self, hx: States | None, like: Tensor, batch: int, dimensions: int) -> list[Tensor]:
        """h_0, and c_0 for the LSTM: (layers·directions, batch, hidden) each."""
        count, shape = 1 + (self.mode == "LSTM"), (len(self.layers), batch, self.hidden_size)
        if hx is None:
            return [like.new_zeros(shape) for _ in range(count)]
        given = [hx] if isinstance(hx, Tensor) else list(hx)
        expected = shape if dimensions == 3 else (shape[0], shape[2])
        if len(given) != count or any(tuple(state.shape) != expected for state in given):
            got = ", ".join(str(tuple(state.shape)) for state in given)
            raise InvalidMatrix(f"hx: expected {count} state{'s' * (count > 1)} of shape {expected}, got {got}")
        return [state.reshape(shape) for state in given]

    def _as_hx(self, states: list[Tensor]) -> States:
        return (states[0], states[1]) if self.mode == "LSTM" else states[0]

    def _run(self, data: Tensor, steps: Steps, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Output (rows, directions·hidden) of the last layer and the final states of all."""
        directions, final, output = 1 + self.bidirectional, [], data
        for i, layer in enumerate(self.layers):
            direction, mine = i % directions, tuple(state[i] for state in states)
            if direction == 0 and i:
                data = F.dropout(output, self.dropout, self.training)
            part, last = layer(data, steps, mine, direction == 1)
            output = part if direction == 0 else torch.cat([output, part], 1)
            final.append(last)
        return output, [torch.stack(kind) for kind in zip(*final, strict=True)]


def suffixes(layers: int, bidirectional: bool) -> list[str]:
    """What follows "weight_hh_l" in the names of the dense module, in the order of its layers and directions."""
    return [f"{layer}{side}" for layer in range(layers) for side in ("", "_reverse")[: 1 + bidirectional]]
