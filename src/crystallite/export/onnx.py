"""`export`: a model as ONNX, in floating point or with 8-bit weights, checked in ONNX Runtime."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.core.files import sync_folder, writing
from crystallite.core.suggest import suggest_keywords
from crystallite.data.batch import Batch, batches, evaluating
from crystallite.data.outputs import ROUNDING, tensors
from crystallite.models.swap import put_
from crystallite.operators.linear import BlockLinear

__all__ = ["Exported", "export"]

_CHECKED = 8  # batches, at most, that both run
_QUANTISED = ("MatMul", "Gemm", "LSTM", "Attention")  # 8-bit convolutions do not run on every CPU
_MOVED = 600  # multiply-adds of 8-bit integers that ONNX Runtime does while it moves one number to another place


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's on the data it was checked with."""

    path: str
    bytes: int
    int8: bool
    samples: int
    deviation: float  # ‖y′ − y‖ / ‖y‖ over all samples, the largest over outputs
    agreement: float | None  # share of equal decisions (argmax) of the first output; None where it has none

    def __str__(self) -> str:
        agreed = "" if self.agreement is None else f", {self.agreement:.2%} of decisions equal"
        kind = "with 8-bit weights" if self.int8 else "in floating point"
        return (
            f"{self.path}: {self.bytes:,} bytes {kind}; relative deviation {self.deviation:.2g} from the model on "
            f"{self.samples} samples in ONNX Runtime{agreed}"
        )


@suggest_keywords
def export(
    model: nn.Module, path: str | os.PathLike[str], data: Any, *, int8: bool = False, max_deviation: float = 0.1
) -> Exported:
    """Write a model as ONNX, all of it or nothing, and say how near ONNX Runtime comes to it on some data.

    Fitted layers are smaller dense products, so ONNX Runtime runs and quantises them like any other.

    Args:
        model: the model; it is left as it was.
        path: a file that ends in .onnx.
        data: batches as for `validate`; the first is what the model is traced with. Targets are not used.
        int8: weights of linear layers as 8-bit integers, one scale per output; activations are quantised as they come.
        max_deviation: refused where int8 is further away than this. Floating point may differ by rounding only.

    Returns:
        What was written, and how near ONNX Runtime comes to the model on the data.

    Raises:
        InvalidOption: a package is missing, or the file would deviate by more than is allowed; nothing is written then.
    """
    target = Path(path)
    if target.suffix != ".onnx":
        raise InvalidOption(f"{target}: expected a name that ends in .onnx")
    library = _libraries()
    checked = [batch.without_target() for batch in islice(batches(data), _CHECKED)]
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    with writing(target), evaluating(model), folder as made:
        file = Path(made) / "model.onnx"
        _write(_with_plain_layers(model) if int8 else model, file, _at_least_two(checked[0]))
        if int8:
            file = _quantised(file)
        found = _compared(library, file, model, checked)
        limit = max_deviation if int8 else _rounding(model)
        if not found[0] <= limit:
            raise InvalidOption(
                f"{target}: not written: in ONNX Runtime its outputs deviate by {found[0]:.3g}, at most {limit:g} "
                f"is allowed{'; raise max_deviation=, or export without int8=True' if int8 else ''}"
            )
        size = file.stat().st_size
        sync_folder(file.parent)
        file.replace(target)
    return Exported(str(target), size, int8, sum(batch.size for batch in checked), *found)


def _libraries() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  what torch.onnx writes with
    except ImportError:
        raise CrystalliteError("exporting needs onnx and onnxruntime: pip install 'crystallite[onnx]'") from None
    return onnxruntime


