"""Jacobian energy: how much each output of a model moves with each of its inputs and hidden neurons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.data.batch import Batch, batches, evaluating, is_one_batch

__all__ = ["Energy", "jacobian_energy"]

_MEMORY = 1 << 30  # bytes for all sums
_CHUNK = 1 << 22  # numbers of a chunk of inputs
_AT_ONCE = 256  # samples, at most


@dataclass(frozen=True, eq=False)
class Energy:
    """J²[o, i] = E[(∂z_o/∂x_i)²]·var(x_i): the variance of output o that input i explains, to first order."""

    inputs: np.ndarray  # (outputs, inputs)
    resampled: np.ndarray  # (resamples, outputs, inputs): the same from bootstrap samples
    hidden: dict[str, np.ndarray]  # by layer: (outputs, neurons)
    samples: int


def jacobian_energy(
    model: nn.Module, data: Any, samples: int = 1500, resamples: int = 0, hidden: bool = False
) -> Energy:
    """The energy from every input, and from every neuron of the `nn.Linear` layers if asked for, to every output.

    The features of a sample are flattened; outputs are the last axis, and the energies of other axes (positions) add
    up. Hidden neurons are what a layer returns, before the activation. Layers that a pass uses more than once and those
    that return the outputs themselves are left out.

    One backward pass per output and chunk of samples; memory O(outputs · (inputs · (resamples + 1) + neurons)), of
    which resamples take no more than is left of 1 GiB.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 1.0]]))
    >>> jacobian_energy(model, torch.tensor([[0.0, 1.0], [2.0, 1.0]])).inputs  # the second input never changes
    array([[9., 0.]])
    """
    if samples < 2:
        raise InvalidOption(f"samples must be at least 2, there is no variance otherwise; got {samples}")
    generator = torch.Generator().manual_seed(0)
    sums: _Sums | None = None
    with evaluating(model), torch.enable_grad():
        for batch in _samples(data, samples):
            record = _forward(model, batch, hidden)
            if sums is None:
                sums = _Sums.start(record, resamples)
            sums.check(record, model)
            _add(sums, record, generator)
    assert sums is not None  # `batches` refuses data without samples
    return sums.energy()


def _samples(data: Any, limit: int) -> Iterator[Batch]:
    """The first samples of some data, so many in all, in batches whose features are no more than a chunk.

    Of data that is one batch evenly spaced samples are taken. Targets are left out.
    """
    left = limit
    for batch in batches(data):
        count = min(left, batch.size)
        evenly = is_one_batch(data) and count < batch.size
        some = batch.take(torch.linspace(0, batch.size - 1, count).round().long()) if evenly else batch.first(count)
        features = _argument(some)[1]
        yield from some.without_target().split(max(1, min(_AT_ONCE, _CHUNK // max(features[0].numel(), 1))))
        left -= count
        if not left:
            return


def _argument(batch: Batch) -> tuple[int | str, Tensor]:
    """The place or name of the features, the first floating-point tensor with more than one axis, and the features."""
    given: list[tuple[int | str, Any]] = [*enumerate(batch.positional), *batch.named.items()]
    for key, value in given:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
            return key, value
    found = [f"{v.dtype} {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__ for _, v in given]
    raise InvalidOption(
        f"data: expected a floating-point tensor (samples, features…), got {', '.join(found)}; the effect of token "
        "numbers has no derivative: pass their embeddings as {'inputs_embeds': …}"
    )


@dataclass
class _WeightedVariance:
    """Weighted sums of a variable and its square around a centre that keeps them small."""

    centre: Tensor  # (features,)
    first: Tensor  # (weightings, features)
    second: Tensor

    @classmethod
    def start(cls, values: Tensor, weightings: int) -> _WeightedVariance:
        zeros = values.new_zeros(weightings, values.shape[1])
        return cls(values.mean(0), zeros, zeros.clone())

    def add(self, values: Tensor, weights: Tensor) -> None:
        values = values - self.centre
        self.first += weights @ values
        self.second += weights @ values.square()

    def variance(self, count: Tensor) -> Tensor:
        """(weightings, features)"""
        return (self.second / count - (self.first / count).square()).clamp(min=0)


@dataclass
class _Sums:
    shape: tuple[int, int]
    layers: dict[str, int]
    count: Tensor  # (weightings, 1): the first weighting counts every sample once, the others are bootstrap samples
    squares: Tensor  # (weightings, outputs, inputs)
    moments: _WeightedVariance
    hidden_squares: dict[str, Tensor]  # (outputs, neurons)
    hidden_moments: dict[str, _WeightedVariance]
    rows: dict[str, int]  # of each layer's neurons: samples times positions
    samples: int = 0

    @classmethod
    def start(cls, record: _Record, resamples: int) -> _Sums:
        outputs, features = record.shape
        room = _MEMORY // max(8 * outputs * features, 1)
        if room < 1 + min(resamples, 2):
            raise InvalidOption(
                f"discover: {outputs} outputs × {features} inputs do not fit into {_MEMORY >> 20} MiB; pass smaller "
                "inputs or a model that returns fewer outputs"
            )
        weightings = 1 + min(resamples, room - 1)
        flat = _flat(record.inputs)
        neurons = {name: _rows(h) for name, h in record.hidden.items()}
        return cls(
            (outputs, features),
            {name: h.shape[1] for name, h in neurons.items()},
            flat.new_zeros(weightings, 1),
            flat.new_zeros(weightings, outputs, features),
            _WeightedVariance.start(flat, weightings),
            {name: flat.new_zeros(outputs, h.shape[1]) for name, h in neurons.items()},
            {name: _WeightedVariance.start(h, 1) for name, h in neurons.items()},
            dict.fromkeys(neurons, 0),
        )

    def check(self, record: _Record, model: nn.Module) -> None:
        found = record.shape
        if found != self.shape or {name: h.shape[-1] for name, h in record.hidden.items()} != self.layers:
            raise InvalidOption(
                f"data: expected the same {self.shape[1]} inputs and {self.shape[0]} outputs of {type(model).__name__} "
                f"in every batch, got {found[1]} and {found[0]}; pad or crop the samples to one size"
            )

    def energy(self) -> Energy:
        variance = self.moments.variance(self.count)
        found = (self.squares / self.count[:, None] * variance[:, None]).cpu().numpy()
        hidden = {
            name: squares / self.samples * self.hidden_moments[name].variance(self.count.new_tensor(self.rows[name]))
            for name, squares in self.hidden_squares.items()
        }
        if not np.isfinite(found).all():
            raise InvalidMatrix(
                f"discover: derivatives by input {np.argwhere(~np.isfinite(found))[0, 2]} are not finite on this data; "
                "check the model's weights and the data for infinities and NaN"
            )
        return Energy(found[0], found[1:], {name: e.cpu().numpy() for name, e in hidden.items()}, self.samples)


@dataclass(frozen=True)
class _Record:
    """One pass through the model, with its graph."""

    inputs: Tensor
    outputs: Tensor
    hidden: dict[str, Tensor]  # what linear layers returned

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs.shape[-1], self.inputs[0].numel()


def _forward(model: nn.Module, batch: Batch, hidden: bool) -> _Record:
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with ExitStack() as stack:
        for name, layer in model.named_modules() if hidden else ():
            if not isinstance(layer, nn.Linear):
                continue

            def keep(_layer: nn.Module, _inputs: Any, output: Tensor, name: str = name) -> Tensor:
                passed = output.clone()  # the original stays what it is when an activation works in place
                seen.setdefault(name, []).append((output, passed))
                return passed

            stack.callback(layer.register_forward_hook(keep).remove)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        place, features = _argument(batch.to(device))
        inputs = features.detach().requires_grad_()
        if isinstance(place, int):
            positional = (*batch.positional[:place], inputs, *batch.positional[place + 1 :])
            outputs = replace(batch, positional=positional).call(model)
        else:
            outputs = replace(batch, named={**batch.named, place: inputs}).call(model)
    if outputs.shape[:1] != inputs.shape[:1] or not outputs.is_floating_point():
        raise InvalidOption(
            f"{type(model).__name__}: expected floating-point outputs ({len(inputs)} samples, …, outputs), got "
            f"{outputs.dtype} {tuple(outputs.shape)}"
        )
    outputs = outputs if outputs.ndim > 1 else outputs[:, None]
    once = {name: found[0] for name, found in seen.items() if len(found) == 1}
    return _Record(inputs, outputs, {name: h for name, (h, passed) in once.items() if passed is not outputs})


def _add(sums: _Sums, record: _Record, generator: torch.Generator) -> None:
    flat = _flat(record.inputs)
    weights = torch.ones(len(sums.count), len(flat))
    if len(weights) > 1:  # the Poisson bootstrap, which needs no second look at a sample
        weights[1:] = torch.poisson(weights[1:], generator)
    weights = weights.to(flat)
    sums.samples += len(flat)
    sums.count += weights.sum(1, keepdim=True)
    sums.moments.add(flat, weights)
    for name, neurons in record.hidden.items():
        values = _rows(neurons)
        sums.hidden_moments[name].add(values, values.new_ones(1, len(values)))
        sums.rows[name] += len(values)
    outputs = record.outputs
    if not outputs.requires_grad:  # they depend on nothing
        return
    # signs keep the positions of a sequence apart: their products cancel in the mean of the squares
    signs = torch.randint(0, 2, outputs.shape[:-1], generator=generator).to(outputs) * 2 - 1
    by = [record.inputs, *record.hidden.values()]
    # one output at a time: the samples already fill the processor, and batching outputs too is no faster
    for o in range(outputs.shape[-1]):
        direction = torch.zeros_like(outputs)
        direction[..., o] = signs
        by_inputs, *by_hidden = torch.autograd.grad(
            outputs, by, direction, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        sums.squares[:, o] += weights @ _flat(by_inputs).square()
        for name, gradient in zip(record.hidden, by_hidden, strict=True):
            sums.hidden_squares[name][o] += _rows(gradient).square().sum(0)


def _flat(features: Tensor) -> Tensor:
    """(samples, features)"""
    return features.detach().flatten(1).double()


def _rows(neurons: Tensor) -> Tensor:
    """(samples · positions, neurons)"""
    return neurons.detach().flatten(0, -2).double()
