"""A model as ONNX, in floating point, in 8-bit integers or with weights of fewer bits, checked in ONNX Runtime."""

from __future__ import annotations

import math
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
from crystallite.data.batch import Batch, batches
from crystallite.data.outputs import ROUNDING
from crystallite.export.comparison import Differs, InRuntime
from crystallite.export.int8 import count_floats, quantised, with_plain_layers
from crystallite.export.past import take_past_
from crystallite.export.tracing import Axis, as_function, changed, is_text, named_inputs, named_outputs, twin_of, write
from crystallite.export.weight_only import with_rounded_weights
from crystallite.models.preparing import prepared

__all__ = ["TYPES", "Exported", "export_onnx"]

TYPES = ("f32", "q8_0", "q4_1", "q4_0")
_NEAR = {"int8": 0.1, "q8_0": 0.1, "q4_1": 0.3, "q4_0": 0.3}  # deviations that are usual, or there is a mistake
_FEW = 0.1  # of the weights, that may stay in floating point without a word
_CHECKED = 8  # batches, at most, that both run
_LARGEST = 2**31 - 2**24  # bytes of weights: a file of protobuf has at most 2 GB, the graph included


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's on the data it was checked with."""

    path: str
    bytes: int  # with those of the file of weights beside it, where there is one
    type: str  # of the weights; "int8" where activations are quantised too
    samples: int
    deviation: float  # ‖y′ − y‖ / ‖y‖ over all samples, the largest over outputs
    agreement: float | None  # share of equal decisions (argmax) of the first output; None where it has none
    inputs: dict[str, tuple[int | str, ...]]  # their shapes, with names where any size is taken
    outputs: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what else the user should know

    def __str__(self) -> str:
        agreed = "" if self.agreement is None else f", {self.agreement:.2%} of decisions equal"
        kinds = {"f32": "in floating point", "int8": "with 8-bit weights"}
        kind = kinds.get(self.type, f"with weights in {self.type}")
        said = (
            f"{self.path}: {self.bytes:,} bytes {kind}; relative deviation {self.deviation:.2g} from the model on "
            f"{self.samples} samples in ONNX Runtime{agreed}"
        )
        return "\n".join([said, *(f"note: {note}" for note in self.notes)])


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    data: Any,
    *,
    past: bool = False,
    int8: bool = False,
    type: str = "f32",
    max_deviation: float | None = None,
) -> Exported:
    """What `export` does for a name that ends in .onnx."""
    target, kind = Path(path), "int8" if int8 else type
    model, _ = prepared(model)
    library = _libraries()
    weight = next(model.parameters(), None)
    if weight is not None and weight.device.type != "cpu":
        raise InvalidOption(f"expected a model on the CPU, got one on {weight.device}; call .cpu() first")
    given = [batch.without_target() for batch in islice(batches(data), _CHECKED)]
    function, half = as_function(model)
    plain = function if kind == "f32" else with_plain_layers(function)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*function.parameters(), *function.buffers()))
    apart = size > _LARGEST  # weights stand in a file of their own
    checked = [_in_single_precision(batch) if half else batch for batch in given]
    checked += _padded(function, checked)
    if past:
        if plain is not function:
            take_past_(plain, checked)
        traced, *checked = take_past_(function, checked)
    else:
        traced = _at_least_two(checked[0])
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    with writing(target), folder as made:
        file = Path(made) / "float" / target.name  # a file of weights is found by its name
        file.parent.mkdir()
        graph = _write_with_free_axes(
            library, function, plain, file, apart, traced, _equal_axes(function, traced, checked)
        )
        if kind != "f32":
            del graph.session  # which holds the weights once more
            file = quantised(file, apart) if int8 else with_rounded_weights(file, type, _LARGEST)
            graph = InRuntime(library, file, function)
        found = graph.compare(checked)
        limit = _rounding(function)
        if kind != "f32":
            limit = _NEAR[kind] if max_deviation is None else max_deviation
        if not found[0] <= limit:
            raise InvalidOption(_too_far(target, found[0], limit, kind, _generates(model)))
        del graph.session  # which may hold the file of weights
        floats = 0 if kind == "f32" else count_floats(file)
        length = _put_in_place(file, target)
    notes = [
        *([f"computes in float32: the weights were {half}, for which ONNX Runtime lacks operators"] if half else []),
        *_fixed_axes(graph, traced),
        *([_DECODERS] if int8 and _generates(model) else []),
        *_left_in_float(function, floats),
    ]
    samples = sum(batch.size for batch in given)
    return Exported(str(target), length, kind, samples, *found, graph.inputs, graph.outputs, tuple(notes))


def _left_in_float(model: nn.Module, floats: int) -> Iterator[str]:
    """What to say where a good part of the weights was not rounded."""
    share = floats / max(1, sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1))
    if share > _FEW:
        yield f"{min(share, 1.0):.0%} of the weights stay in floating point, those of convolutions for instance"


_DECODERS = (
    "activations quantised as they come cost models that generate text much of their quality (SmolLM2-135M: perplexity "
    '40 → 66); type="q8_0" and type="q4_0" round the weights alone'
)


def _too_far(target: Path, found: float, limit: float, kind: str, decodes: bool) -> str:
    if math.isinf(found):
        return f"{target}: not written: outputs hold NaN or infinity, the model's or ONNX Runtime's; check the data"
    said = f"{target}: not written: in ONNX Runtime its outputs deviate by {found:.3g}, at most {limit:g} is allowed"
    if kind == "int8":
        return f"{said}; {_DECODERS if decodes else 'raise max_deviation=, or export without int8=True'}"
    return said if kind == "f32" else f"{said}; raise max_deviation=, or take a type= of more bits"


def _put_in_place(file: Path, target: Path) -> int:
    """Give a graph, and the file of weights beside it, their names; how long they are.

    The graph comes last: whoever opens it finds its weights. One that was there before is removed first.
    """
    weights, named = (each.with_name(f"{each.name}.data") for each in (file, target))
    sync_folder(file.parent)
    length = sum(each.stat().st_size for each in (file, weights) if each.exists())
    if named.exists():
        target.unlink(missing_ok=True)
        named.unlink()
    if weights.exists():
        weights.chmod(file.stat().st_mode)  # onnx lets nobody else read it
        target.unlink(missing_ok=True)
        weights.replace(named)
    file.replace(target)
    return length


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
    library: Any, function: nn.Module, plain: nn.Module, file: Path, apart: bool, traced: Batch, fixed: set[Axis]
) -> InRuntime:
    """The graph of `plain`, which computes what the function does; apart: with its weights in a file beside it.

    An axis that torch.export left free is tried with another size: a size that entered the graph as a constant shows,
    and the axis is fixed.
    """
    outputs = list(named_outputs(traced.run(function)))
    while True:
        write(plain, file, traced, outputs, fixed, apart)
        graph = InRuntime(library, file, function)
        wrong = next((axes for axes, batch in _other_sizes(graph, traced) if not _agrees(graph, batch)), None)
        if wrong is None:
            return graph
        fixed = fixed | set(wrong)


def _fixed_axes(graph: InRuntime, traced: Batch) -> Iterator[str]:
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
            elif len(shape) == 3 and isinstance(shape[1], int) and _takes_other_lengths(graph, traced, name):
                yield f"{name} is taken in this shape only: {sizes}, while the model takes sequences of any length"


def _takes_other_lengths(graph: InRuntime, batch: Batch, name: str) -> bool:
    inputs = named_inputs(graph.model, batch)
    return inputs[name].shape[1] > 1 and _runs(twin_of(graph.model), _cut(batch, inputs, [(name, 1)]))


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
