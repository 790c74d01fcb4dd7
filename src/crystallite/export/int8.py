"""8-bit weights: layers that ONNX Runtime can quantise, and the quantisation of a written graph."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.export.tracing import quiet
from crystallite.models.swap import put_everywhere_
from crystallite.operators.linear import BlockLinear

__all__ = ["count_floats", "quantise_tables_", "quantised", "save", "with_plain_layers"]

_QUANTISED = ("MatMul", "Gemm", "LSTM", "Attention")  # 8-bit convolutions do not run on every CPU
_MOVED = 600  # multiply-adds of 8-bit integers that ONNX Runtime does while it moves one number to another place


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


def with_plain_layers(model: nn.Module) -> nn.Module:
    """A copy of the model in which layers of blocks are plain layers; the model itself where it has none.

    One for each block; one with zeros between the blocks where bringing numbers in order would take longer than that.
    """
    if not any(isinstance(module, BlockLinear) for module in model.modules()):
        return model
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, BlockLinear) and len(module.weights):
            moved = sum(len(table) for table in (module.columns, module.outputs) if table is not None)
            spared = module.out_features * module.in_features - sum(stack.numel() for stack in module.weights)
            apart = not name or spared > _MOVED * moved  # a model that is one layer keeps the name of its input
            model = put_everywhere_(model, name, _Plain(module) if apart else module.to_dense())
    return model


def quantised(file: Path, apart: bool = False) -> Path:
    """The file of a graph with 8-bit weights beside that of another; apart: they stand in files of their own."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = file.parent.with_name("int8") / file.name
    small.parent.mkdir()
    with quiet():
        program = onnx.load(file, load_external_data=False)
        del program.graph.value_info[:]  # shapes of weights that quantisation turns round
        onnx.save(program, file)
        first = file.with_name(f"int8-{file.name}")
        quantize_dynamic(
            file, first, op_types_to_quantize=list(_QUANTISED), per_channel=True, weight_type=QuantType.QInt8,
            reduce_range=True,  # 7 of 8 bits: sums of full ones can overflow on CPUs without VNNI
            use_external_data_format=apart,
        )  # fmt: skip
        program = onnx.load(first)
        quantise_tables_(program.graph)
        save(program, small, apart)
    return small


def count_floats(file: Path) -> int:
    """How many numbers of weights a written graph holds in floating point; biases, norms and scales do not count."""
    import onnx

    stored = onnx.load(file, load_external_data=False).graph.initializer
    floats = [each for each in stored if each.data_type == onnx.TensorProto.FLOAT and len(each.dims) > 1]
    return sum(math.prod(each.dims) for each in floats if not each.name.endswith("_scales"))


def save(program: Any, file: Path, apart: bool) -> None:
    """Write a graph; apart: with its weights in a file of their own beside it, as protobuf holds 2 GB."""
    import onnx

    beside = {"save_as_external_data": True, "location": f"{file.name}.data"} if apart else {}
    onnx.save(program, file, **beside)


def quantise_tables_(graph: Any) -> None:
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
