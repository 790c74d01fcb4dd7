"""Blocks fitted in closed form, without labels, to what the dense layers compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.positions import real_positions
from crystallite.partitioning.partition import Partition
from crystallite.partitioning.weights import owner
from crystallite.statistics.moments import Moments
from crystallite.statistics.regression import Regression
from crystallite.statistics.watching import layer_call

__all__ = ["refit_"]

_NATIVE: dict[str, Any] = {"RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm}
_PATCHES = 16384  # of a batch, or those of one sample
_RIDGE = 0.01  # of the mean of the Gram matrix's diagonal


@torch.no_grad()
def refit_(model: nn.Module, dense: nn.Module, partition: Partition, batches: Sequence[Batch]) -> None:
    """Give the weights of a partition the blocks that least squares finds, one after the other, in place.

    Targets are the *dense* model's pre-activations; inputs come from the model as far as it is fitted already, so a
    layer makes good for what the ones before it have lost. The states that a recurrent network hears are the dense
    one's. Ridge of .01 of the mean diagonal. Weights between blocks become zero. Padded positions (an `attention_mask`
    of zeros) do not count. Both models must be in evaluation mode.

    Cost: a run of both models up to each layer, and a Gram matrix for each block. Raises where a block has more inputs
    than there are samples.
    """
    for name in partition.layers:
        module, tensor = owner(name)
        layer = model.get_submodule(module)
        weight, bias = getattr(layer, tensor), getattr(layer, tensor.replace("weight", "bias"), None)
        taps = weight[0, 0].numel()  # a column of labels is so many of the weight: the places of a kernel
        members = [(torch.from_numpy(own), torch.from_numpy(read)) for own, read in partition.members(name)]
        blocks = [(own, (read[:, None] * taps + torch.arange(taps)).flatten()) for own, read in members]
        moments = [Moments(name) for _ in blocks]
        for batch in batches:
            x, t = (value.double() for value in _regression(model, dense, name, batch))
            for found, (own, read) in zip(moments, blocks, strict=True):
                found.add(x[:, read], t[:, own])
        widest = max(len(read) for _, read in blocks)
        if moments[0].samples < widest:
            raise InvalidOption(
                f"{name}: a block has {widest} inputs, but the data has {moments[0].samples} samples: pass more"
            )
        weight.zero_()
        flat = weight.flatten(1)
        for found, (own, read) in zip(moments, blocks, strict=True):
            nothing = flat.new_zeros(len(own), len(read))
            best = Regression.solve(found, found, nothing, bias is not None, _RIDGE)
            flat[own[:, None], read] = best.weight.to(weight)
            if bias is not None:
                bias[own] = best.bias(best.weight).to(bias)
        weight.copy_(flat.view_as(weight))


def _regression(model: nn.Module, dense: nn.Module, name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """(rows, columns) that a weight multiplies, and (rows, outputs) that it should give."""
    module, tensor = owner(name)
    layer = dense.get_submodule(module)
    x, expected = layer_call(model, module, batch).inputs[0], layer_call(dense, module, batch)
    if isinstance(layer, nn.RNNBase):
        return _recurrent(layer, tensor, _by_time(layer, x), _by_time(layer, expected.inputs[0]))
    t = expected.output
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        count = max(1, _PATCHES // t[0, 0].numel())
        return _patches(layer, x[:count]), t[:count].movedim(1, -1).flatten(0, -2)
    real = real_positions(batch, x.shape[:-1])
    return x.flatten(0, -2)[real], t.flatten(0, -2)[real]


def _patches(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """(samples · positions, channels · places of the kernel): what a convolution multiplies by its kernels."""
    ends = conv._reversed_padding_repeated_twice
    x = nn.functional.pad(x, ends, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)
    for axis, (size, step, apart) in enumerate(zip(conv.kernel_size, conv.stride, conv.dilation, strict=True), 2):
        x = x.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
    places = len(conv.kernel_size)
    return x.movedim(1, places + 1).flatten(0, places).flatten(1)


def _by_time(module: nn.RNNBase, x: Any) -> Tensor:
    """(time, samples, features)"""
    if isinstance(x, PackedSequence):
        return pad_packed_sequence(x)[0]
    x = x[:, None] if x.ndim == 2 else x  # one sequence
    return x.transpose(0, 1) if module.batch_first else x


def _recurrent(module: nn.RNNBase, tensor: str, x: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """What a matrix of a recurrent network multiplies, and what it gives; `expected`: what the dense network reads."""
    kind, rest = tensor.removeprefix("weight_").split("_l")
    depth, end = int(rest.removesuffix("_reverse")), "_reverse" if rest.endswith("_reverse") else ""
    ends = ("", "_reverse")[: 1 + module.bidirectional]
    for layer in range(depth):
        expected = x = torch.cat([_states(module, expected, f"{layer}{one}") for one in ends], -1)
    if kind == "hh":
        states = _states(module, expected, rest)
        zeros = torch.zeros_like(states[:1])
        expected = x = torch.cat([states[1:], zeros] if end else [zeros, states[:-1]])
    bias = getattr(module, f"bias_{kind}_l{rest}", None)
    return x.flatten(0, 1), nn.functional.linear(expected, getattr(module, tensor), bias).flatten(0, 1)


def _states(module: nn.RNNBase, x: Tensor, suffix: str) -> Tensor:
    """(time, samples, units) of one layer in one direction, from a state of zeros."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")[: 4 if module.bias else 2]
    start = x.new_zeros(1, x.shape[1], module.hidden_size)
    backward = suffix.endswith("_reverse")
    found = _NATIVE[module.mode](
        x.flip(0) if backward else x, (start, start) if module.mode == "LSTM" else start,
        [getattr(module, f"{name}_l{suffix}") for name in names], module.bias, 1, 0.0, False, False, False,
    )[0]  # fmt: skip
    return found.flip(0) if backward else found
