"""`export`: a model as ONNX, in floating point or with 8-bit weights, checked in ONNX Runtime."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.files import sync_folder, writing
from crystallite.core.suggest import suggest_keywords
from crystallite.data.batch import Batch, batches
from crystallite.data.outputs import ROUNDING
from crystallite.export.comparison import Differs, InRuntime
from crystallite.export.int8 import quantised, with_plain_layers
from crystallite.export.past import take_past_
from crystallite.export.tracing import Axis, as_function, changed, is_text, named_inputs, named_outputs, twin_of, write
from crystallite.models.preparing import prepared

__all__ = ["Exported", "export"]

_CHECKED = 8  # batches, at most, that both run
_LARGEST = 2**31 - 2**24  # bytes of weights: a file of protobuf has at most 2 GB, the graph included


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's on the data it was checked with."""

    path: str
    bytes: int
    int8: bool
    samples: int
    deviation: float  # ‖y′ − y‖ / ‖y‖ over all samples, the largest over outputs
    agreement: float | None  # share of equal decisions (argmax) of the first output; None where it has none
    inputs: dict[str, tuple[int | str, ...]]  # their shapes, with names where any size is taken
    outputs: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what else the user should know

    def __str__(self) -> str:
        agreed = "" if self.agreement is None else f", {self.agreement:.2%} of decisions equal"
        kind = "with 8-bit weights" if self.int8 else "in floating point"
        said = (
            f"{self.path}: {self.bytes:,} bytes {kind}; relative deviation {self.deviation:.2g} from the model on "
            f"{self.samples} samples in ONNX Runtime{agreed}"
        )
        return "\n".join([said, *(f"note: {note}" for note in self.notes)])


@suggest_keywords
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    data: Any,
    *,
    past: bool = False,
    int8: bool = False,
    max_deviation: float = 0.1,
) -> Exported:
    """Write a model as ONNX, all of it or nothing, and say how near ONNX Runtime comes to it on some data.

    Inputs have the names of the model's arguments, outputs those of the fields it returns. Batch size and length of
    sequences stay free, which is tried out; height and width of pictures do if the batches differ in them. An axis that
    turns out not to be free is fixed, and a note says so. Rows of padding are not compared. Models in bfloat16 or
    float16 become float32, and a note says so. Fitted layers are smaller dense products, so ONNX Runtime runs and
    quantises them like any other.

    Args:
        model: the model; it is left as it was.
        path: a file that ends in .onnx.
        data: batches as for `validate`; the first is what the model is traced with. Targets are not used.
        past: for decoders of transformers: write one step of generation. It takes `past_key_values.N.key` and `.value`
            besides `input_ids`, `attention_mask` (past and new tokens) and, where the model has them, `position_ids`;
            it returns `present.N.key` and `.value` besides the logits. The first step has a past of length 0. Without
            it, the graph has no cache: it takes whole texts.
        int8: weights of linear layers as 8-bit integers, one scale per output; activations are quantised as they come.
            That suits encoders. Decoders lose much of their quality (SmolLM2-135M: perplexity 40 → 66), compressed or
            not; a note says so.
        max_deviation: refused where int8 is further away than this. Floating point may differ by rounding only.

    Returns:
        What was written, and how near ONNX Runtime comes to the model on the data.

    Raises:
        InvalidOption: the model cannot be written as ONNX, or the file would deviate by more than is allowed; nothing
            is written then.
        CrystalliteError: a package is missing.
    """
    target = Path(path)
    if target.suffix != ".onnx":
        raise InvalidOption(f"{target}: expected a name that ends in .onnx")
    model, _ = prepared(model)
    library = _libraries()
    weight = next(model.parameters(), None)
    if weight is not None and weight.device.type != "cpu":
        raise InvalidOption(f"expected a model on the CPU, got one on {weight.device}; call .cpu() first")
    given = [batch.without_target() for batch in islice(batches(data), _CHECKED)]
    function, half = as_function(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*function.parameters(), *function.buffers()))
    if size > _LARGEST:
        raise InvalidOption(
            f"{type(model).__name__} has {size / 1e9:.1f} GB of weights{' in float32' if half else ''}, and a file of "
            "ONNX holds 2 GB; compress it first, or export parts of it"
        )
    checked = [_in_single_precision(batch) if half else batch for batch in given]
    checked += _padded(function, checked)
    if past:
        traced, *checked = take_past_(function, checked)
    else:
        traced = _at_least_two(checked[0])
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    with writing(target), folder as made:
        file = Path(made) / "model.onnx"
        graph = _write_with_free_axes(library, function, int8, file, traced, _equal_axes(function, traced, checked))
        if int8:
            file = quantised(file)
            graph = InRuntime(library, file, function)
        found = graph.compare(checked)
        limit = max_deviation if int8 else _rounding(function)
        if not found[0] <= limit:
            raise InvalidOption(
                f"{target}: not written: in ONNX Runtime its outputs deviate by {found[0]:.3g}, at most {limit:g} "
                f"is allowed{'; raise max_deviation=, or export without int8=True' if int8 else ''}"
            )
        length = file.stat().st_size
        sync_folder(file.parent)
        file.replace(target)
    notes = [
        *([f"computes in float32: the weights were {half}, for which ONNX Runtime lacks operators"] if half else []),
        *_fixed_axes(graph),
        *([_DECODERS] if int8 and _generates(model) else []),
    ]
    samples = sum(batch.size for batch in given)
    return Exported(str(target), length, int8, samples, *found, graph.inputs, graph.outputs, tuple(notes))


