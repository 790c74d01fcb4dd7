"""`Signature`: the named tensors that a model takes and returns, and the checks of a request before it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from crystallite.serving.refusal import Refusal

__all__ = [
    "BYTES",
    "DATATYPES",
    "INPUT",
    "OUTPUT",
    "Answer",
    "Axis",
    "Given",
    "Signature",
    "TensorSpec",
    "Tensors",
    "named_classes",
]

Tensors = Mapping[str, Tensor]
Given = Tensors | list[str]  # tensors by name, or texts
Answer = Mapping[str, Tensor | list[str]]  # outputs by name, strings in the place of BYTES
Axis = int | str  # a size, or the name of a free axis: axes of one name have one size in a request
INPUT, OUTPUT = "input", "output"  # of a model that takes one tensor, or returns one, and has no name for it
BYTES = "BYTES"

# names in the Open Inference Protocol
DATATYPES = {
    torch.float64: "FP64", torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "INT64", torch.int32: "INT32", torch.int16: "INT16", torch.int8: "INT8", torch.uint8: "UINT8",
}  # fmt: skip


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor, whose first axis counts samples.

    >>> str(TensorSpec("input_ids", torch.int64, ("length",), below=100))
    'input_ids INT64 [samples, length]'
    """

    name: str
    dtype: torch.dtype | None  # None: strings
    shape: tuple[Axis, ...]  # of one sample
    optional: bool = False
    below: int | None = None  # integers must stay below it, and not be negative
    labels: tuple[str, ...] = ()  # of an output whose last axis is classes with names

    @property
    def datatype(self) -> str:
        """Its name in the protocol."""
        return BYTES if self.dtype is None else DATATYPES[self.dtype]

    @property
    def sizes(self) -> list[int]:
        """As metadata say it: -1 for what is free, samples included."""
        return [-1, *(axis if isinstance(axis, int) else -1 for axis in self.shape)]

    @property
    def described_shape(self) -> str:
        """As errors say it."""
        return f"[{', '.join(['samples', *map(str, self.shape)])}]"

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape may be one, with at least one sample."""
        if len(shape) != len(self.shape) + 1 or not shape[0]:
            return False
        wanted = zip(shape[1:], self.shape, strict=True)
        return all(size == axis if isinstance(axis, int) else size > 0 for size, axis in wanted)

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {self.described_shape}{', optional' * self.optional}"


@dataclass(frozen=True)
class Signature:
    """Named inputs and outputs. Text, where it is taken, comes instead of the inputs and has outputs of its own."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    longest: Mapping[str, int] = field(default_factory=dict)  # of free axes, where the model has an end
    text: TensorSpec | None = None
    text_outputs: tuple[TensorSpec, ...] = ()

    @property
    def all_inputs(self) -> tuple[TensorSpec, ...]:
        """With the text."""
        return self.inputs if self.text is None else (*self.inputs, self.text)

    def input(self, name: object) -> TensorSpec:
        """The input of that name; a `Refusal` that says which there are."""
        for spec in self.all_inputs:
            if spec.name == name:
                return spec
        names = ", ".join(repr(spec.name) for spec in self.all_inputs)
        raise Refusal(400, f"inputs: expected {'one of ' * (len(self.all_inputs) > 1)}{names}, got {name!r:.80}")

    def outputs_for(self, is_text: bool) -> tuple[TensorSpec, ...]:
        """What is answered to tensors, or to text."""
        return self.text_outputs if is_text else self.outputs

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse inputs that are missing, unknown or there twice, and text beside other inputs."""
        for name in names:
            self.input(name)
        if len(set(names)) < len(names):
            twice = next(name for name in names if list(names).count(name) > 1)
            raise Refusal(400, f"inputs: expected each tensor once, got {twice!r:.80} twice")
        if self.text is not None and self.text.name in names:
            if len(names) > 1:
                raise Refusal(400, f"inputs: expected {self.text.name!r} alone, got {', '.join(names):.200}")
            return
        missing = [spec.name for spec in self.inputs if not spec.optional and spec.name not in names]
        if missing:
            other = "" if self.text is None else f", or {self.text.name!r} alone"
            raise Refusal(400, f"inputs: expected {missing[0]!r}{other}, got {', '.join(names) or 'none':.200}")

    def check(self, given: Tensors) -> int:
        """The number of samples; refuses inputs of other names, shapes, datatypes or values than the model takes."""
        self.check_names(list(given))
        sizes: dict[str, tuple[str, int]] = {}  # axis → where it was seen, and how long it was
        for name, x in given.items():
            spec = self.input(name)
            if x.dtype != spec.dtype:
                found = DATATYPES.get(x.dtype, str(x.dtype))
                raise Refusal(400, f"{name}: expected datatype {spec.datatype}, got {found}")
            if not spec.fits(x.shape):
                raise Refusal(400, f"{name}: expected shape {spec.described_shape}, got {list(x.shape)}")
            for axis, size in zip(("samples", *spec.shape), x.shape, strict=True):
                if isinstance(axis, int):
                    continue
                other, known = sizes.setdefault(axis, (name, size))
                if size != known:
                    raise Refusal(400, f"{name}: expected {axis} {known}, as {other} has, got shape {list(x.shape)}")
                if size > self.longest.get(axis, size):
                    most = self.longest[axis]
                    raise Refusal(400, f"{name}: expected {axis} of at most {most}, got shape {list(x.shape)}")
            _check_values(spec, x)
        return next(iter(given.values())).shape[0]

    def lines(self) -> Iterator[str]:
        """What it takes and returns, a line each."""
        longest = {axis: f", {axis} up to {most}" for axis, most in self.longest.items()}
        for spec in self.all_inputs:
            yield f"takes {spec}{''.join(text for axis, text in longest.items() if axis in spec.shape)}"
        for spec in (*self.outputs, *self.text_outputs):
            yield f"returns {spec}"


def named_classes(signature: Signature, config: Any) -> Signature:
    """With the names of classes that the config of a transformers model has (`id2label`), beside its logits.

    A config that names none counts them: LABEL_0, LABEL_1, … Those are no names.
    """
    known = getattr(config, "id2label", None) or {}
    labels = tuple(str(known.get(place, "")) for place in range(len(known)))
    if not all(labels) or labels == tuple(f"LABEL_{place}" for place in range(len(known))):
        return signature
    outputs = (
        replace(spec, labels=labels) if spec.name == "logits" and spec.shape[-1:] == (len(labels),) else spec
        for spec in signature.outputs
    )
    return replace(signature, outputs=tuple(outputs))


def _check_values(spec: TensorSpec, x: Tensor) -> None:
    if spec.below is not None:
        least, most = int(x.min()), int(x.max())
        if least < 0 or most >= spec.below:
            wrong = least if least < 0 else most
            raise Refusal(400, f"{spec.name}: expected integers from 0 to {spec.below - 1}, got {wrong}")
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise Refusal(400, f"{spec.name}: expected finite numbers, got NaN or infinity")