def _write(model: nn.Module, file: Path, batch: Batch) -> None:
    """Every axis stays free that the model does not fix: batch size and length of a sequence, mostly."""
    weight = next(model.parameters(), None)
    if weight is not None and weight.device.type != "cpu":
        raise InvalidOption(f"expected a model on the CPU, got one on {weight.device}; call .cpu() first")
    free = {name: _free(value) for name, value in _arguments(model, batch)}
    with _quiet():
        try:
            program = torch.onnx.export(
                model, batch.positional, kwargs=dict(batch.named), dynamic_shapes=free, dynamo=True, verbose=False
            )
            assert program is not None
            _keep_norms_apart_(program.model.graph)
            program.save(file, external_data=False)
        except Exception as error:  # whatever is raised by tracing code of the user's
            reason = str(error).strip().partition("\n")[0]
            raise InvalidOption(f"{type(model).__name__} cannot be written as ONNX: {reason:.300}") from error


def _keep_norms_apart_(graph: Any) -> None:
    """Write the sum before a layer norm as `Sum`, not `Add`: ONNX Runtime takes `Add` and the norm for one operator.

    That one (SkipLayerNormalization) goes through its numbers one by one on CPUs: in MiniLM it took 13 % of the time of
    8-bit inference, sums and norms on their own 2 %.
    """
    for node in graph:
        readers = {reader.op_type for reader in node.outputs[0].consumers()} if node.op_type == "Add" else set()
        if readers == {"LayerNormalization"}:
            node.op_type = "Sum"


class _Plain(nn.Module):
    """A `BlockLinear` with an `nn.Linear` for each block, whose weights ONNX Runtime can quantise."""

    def __init__(self, blocks: BlockLinear) -> None:
        super().__init__()
        parts = []
        for weight in (weight for stack in blocks.weights for weight in stack.detach()):
            parts.append(nn.Linear(weight.shape[1], weight.shape[0], False, dtype=weight.dtype))
            parts[-1].weight = nn.Parameter(weight.clone())
        self.parts, self.bias, self.reads = nn.ModuleList(parts), blocks.bias, blocks.reads
        self.sizes = [part.in_features for part in parts]
        rows = blocks.out_features if blocks.outputs is None else min(blocks.writes + 1, blocks.out_features)
        self.idle = rows - sum(part.out_features for part in parts)  # dormant rows, or one that stands for all of them
        self.columns: Tensor | None
        self.outputs: Tensor | None
        self.register_buffer("columns", blocks.columns)
        self.register_buffer("outputs", blocks.outputs)

    def forward(self, x: Tensor) -> Tensor:
        read = x[..., : self.reads] if self.columns is None else x.index_select(-1, self.columns)
        y = torch.cat([part(piece) for part, piece in zip(self.parts, read.split(self.sizes, -1), strict=True)], -1)
        y = nn.functional.pad(y, (0, self.idle)) if self.idle else y
        y = y if self.outputs is None else y.index_select(-1, self.outputs)
        return y if self.bias is None else y + self.bias


def _with_plain_layers(model: nn.Module) -> nn.Module:
    """A copy of the model in which layers of blocks are plain layers.

    One for each block; one with zeros between the blocks where bringing numbers in order would take longer than that.
    """
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockLinear) and len(module.weights):
            moved = sum(len(table) for table in (module.columns, module.outputs) if table is not None)
            spared = module.out_features * module.in_features - sum(stack.numel() for stack in module.weights)
            apart = not name or spared > _MOVED * moved  # a model that is one layer keeps the name of its input
            model = put_(model, name, _Plain(module) if apart else module.to_dense())
    return model


def _free(value: Any) -> Any:
    if isinstance(value, Tensor):
        return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO)
    return tuple(map(_free, value)) if isinstance(value, (tuple, list)) else None


def _at_least_two(batch: Batch) -> Batch:
    """The batch, a single sample twice: an axis of size 1 would be taken to have that size for good."""
    return batch if batch.size > 1 else batch.take(torch.tensor([0, 0]))


