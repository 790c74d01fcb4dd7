"""Weights of 8 or 4 bits in a written graph, and activations in floating point: what decoders need.

ONNX Runtime's MatMulNBits reads a weight in blocks of 32 numbers along its inputs with a scale each, as the types of
the same names do in GGUF.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from crystallite.export.int8 import quantise_tables_, save
from crystallite.export.tracing import quiet

__all__ = ["with_rounded_weights"]

_BLOCK = 32
_FINE = {"bits": 8, "is_symmetric": True}
_TYPES = {"q8_0": _FINE, "q4_1": {"bits": 4, "is_symmetric": False}, "q4_0": {"bits": 4, "is_symmetric": True}}


def with_rounded_weights(file: Path, type: str, largest: int) -> Path:
    """The file of a graph with weights of fewer bits beside that of another; above `largest` bytes, in two files.

    What writes an output of the graph, as the head of a decoder does, and tables that rows are looked up in, keep 8
    bits in any type: that is where llama.cpp's own quantisation keeps more, too.
    """
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    small = file.parent.with_name(type) / file.name
    small.parent.mkdir()
    with quiet():
        program = onnx.load(file)
        del program.graph.value_info[:]  # shapes of weights that are stored in another way
        _split_products_(program.graph)
        heads = _that_write_outputs(program.graph)
        for options, left in ((_TYPES[type], heads), (_FINE, [])):  # the second time, the heads are left
            made = MatMulNBitsQuantizer(program, block_size=_BLOCK, nodes_to_exclude=left, **options)
            made.process()
            program = made.model.model
        quantise_tables_(program.graph)
        size = sum(_bytes(each) for each in program.graph.initializer)
        save(program, small, size > largest)
    return small


def _that_write_outputs(graph: Any) -> list[str]:
    """Names of products with weights that return what the graph returns, with or without something added."""
    writers = {name: node for node in graph.node for name in node.output}
    found = []
    for output in graph.output:
        node = writers.get(output.name)
        while node is not None and node.op_type == "Add":
            node = next((writers[name] for name in node.input if name in writers), None)
        if node is not None and node.op_type == "MatMul":
            found.append(node.name)
    return found


def _split_products_(graph: Any) -> None:
    """Write x W + b as a product and a sum, as only products of their own are read in blocks."""
    from onnx import helper, numpy_helper

    weights = {each.name: each for each in graph.initializer}
    plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
    nodes = []
    for node in graph.node:
        given = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        turned = given.pop("transB", 0)
        if node.op_type != "Gemm" or node.input[1] not in weights or any(given[k] != plain[k] for k in given):
            nodes.append(node)
            continue
        weight = node.input[1]
        if turned:
            value = numpy_helper.to_array(weights[weight]).T.copy()
            weight = f"{node.name}_weight"
            graph.initializer.append(numpy_helper.from_array(value, weight))
        adds = len(node.input) > 2 and bool(node.input[2])
        product = f"{node.output[0]}_product" if adds else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], weight], [product], name=f"{node.name}_product"))
        if adds:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=node.name))
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {each.name for each in graph.output}
    left = [each for each in graph.initializer if each.name in read]
    del graph.initializer[:]
    graph.initializer.extend(left)


def _bytes(tensor: Any) -> int:
    from onnx import helper

    return math.prod(tensor.dims) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
