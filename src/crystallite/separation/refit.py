"""Blocks fitted in closed form, without labels, to what the dense layers compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.positions import real_rows
from crystallite.partitioning.partition import Partition
from crystallite.partitioning.weights import owner
from crystallite.statistics.moments import Moments
from crystallite.statistics.observer import Carry, ForwardPlan, Seen, observe
from crystallite.statistics.regression import Regression
from crystallite.statistics.watching import layer_call

__all__ = ["refit_"]

_NATIVE: dict[str, Any] = {"RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm}
_ROWS = 16384  # of a batch: positions, or patches that a convolution reads
_RIDGE = 0.01  # of the mean of the Gram matrix's diagonal


@torch.no_grad()
def refit_(model: nn.Module, dense: nn.Module, partition: Partition, batches: Sequence[Batch]) -> None:
    """Give the weights of a partition the blocks that least squares finds, one after the other, in place.

    Targets are the *dense* model's pre-activations; inputs come from the model as far as it is fitted already, so a
    layer makes good for what the ones before it have lost, and where its output is added to a residual stream also for
    what that stream has lost. The states that a recurrent network hears are the dense one's. Ridge of .01 of the mean
    diagonal. Weights between blocks become zero. Padded positions (an `attention_mask` of zeros) do not count. Both
    models must be in evaluation mode.

    Cost: a run of the dense model, a run of the other one up to each group of layers in every segment (`ForwardPlan`:
    layers of a transformer), and a Gram matrix for each block. Memory: what the layers of one segment write, and what
    is carried to the next. Raises where a block has more inputs than there are samples.
    """
    plan = ForwardPlan.of(dense, partition.modules, batches[0].first(1))
    if plan.unused:
        unused = min(plan.unused)
        raise InvalidOption(f"{unused}: the model does not run this layer on the data, so it cannot be fitted")
    carry, dense_carry = [[()] * len(batches) for _ in range(2)]
    used = max(number for number, groups in enumerate(plan.segments) if groups) + 1
    for segment, groups in enumerate(plan.segments[:used]):
        alone = [name for group in groups for name in group if isinstance(dense.get_submodule(name), nn.RNNBase)]
        others = [name for group in groups for name in group if name not in alone]
        expected = list(_seen(dense, batches, plan, segment, dense_carry, others))
        for i, group in enumerate(groups):
            if group[0] in alone:
                for name in group:
                    _refit_recurrent_(model, dense, name, partition, batches)
                continue
            following = groups[i + 1][0] if i + 1 < len(groups) and groups[i + 1][0] in others else None
            adds = any(expected[0][0][name].residual is not None for name in group)
            reused = bool(plan.reused.intersection(group))
            names, until = (group, None if reused else following) if adds or reused else ((), group[0])
            sums = {name: _BlockMoments(model, name, partition) for name in group}
            seen = _seen(model, batches, plan, segment, carry, names, until)
            for (theirs, _), (ours, _) in zip(expected, seen, strict=True):
                for name in group:
                    read = ours[name if names else group[0]]  # one tensor that all of them read
                    sums[name].add(read.inputs, _target(theirs[name], read if names else None))
            for one in sums.values():
                one.solve_()
        if segment + 1 < used:
            carry = [following for _, following in _seen(model, batches, plan, segment, carry, ())]
            dense_carry = [following for _, following in expected]


def _seen(
    model: nn.Module, batches: Sequence[Batch], plan: ForwardPlan, segment: int, carry: Sequence[Carry],
    names: Sequence[str], until: str | None = None,
) -> Iterator[tuple[dict[str, Seen], Carry]]:  # fmt: skip
    for batch, value in zip(batches, carry, strict=True):
        yield observe(model, batch, plan, segment, value, names, partial(real_rows, batch, most=_ROWS, seed=0), until)


def _target(theirs: Seen, ours: Seen | None) -> Tensor:
    """What a layer shall write: what the dense one does, and what the stream that it is added to has lost."""
    if theirs.residual is None or ours is None or ours.residual is None:
        return theirs.outputs
    return theirs.outputs + (theirs.residual - ours.residual)


class _BlockMoments:
    """Sums for the least squares of each block of a weight."""

    def __init__(self, model: nn.Module, name: str, partition: Partition) -> None:
        module, tensor = owner(name)
        layer = model.get_submodule(module)
        self.name, self.weight = name, getattr(layer, tensor)
        self.bias = getattr(layer, tensor.replace("weight", "bias"), None)
        taps = self.weight[0, 0].numel()  # a column of labels is so many of the weight: the places of a kernel
        members = [(torch.from_numpy(own), torch.from_numpy(read)) for own, read in partition.members(name)]
        self.blocks = [(own, (read[:, None] * taps + torch.arange(taps)).flatten()) for own, read in members]
        self.moments = [Moments(name) for _ in members]

    def add(self, x: Tensor, t: Tensor) -> None:
        x, t = x.double(), t.double()
        for found, (own, read) in zip(self.moments, self.blocks, strict=True):
            found.add(x[:, read], t[:, own])

    def solve_(self) -> None:
        """Give the weight its best blocks."""
        widest, samples = max(len(read) for _, read in self.blocks), self.moments[0].samples
        if samples < widest:
            raise InvalidOption(
                f"{self.name}: a block has {widest} inputs, but the data has {samples} samples: pass more"
            )
        weight, bias = self.weight, self.bias
        weight.zero_()
        flat = weight.flatten(1)
        for found, (own, read) in zip(self.moments, self.blocks, strict=True):
            nothing = flat.new_zeros(len(own), len(read))
            best = Regression.solve(found, found, nothing, bias is not None, _RIDGE)
            flat[own[:, None], read] = best.weight.to(weight)
            if bias is not None:
                bias[own] = best.bias(best.weight).to(bias)
        weight.copy_(flat.view_as(weight))


def _refit_recurrent_(
    model: nn.Module, dense: nn.Module, module: str, partition: Partition, batches: Sequence[Batch]
) -> None:
    """The matrices of a recurrent network, each from whole runs: there are few."""
    layer = dense.get_submodule(module)
    assert isinstance(layer, nn.RNNBase)
    for name in partition.layers:
        if owner(name)[0] == module:
            sums = _BlockMoments(model, name, partition)
            for batch in batches:
                ours, theirs = (_by_time(layer, layer_call(one, module, batch).inputs[0]) for one in (model, dense))
                sums.add(*_recurrent(layer, owner(name)[1], ours, theirs))
            sums.solve_()


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
