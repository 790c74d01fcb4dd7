"""`Joining`: requests of several clients as one batch, filled up to one length where that changes no answer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from crystallite.serving.signature import Tensors, TensorSpec

__all__ = ["Joining"]


@dataclass(frozen=True)
class Joining:
    """How requests become one batch, and its answer theirs again.

    Along `padded` axes shorter requests are filled up and masked, and their answers cut. All other axes must be equal
    in a batch. A model that mixes the samples of a batch computes each request alone.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    padded: frozenset[str] = frozenset()  # names of axes
    padding: Mapping[str, int] = field(default_factory=dict)  # what an input is filled up with, if not with 0
    masks: tuple[str, ...] = ()  # inputs that say what is no padding: ones where a request has none
    alone: bool = False

    def __str__(self) -> str:
        if self.alone:
            return "computes each request alone: samples of one batch change each other's answers"
        if self.padded:
            axes = " and ".join(sorted(self.padded))
            return f"computes requests together, filled up to one {axes}{' and masked' * bool(self.masks)}"
        free = any(isinstance(axis, str) for spec in self.inputs for axis in spec.shape)
        return f"computes requests {'of equal shapes ' * free}together"

    def completed(self, given: Tensors) -> Tensors:
        """The inputs with the masks that say that all of it counts."""
        missing = [spec for spec in self.inputs if spec.name in self.masks and spec.name not in given]
        if not missing:
            return given
        sizes = self._sizes(given)
        samples = next(iter(given.values())).shape[0]
        found = dict(given)
        for spec in missing:
            shape = [sizes.get(axis, 0) if isinstance(axis, str) else axis for axis in spec.shape]
            found[spec.name] = torch.ones(samples, *shape, dtype=spec.dtype)
        return found

    def key(self, given: Tensors) -> Hashable:
        """What requests must have in common to be one batch."""
        if self.alone:
            return object()
        sizes = []
        for spec in self.inputs:
            if spec.name in given:
                found = zip(spec.shape, given[spec.name].shape[1:], strict=True)
                sizes.append((spec.name, *(None if axis in self.padded else size for axis, size in found)))
        return tuple(sizes)

    def length(self, given: Tensors) -> int:
        """The numbers of a sample along padded axes: what filling up would change. 1 where nothing is filled up."""
        sizes = self._sizes(given)
        return sum(sizes[axis] for axis in sizes if axis in self.padded) or 1

    def joined(self, parts: Sequence[Tensors]) -> Tensors:
        """Requests with one key as one batch."""
        if len(parts) == 1:
            return parts[0]
        return {spec.name: self._together(spec, parts) for spec in self.inputs if spec.name in parts[0]}

    def split(self, answer: Tensors, parts: Sequence[Tensors]) -> list[Tensors]:
        """The answer of each request, as long as the request was."""
        if len(parts) == 1:
            return [answer]
        samples = [next(iter(part.values())).shape[0] for part in parts]
        rows = {name: value.split(samples) for name, value in answer.items()}
        if not self.padded:
            return [{name: rows[name][i] for name in rows} for i in range(len(parts))]
        axes = {spec.name: spec.shape for spec in self.outputs}
        found: list[Tensors] = []
        for i, part in enumerate(parts):
            sizes = self._sizes(part)
            found.append({name: _cut(rows[name][i], axes.get(name, ()), sizes) for name in rows})
        return found

    def _together(self, spec: TensorSpec, parts: Sequence[Tensors]) -> Tensor:
        tensors = [part[spec.name] for part in parts]
        places = [i for i, axis in enumerate(spec.shape, 1) if axis in self.padded]
        value = self.padding.get(spec.name, 0)
        for place in places:
            longest = max(x.shape[place] for x in tensors)
            behind = [0, 0] * (tensors[0].ndim - 1 - place)
            tensors = [
                x if x.shape[place] == longest else F.pad(x, [*behind, 0, longest - x.shape[place]], value=value)
                for x in tensors
            ]
        return torch.cat(tensors)

    def _sizes(self, given: Tensors) -> dict[str, int]:
        """The size of each free axis."""
        sizes: dict[str, int] = {}
        for spec in self.inputs:
            if spec.name in given:
                for axis, size in zip(spec.shape, given[spec.name].shape[1:], strict=True):
                    if isinstance(axis, str):
                        sizes[axis] = size
        return sizes


def _cut(y: Tensor, axes: Sequence[int | str], sizes: Mapping[str, int]) -> Tensor:
    for place, axis in enumerate(axes, 1):
        if isinstance(axis, str) and axis in sizes and y.shape[place] > sizes[axis]:
            y = y.narrow(place, 0, sizes[axis])
    return y
