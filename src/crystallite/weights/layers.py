"""Says what each tensor of a checkpoint is, and gives its matrices (out, in), without any model code.

Module classes and ONNX nodes are believed first; names and shapes decide the rest. Every tensor ends up in exactly
one `Layer` (a stack of experts or directions in one for each): tied ones with the tensor they share, and what is no
matrix of weights as `skipped`, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from crystallite.core.errors import CheckpointError
from crystallite.weights.checkpoint import Checkpoint
from crystallite.weights.names import Tensors, is_fused_qkv, layer_name, role_from_name
from crystallite.weights.stored import Array, Layout, Role, TensorInfo

__all__ = ["Kind", "Layer", "recognise"]

Kind = Literal["linear", "conv", "embedding", "recurrent", "attention", "skipped"]


@dataclass(frozen=True)
class Layer:
    """One tensor of weights and what it means; `rows` and `cols` are those of each of its matrices.

    `feedback` marks the hidden-to-hidden weights of a recurrent layer: one square matrix per gate. `parts` are the
    row counts of query, key and value in a fused matrix (some models interleave them head by head). `groups` of a
    convolution is None where names alone cannot tell.
    """

    name: str
    kind: Kind
    tensors: tuple[str, ...]
    reason: str = ""
    rows: int = 0
    cols: int = 0
    fan_in: int = 0
    fan_out: int = 0
    aliases: tuple[str, ...] = ()
    feedback: bool = False
    gates: int = 1
    gate_names: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    groups: int | None = None
    layout: Layout = field(default="out-in", repr=False)
    place: int | None = None  # which matrix of a 3-D stack this is; None where the tensor is one matrix

    def matrices(self, checkpoint: Checkpoint) -> list[tuple[str, Array]]:
        """The layer's 2-D matrices (out, in) with their labels, as views where memory allows it; [] when skipped.

        A feedback layer gives one per gate; every other layer gives one, labelled "".

        >>> import torch
        >>> from crystallite.weights.checkpoint import open_checkpoint
        >>> gru = open_checkpoint(torch.nn.GRU(3, 4))
        >>> [(label, tuple(m.shape)) for label, m in recognise(gru)[1].matrices(gru)]
        [('r', (4, 4)), ('z', (4, 4)), ('n', (4, 4))]
        """
        if self.kind == "skipped":
            return []
        if self.kind == "conv":
            weight = self.channels(checkpoint)
            return [("", weight.reshape(weight.shape[0], -1))]
        weight = checkpoint.read(self.tensors[0])
        if self.place is not None:
            weight = weight[self.place]
        if self.layout == "in-out":
            weight = weight.swapaxes(-1, -2)
        if not self.feedback:
            return [("", weight)]
        return [(gate, weight[i * self.rows : (i + 1) * self.rows]) for i, gate in enumerate(self.gate_names)]

    def channels(self, checkpoint: Checkpoint) -> Array:
        """A convolution's weight as (out channels, in channels per group, *kernel)."""
        if self.kind != "conv":
            raise CheckpointError(f"{self.name}: only a convolution has channels, this is {self.kind}")
        weight: Any = checkpoint.read(self.tensors[0])
        if self.layout == "kernel-in-out":  # Keras
            return _kernel_last(weight)
        if self.layout == "in-out":  # transposed convolution: (in, out per group, *kernel)
            groups = self.groups or 1
            split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
            joined: Array = split.swapaxes(1, 2).reshape(-1, weight.shape[0] // groups, *weight.shape[2:])
            return joined
        plain: Array = weight
        return plain


def recognise(checkpoint: Checkpoint) -> list[Layer]:
    """One `Layer` per tensor of the checkpoint, in its order; tied tensors are listed under the first of them.

    A 3-D stack of matrices (experts, or the directions of a recurrent layer) gives one for each of them.

    >>> import torch
    >>> from crystallite.weights.checkpoint import open_checkpoint
    >>> for layer in recognise(open_checkpoint(torch.nn.LSTM(3, 4))):
    ...     print(layer.name, layer.kind, layer.reason, layer.gates, layer.feedback)
    weight_ih_l0 recurrent  4 False
    weight_hh_l0 recurrent  4 True
    bias_ih_l0 skipped bias 1 False
    bias_hh_l0 skipped bias 1 False
    """
    aliases: dict[str, list[str]] = {}
    for info in checkpoint.tensors.values():
        if info.alias_of is not None:
            aliases.setdefault(info.alias_of, []).append(info.name)
    layers: list[Layer] = []
    taken: set[str] = set()
    tensors = Tensors(checkpoint.tensors)
    for info in checkpoint.tensors.values():
        if info.alias_of is None:
            short = layer_name(info.name)
            name = info.name if short in taken else short
            taken.add(name)
            role = _role(checkpoint, info, tensors)
            layers += _unstacked(_layer(checkpoint, info, name, role, tuple(aliases.get(info.name, ()))), info)
    return layers


def _unstacked(layer: Layer, info: TensorInfo) -> list[Layer]:
    """The layer, or one for each matrix of its stack."""
    if layer.kind in ("skipped", "conv") or len(info.shape) != 3:
        return [layer]
    count = info.shape[0]
    if count == 1 or layer.kind == "embedding":
        return [replace(layer, place=0)]
    labels = ["forward", "backward"] if layer.kind == "recurrent" and count == 2 else [str(i) for i in range(count)]
    return [replace(layer, name=f"{layer.name}[{label}]", place=i) for i, label in enumerate(labels)]


def _layer(checkpoint: Checkpoint, info: TensorInfo, name: str, role: Role, aliases: tuple[str, ...]) -> Layer:
    if role.kind == "skipped":
        return Layer(info.name, "skipped", (info.name,), role.reason, aliases=aliases)
    if role.kind == "conv":
        return _conv(info, name, role, aliases)
    rows, cols = info.shape[-2:] if role.layout == "out-in" else info.shape[:-3:-1]
    gate_names = role.gates if role.kind == "recurrent" else ()
    if role.feedback:
        rows //= len(gate_names)
    return Layer(
        name,
        role.kind,  # type: ignore[arg-type]
        (info.name,),
        rows=rows,
        cols=cols,
        fan_in=cols,
        fan_out=rows,
        aliases=aliases,
        feedback=role.feedback,
        gates=max(1, len(gate_names)),
        gate_names=gate_names,
        parts=_parts(rows, cols, checkpoint.config) if role.kind == "attention" else (),
        layout=role.layout,
    )


def _role(checkpoint: Checkpoint, info: TensorInfo, tensors: Tensors) -> Role:
    """What the users of the tensor say, as far as its shape can bear it; else what its name says."""
    model_type = checkpoint.config.get("model_type")
    guess = role_from_name(info, tensors, model_type if isinstance(model_type, str) else "")
    said = checkpoint.roles.get(info.name)
    if said is None or (guess.kind == "skipped" and guess.reason in _FINAL_REASONS):
        return guess
    if said.kind == "linear" and guess.kind == "recurrent":  # an unrolled cell multiplies like any other layer
        return guess
    if not said.certain and guess.kind in ("skipped", "embedding", "recurrent", "attention"):
        return guess
    ndim = len(info.shape)
    bearable = {"linear": ndim in (2, 3), "attention": ndim == 2, "embedding": ndim == 2, "recurrent": ndim in (2, 3)}
    if not bearable.get(said.kind, ndim >= 3 or said.kind == "skipped"):
        return guess if guess.kind == "skipped" else Role("skipped", f"{ndim}-D")
    if said.kind == "conv" and said.groups is not None and (said.groups < 1 or info.shape[0] % said.groups):
        return Role("skipped", f"{said.groups} groups")
    if said.kind == "linear" and ndim == 2 and is_fused_qkv(info.name):
        return Role("attention", layout=said.layout)
    if said.kind == "recurrent" and said.feedback and info.shape[-2] != len(said.gates) * info.shape[-1]:
        return Role("linear")
    return said


_FINAL_REASONS = ("position ids", "integer", "empty", "scalar")  # numbers that are no weights, whoever uses them


def _conv(info: TensorInfo, name: str, role: Role, aliases: tuple[str, ...]) -> Layer:
    if role.layout == "kernel-in-out":
        kernel, inputs, outputs = info.shape[:-2], info.shape[-2], info.shape[-1]
    elif role.layout == "in-out":
        kernel, inputs = info.shape[2:], info.shape[0] // (role.groups or 1)
        outputs = info.shape[1] * (role.groups or 1)
    else:
        outputs, inputs, kernel = info.shape[0], info.shape[1], info.shape[2:]
    positions = math.prod(kernel)
    return Layer(
        name,
        "conv",
        (info.name,),
        rows=outputs,
        cols=inputs * positions,
        fan_in=inputs * positions,
        fan_out=outputs * positions,
        aliases=aliases,
        kernel=tuple(kernel),
        groups=role.groups,
        layout=role.layout,
    )


def _parts(rows: int, cols: int, config: dict[str, Any]) -> tuple[int, ...]:
    """Row counts of query, key and value; grouped-query models have more rows for the first."""
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads > 0 and shared > 0:
        size, rest = divmod(rows, heads + 2 * shared)
        if not rest:
            return heads * size, shared * size, shared * size
    if cols < rows < 3 * cols and (rows - cols) % 2 == 0:
        return cols, (rows - cols) // 2, (rows - cols) // 2
    return (rows // 3,) * 3 if rows % 3 == 0 else (rows,)


def _kernel_last(weight: Array) -> Array:
    """(*kernel, in, out) → (out, in, *kernel) as a view."""
    axes = (weight.ndim - 1, weight.ndim - 2, *range(weight.ndim - 2))
    return weight.transpose(axes) if isinstance(weight, np.ndarray) else weight.permute(axes)