def _quantised(file: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.with_name("int8.onnx")
    with _quiet():
        program = onnx.load(file)
        del program.graph.value_info[:]  # shapes of weights that quantisation turns round
        onnx.save(program, file)
        quantize_dynamic(
            file, small, op_types_to_quantize=list(_QUANTISED), per_channel=True, weight_type=QuantType.QInt8,
            reduce_range=True,  # 7 of 8 bits: sums of full ones can overflow on CPUs without VNNI
        )  # fmt: skip
        program = onnx.load(small)
        _quantise_tables_(program.graph)
        onnx.save(program, small)
    return small


def _quantise_tables_(graph: Any) -> None:
    """Tables that rows are looked up in, as embeddings are, with 8 bits and a scale for each row."""
    from onnx import TensorProto, helper, numpy_helper

    tables = {each.name: each for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for name, nodes in readers.items():
        if name not in tables or len(tables[name].dims) != 2 or not all(_looks_up(node, name) for node in nodes):
            continue
        rows = numpy_helper.to_array(tables[name])
        scales = np.abs(rows).max(1, keepdims=True) / 127
        whole = np.rint(rows / np.where(scales > 0, scales, 1)).astype(np.int8)
        made = {f"{name}_int8": whole, f"{name}_scales": scales}
        graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in made.items())
        graph.initializer.remove(tables[name])
        for node in nodes:
            place, out = list(graph.node).index(node), node.output[0]
            steps = [helper.make_node("Gather", [key, node.input[1]], [f"{out}_{key}"]) for key in made]
            found = [step.output[0] for step in steps]
            steps.append(helper.make_node("Cast", found[:1], [f"{out}_float"], to=TensorProto.FLOAT))
            steps.append(helper.make_node("Mul", [f"{out}_float", found[1]], [out]))
            graph.node.remove(node)
            for step in reversed(steps):
                graph.node.insert(place, step)


def _looks_up(node: Any, table: str) -> bool:
    whole_rows = all(attribute.i == 0 for attribute in node.attribute if attribute.name == "axis")
    return node.op_type == "Gather" and node.input[0] == table and table not in node.input[1:] and whole_rows


def _compared(library: Any, file: Path, model: nn.Module, checked: list[Batch]) -> tuple[float, float | None]:
    """The largest relative deviation of an output, and the agreement of decisions."""
    session = library.InferenceSession(file, providers=["CPUExecutionProvider"])
    apart, size, equal, decisions = dict[str, float](), dict[str, float](), 0, 0
    for batch in checked:
        given = {name: value for name, value in _arguments(model, batch) if isinstance(value, Tensor)}
        wanted = [each.name for each in session.get_inputs()]
        fed = {name: given[name].numpy() for name in wanted if name in given}
        if len(fed) != len(wanted):
            raise InvalidOption(f"{type(model).__name__}: expected inputs {', '.join(given)}, ONNX has {wanted}")
        expected = tensors(batch.run(model))
        found = session.run(None, fed)
        if len(found) != len(expected):
            raise InvalidOption(f"{type(model).__name__}: expected {len(expected)} outputs, ONNX has {len(found)}")
        for (path, value), other in zip(expected.items(), map(torch.from_numpy, found), strict=True):
            if value.shape != other.shape:
                raise InvalidOption(f"{path}: expected {tuple(value.shape)} from ONNX, got {tuple(other.shape)}")
            difference = float((other.double() - value.double()).square().sum())
            apart[path] = apart.get(path, 0.0) + (difference if math.isfinite(difference) else math.inf)
            size[path] = size.get(path, 0.0) + float(value.double().square().sum())
        first, other = next(iter(expected.values())), torch.from_numpy(found[0])
        if first.is_floating_point() and first.ndim > 1 and first.shape[-1] > 1:
            equal += int((first.argmax(-1) == other.argmax(-1)).sum())
            decisions += first[..., 0].numel()
    ratios = [math.sqrt(a / size[path]) if size[path] else float(a > 0) for path, a in apart.items()]
    return max(ratios), equal / decisions if decisions else None


def _arguments(model: nn.Module, batch: Batch) -> Iterator[tuple[str, Any]]:
    yield from inspect.signature(model.forward).bind(*batch.positional, **batch.named).arguments.items()


def _rounding(model: nn.Module) -> float:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return ROUNDING.get(dtype, max(ROUNDING.values()))


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch's exporter and ONNX Runtime's quantisation speak of their own affairs."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