_DECODERS = (
    "activations quantised as they come cost models that generate text much of their quality; compare perplexities "
    "before using this file, or export in floating point"
)


def _libraries() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  what torch.onnx writes with
    except ImportError:
        raise CrystalliteError("exporting needs onnx and onnxruntime: pip install 'crystallite[onnx]'") from None
    return onnxruntime


def _equal_axes(model: nn.Module, traced: Batch, checked: list[Batch]) -> set[Axis]:
    """Axes that are fixed from the start: heads of past keys, and of pictures those that are equal in all batches.

    Following a transformer of pictures through pictures of any size can take torch.export many minutes.
    """
    inputs = [named_inputs(model, batch) for batch in (traced, *checked)]
    found = {(name, axis) for name in inputs[0] if name.startswith("past_key_values.") for axis in (1, 3)}
    for name, value in inputs[0].items():
        if value.ndim > 3 and value.is_floating_point() and not name.startswith("past_key_values."):
            sizes = [tuple(other[name].shape) for other in inputs if name in other]
            found |= {(name, axis) for axis in range(1, value.ndim) if len({size[axis] for size in sizes}) == 1}
    return found


def _write_with_free_axes(
    library: Any, function: nn.Module, int8: bool, file: Path, traced: Batch, fixed: set[Axis]
) -> InRuntime:
    """The written graph.

    An axis that torch.export left free is tried with another size: a size that entered the graph as a constant shows,
    and the axis is fixed.
    """
    outputs = list(named_outputs(traced.run(function)))
    while True:
        write(with_plain_layers(function) if int8 else function, file, traced, outputs, fixed)
        graph = InRuntime(library, file, function)
        wrong = next((axes for axes, batch in _other_sizes(graph, traced) if not _agrees(graph, batch)), None)
        if wrong is None:
            return graph
        fixed = fixed | set(wrong)


def _fixed_axes(graph: InRuntime) -> Iterator[str]:
    """What to say of axes that the graph has fixed where a user might expect a free one.

    Code that loops over the tokens of a text, for instance, becomes a graph for as many tokens.
    """
    for name, shape in graph.inputs.items():
        if not name.startswith("past_key_values."):
            sizes = ", ".join(map(str, shape))
            if any(isinstance(size, int) for size in (shape if is_text(name, shape) else shape[:1])):
                yield f"{name} is taken in this shape only: {sizes}"
            elif len(shape) > 3 and all(isinstance(size, int) for size in shape[1:]):
                yield f"{name} is taken in this shape only: {sizes}; give batches of several sizes for others"


def _other_sizes(graph: InRuntime, batch: Batch) -> Iterator[tuple[list[Axis], Batch]]:
    """Axes that share a free size, and the batch with half of it; where the model itself can be called so."""
    inputs = named_inputs(graph.model, batch)
    places: dict[str, list[Axis]] = {}
    for name, shape in graph.inputs.items():
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                places.setdefault(size, []).append((name, axis))
    steps = "past_sequence_length" in places  # whose lengths depend on each other: other steps are among the data
    for axes in [places["batch_size"]] if steps else places.values():
        other = _cut(batch, inputs, axes)
        if _runs(twin_of(graph.model), other):
            yield axes, other


def _cut(batch: Batch, inputs: dict[str, Tensor], axes: list[Axis]) -> Batch:
    """The batch with the first half along some axes of its inputs."""
    cut = dict(inputs)
    for name, axis in axes:
        cut[name] = cut[name].narrow(axis, 0, max(cut[name].shape[axis] // 2, 1))
    values = iter(cut.values())
    return changed(batch, lambda _: next(values))


def _runs(model: nn.Module, batch: Batch) -> bool:
    try:
        batch.run(model)
    except Exception:  # whatever the model's own code raises where it takes no such batch
        return False
    return True


def _agrees(graph: InRuntime, batch: Batch) -> bool:
    try:  # on a copy: there are models, as Swin, that change to suit the size of what they are given, for good
        return graph.compare([batch], twin_of(graph.model))[0] <= _rounding(graph.model)
    except Differs:
        return False


def _padded(model: nn.Module, checked: list[Batch]) -> list[Batch]:
    """A batch with padding, where those given have a mask and none: in front of texts that are to be continued."""
    masks = [batch.named.get("attention_mask") for batch in checked]
    mask = masks[0]
    if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[1] < 3:
        return []
    if any(isinstance(other, Tensor) and not other.bool().all() for other in masks):
        return []
    third = mask.shape[1] // 3
    mask = mask.clone()
    mask[0, slice(None, third) if _generates(model) else slice(-third, None)] = 0
    padded = replace(checked[0], named={**checked[0].named, "attention_mask": mask})
    return [padded] if _runs(model, padded) else []


def _generates(model: nn.Module) -> bool:
    asked = getattr(model, "can_generate", None)
    return callable(asked) and bool(asked())


def _at_least_two(batch: Batch) -> Batch:
    """The batch, a single sample twice: an axis of size 1 would be taken to have that size for good."""
    return batch if batch.size > 1 else batch.take(torch.tensor([0, 0]))


def _in_single_precision(batch: Batch) -> Batch:
    return changed(batch, lambda value: value.float() if value.dtype in (torch.bfloat16, torch.float16) else value)


def _rounding(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return ROUNDING.get(dtype, max(ROUNDING.values()))
