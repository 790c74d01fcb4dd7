"""Recurrent layers in ONNX that take sequences of any length.

torch.export finds the shape of what a GRU or an LSTM returns by going through the steps of its example, and takes every
sequence to be as long from there on. While a graph is captured they return as many steps as they are given; in what was
captured, operators stand for them that do so as well, and are written as the same operators of ONNX. `nn.RNN` has none
there: its steps are written one after the other, for one length.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_whole_layers_", "recurrent_translations", "sequences_of_any_length"]

_SETTINGS = (
    "Tensor[] weights, bool has_biases, int layers, float dropout, bool train, bool bidirectional, bool batch_first"
)
torch.library.define("crystallite::gru", f"(Tensor given, Tensor state, {_SETTINGS}) -> (Tensor, Tensor)")
torch.library.define("crystallite::lstm", f"(Tensor given, Tensor[] states, {_SETTINGS}) -> (Tensor, Tensor, Tensor)")


@torch.library.register_fake("crystallite::gru")
def _returned_by_gru(given: Tensor, state: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    both = settings[5]
    return given.new_empty(*given.shape[:2], state.shape[-1] * (1 + both)), torch.empty_like(state)


@torch.library.register_fake("crystallite::lstm")
def _returned_by_lstm(given: Tensor, states: Sequence[Tensor], *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, state = _returned_by_gru(given, states[0], *settings)
    return output, state, torch.empty_like(states[1])


def _pairs() -> dict[Any, tuple[Any, Callable[..., Any]]]:
    """PyTorch's operators, those that stand for them, and what these return as far as shapes go."""
    return {
        torch.ops.aten.gru.input: (torch.ops.crystallite.gru.default, _returned_by_gru),
        torch.ops.aten.lstm.input: (torch.ops.crystallite.lstm.default, _returned_by_lstm),
    }


@contextmanager
def sequences_of_any_length() -> Iterator[None]:
    """While a graph is captured: GRUs and LSTMs return as many steps as they are given."""
    keys = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd
    before = {operator: dict(operator.py_kernels) for operator in _pairs()}
    try:
        for operator, (_, shape) in _pairs().items():
            operator.py_kernels.update(dict.fromkeys(keys, shape))
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, own in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(own)
            operator._dispatch_cache.clear()


def as_whole_layers_(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with operators for GRUs and LSTMs that nothing takes apart."""
    pairs = _pairs()
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in pairs:
            node.target = pairs[node.target][0]
    return program


def recurrent_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """What writes them: onnxscript's own, for PyTorch's operators."""
    from onnxscript.function_libs.torch_lib.ops import core

    return {torch.ops.crystallite.gru.default: core.aten_gru, torch.ops.crystallite.lstm.default: core.aten_lstm}
