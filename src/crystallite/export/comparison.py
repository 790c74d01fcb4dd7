"""How near ONNX Runtime comes to a model on some batches: on positions that are no padding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch
from crystallite.data.outputs import class_axis
from crystallite.data.positions import real_positions
from crystallite.export.tracing import named_inputs, named_outputs

__all__ = ["Differs", "InRuntime"]


class Differs(InvalidOption):
    """A graph that cannot be run on a batch, or gives something of another shape."""


class InRuntime:
    """A graph in ONNX Runtime, beside the model it was written from."""

    def __init__(self, library: Any, file: Path, model: nn.Module) -> None:
        options = library.SessionOptions()
        options.log_severity_level = 4  # errors are raised as well
        self.model = model
        try:
            self.session = library.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has an exception for each kind of failure
            raise self._differs("open", error) from error
        self.inputs = {each.name: tuple(each.shape) for each in self.session.get_inputs()}
        self.outputs = tuple(each.name for each in self.session.get_outputs())

    def compare(self, batches: Iterable[Batch], model: nn.Module | None = None) -> tuple[float, float | None]:
        """The largest relative deviation of an output, and the share of equal decisions (argmax) of the first.

        model: what to run instead of the model itself.
        """
        apart, size, equal, decisions = dict[str, float](), dict[str, float](), 0, 0
        for batch in batches:
            expected = named_outputs(batch.run(model or self.model))
            found = self._run(batch)
            if len(found) != len(expected):
                raise Differs(f"{type(self.model).__name__}: expected {len(expected)} outputs, ONNX has {len(found)}")
            for number, (name, value) in enumerate(expected.items()):
                if value.shape != found[number].shape:
                    raise Differs(f"{name}: expected {tuple(value.shape)} from ONNX, got {tuple(found[number].shape)}")
                wanted, other = (_real(batch, name, tensor) for tensor in (value, found[number]))
                difference = torch.where(wanted == other, 0.0, other.double() - wanted.double())  # ∞ − ∞ is none
                squares = float(difference.square().sum())
                apart[name] = apart.get(name, 0.0) + (squares if math.isfinite(squares) else math.inf)
                size[name] = size.get(name, 0.0) + float(wanted[wanted.isfinite()].double().square().sum())
                axis = class_axis(wanted)
                if number == 0 and wanted.is_floating_point() and wanted.ndim > 1 and wanted.shape[axis] > 1:
                    same = wanted.argmax(axis) == other.argmax(axis)
                    equal, decisions = equal + int(same.sum()), decisions + same.numel()
        ratios = [math.sqrt(a / size[name]) if size[name] else float(a > 0) for name, a in apart.items()]
        return max(ratios), equal / decisions if decisions else None

    def _run(self, batch: Batch) -> list[Tensor]:
        given = named_inputs(self.model, batch)
        missing = [name for name in self.inputs if name not in given]
        if missing:
            raise InvalidOption(f"data: the batch at sample {batch.offset} lacks {', '.join(missing)}")
        for name, shape in self.inputs.items():
            for axis, (size, other) in enumerate(zip(shape, given[name].shape, strict=True)):
                if isinstance(size, int) and size != other:
                    raise Differs(
                        f"the graph of {type(self.model).__name__} takes {name} with {size} in axis {axis} only, for "
                        f"so the model's code has it, and the data has {other}; pass batches of one size"
                    )
        try:
            found = self.session.run(None, {name: given[name].numpy() for name in self.inputs})
        except Exception as error:
            raise self._differs("run", error) from error
        return [torch.from_numpy(each) for each in found]

    def _differs(self, what: str, error: Exception) -> Differs:
        reason = " ".join(str(error).split()).rpartition("[ONNXRuntimeError] : ")[-1]
        return Differs(f"ONNX Runtime cannot {what} the graph of {type(self.model).__name__}: {reason:.500}")


def _real(batch: Batch, output: str, value: Tensor) -> Tensor:
    """(positions, …) An output without the rows of padding, which nobody reads and where anything may stand.

    >>> mask = torch.tensor([[1, 0]])
    >>> _real(Batch(0, 1, named={"attention_mask": mask}), "logits", torch.tensor([[[5.0], [float("nan")]]]))
    tensor([[5.]])
    """
    decodes = "decoder_input_ids" in batch.named and not output.startswith("encoder_")
    mask = batch.named.get("decoder_attention_mask" if decodes else "attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or value.ndim < 2:
        return value
    if output.startswith("present."):  # (batch, heads, positions so far, size of a head)
        value = value.transpose(1, 2)
    elif "past_key_values.0.key" in batch.named:  # the mask counts past tokens too
        mask = mask[:, -batch.named["input_ids"].shape[1] :]
    masked = replace(batch, named={"attention_mask": mask})
    return value.flatten(0, 1)[real_positions(masked, value.shape[:2])]
