"""Reads the initialisers of an ONNX model, and learns from the graph's nodes what each of them is.

MatMul keeps its weight (in, out) and Gemm says which way round it is; here every matrix comes back (out, in).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from crystallite.weights.folder import inside
from crystallite.weights.onnx_wire import Graph, Node, Tensor, walk_model
from crystallite.weights.stored import (
    Array,
    Contents,
    Role,
    SourceFile,
    StoredTensor,
    TensorInfo,
    byte_count,
    check_names,
    checked_shape,
    refuse,
)

__all__ = ["read_onnx"]

_DTYPES = {
    **{1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool"},
    **{10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128"},
    **{16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz"},
    24: "float8_e8m0fnu",
}
_UNREADABLE = {8: "string", 21: "uint4", 22: "int4", 23: "float4_e2m1"}
_RAW, _IN_PLACE = 9, {4: "float32", 10: "float64"}  # float_data and double_data lie as the machine has them
_ANONYMOUS = re.compile(r"onnx::\w+_\d+|\d+|_?va?l?_\d+|\w*const\w*_?\d+", re.IGNORECASE)
_GATES = {"LSTM": ("i", "o", "f", "c"), "GRU": ("z", "r", "h"), "RNN": ("h",)}  # in ONNX's order
_NORM = re.compile(r"(\w*Layer|Batch|Instance|Group|RMS|Simplified\w*)Normalization")
_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Where", "Max", "Min", "Clip")
_LONGEST_CONVENTION = 256  # characters: beyond, matching costs their square, and one node's name many copies
_PASSED_ON = ("Identity", "Cast", "Transpose")


def read_onnx(file: SourceFile) -> Contents:
    """The initialisers and constants of an ONNX model, weights in other files included, each (out, in)."""
    graph = walk_model(file)
    uses = _uses(graph)
    taken = {tensor.name for tensor in graph.initializers}
    check_names(file.path, taken, len(graph.initializers), file.size)
    if len(taken) != len(graph.initializers):
        refuse(file.path, "each tensor name once", "one name twice")
    numbers: Counter[str] = Counter()
    first_with: dict[tuple[str, tuple[int, ...]], str] = {}  # tied weights may share their external data
    tensors, roles = [], {}
    for tensor in graph.initializers:
        role, node_name = uses.get(tensor.name, (None, ""))
        flipped = role is not None and role.kind == "linear" and role.layout == "in-out"
        stored = _stored(file, tensor, flipped)
        name = _readable(tensor.name, node_name, _leaf(role), taken, numbers)
        taken.add(name)
        first = first_with.setdefault((stored.info.fingerprint, stored.info.shape), name)
        alias = first if first != name and stored.info.nbytes else None
        tensors.append(replace(stored, info=replace(stored.info, name=name, alias_of=alias)))
        if role is not None:
            roles[name] = replace(role, layout="out-in") if flipped else role
    return Contents("onnx", tensors, roles=roles)


def _readable(name: str, node_name: str, leaf: str, taken: set[str], numbers: Counter[str]) -> str:
    """The exporter's name, or the place of the node that uses it when the exporter only numbered it."""
    if not 0 < len(node_name) <= _LONGEST_CONVENTION >= len(name) or not _ANONYMOUS.fullmatch(name):
        return name
    path = [part for part in node_name.split("/") if part]
    if len(path) > 1:
        path.pop()  # the operator itself
    base = ".".join(path)
    readable = f"{base}.{leaf}"
    while readable in taken:
        numbers[base] += 1
        readable = f"{base}_{numbers[base] + 1}.{leaf}"
    return readable


def _leaf(role: Role | None) -> str:
    if role is not None and role.kind == "recurrent":
        return "weight_hh" if role.feedback else "weight_ih"
    return "bias" if role is not None and role.reason == "bias" else "weight"


def _uses(graph: Graph) -> dict[str, tuple[Role, str]]:
    """What the first node that uses each initialiser makes of it, and that node's name."""
    initial = {tensor.name for tensor in graph.initializers}
    origin = {name: (name, False) for name in initial}  # a value → the initialiser it is, and whether turned
    uses: dict[str, tuple[Role, str]] = {}
    for node in graph.nodes:
        if node.op in _PASSED_ON and node.inputs and node.outputs and node.inputs[0] in origin:
            name, turned = origin[node.inputs[0]]
            origin[node.outputs[0]] = (name, turned ^ (node.op == "Transpose"))
            continue
        for index, value in enumerate(node.inputs):
            if value in origin:
                name, turned = origin[value]
                role = _role(node, index, turned)
                if role is not None:
                    uses.setdefault(name, (role, node.name))
    return uses


def _role(node: Node, index: int, turned: bool) -> Role | None:
    if node.op == "MatMul":  # y = x W, or y = W x
        return _linear((index == 1) ^ turned)
    if node.op == "Gemm":
        if index == 2:
            return Role("skipped", "bias")
        turns = node.attributes.get("transA" if index == 0 else "transB", [0]) == [1]
        return _linear((index == 1) ^ turns ^ turned)
    if node.op in ("Conv", "ConvTranspose") and index > 0:
        if index == 2:
            return Role("skipped", "bias")
        groups = (node.attributes.get("group") or [1])[0]
        return Role("conv", groups=groups, layout="in-out" if node.op == "ConvTranspose" else "out-in")
    if node.op == "Gather" and index == 0:
        return Role("embedding", layout="in-out" if turned else "out-in")
    if node.op in _GATES and index > 0:
        if index > 2:
            return Role("skipped", "bias")
        return Role("recurrent", gates=_GATES[node.op], feedback=index == 2)
    if _NORM.fullmatch(node.op) and index > 0:
        return Role("skipped", "norm")
    if node.op in _ELEMENTWISE:
        return Role("skipped", f"operand of {node.op}", certain=False)
    return None


def _linear(turned: bool) -> Role:
    return Role("linear", layout="in-out" if turned else "out-in")


def _stored(file: SourceFile, tensor: Tensor, flipped: bool) -> StoredTensor:
    shape = checked_shape(file.path, tensor.name, tensor.dims)
    turned = flipped and len(shape) >= 2
    seen = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    if tensor.data_type in _UNREADABLE:
        dtype = _UNREADABLE[tensor.data_type]
        info = TensorInfo(tensor.name, seen, dtype, 0, file.fingerprint(tensor.span[0]))
        return StoredTensor(info, lambda: refuse(file.path, f"numbers in {tensor.name!r:.80}", dtype))
    dtype = _DTYPES.get(tensor.data_type, "")
    if not dtype:
        refuse(file.path, f"a known ONNX data type for {tensor.name!r:.80}", str(tensor.data_type))
    nbytes = byte_count(shape, dtype)
    source, offset = _place(file, tensor, shape, dtype, nbytes)
    info = TensorInfo(
        tensor.name, seen, dtype, nbytes, source.fingerprint(tensor.span[0] if offset is None else offset)
    )

    def load() -> Array:
        array = source.map(offset, shape, dtype) if offset is not None else _decoded(file, tensor, shape)
        return array.swapaxes(-1, -2) if turned else array

    return StoredTensor(info, load)


def _place(
    file: SourceFile, tensor: Tensor, shape: tuple[int, ...], dtype: str, nbytes: int
) -> tuple[SourceFile, int | None]:
    """The file and offset of the numbers; no offset where they are encoded one by one."""
    if tensor.is_external:
        return _external(file, tensor, nbytes)
    for number, begin_end in tensor.payload.items():
        if number == _RAW or _IN_PLACE.get(number) == dtype:
            begin, end = begin_end
            if end - begin != nbytes:
                came = f"{end - begin}"
                refuse(file.path, f"{nbytes} bytes for {tensor.name!r:.80}, {dtype} of shape {shape}", came)
            return file, begin
    encoded = max((end - begin for begin, end in tensor.payload.values()), default=0)
    count = nbytes // byte_count((), dtype)
    if encoded < count:  # a number takes at least one byte
        refuse(file.path, f"{count} numbers for {tensor.name!r:.80}", f"{encoded} bytes")
    return file, None


def _external(file: SourceFile, tensor: Tensor, nbytes: int) -> tuple[SourceFile, int]:
    place = tensor.external
    source = SourceFile.at(inside(file.path.parent, place.get("location", ""), named_in=file.path))
    offset = _whole(file, tensor, place.get("offset", "0"))
    length = _whole(file, tensor, place.get("length", str(nbytes)))
    if length != nbytes:
        refuse(file.path, f"{nbytes} bytes of external data for {tensor.name!r:.80}", f"{length}")
    if offset + nbytes > source.size:
        came = f"bytes {offset} to {offset + nbytes}: truncated or corrupt"
        refuse(source.path, f"tensor {tensor.name!r:.80} within {source.size} bytes", came)
    return source, offset


def _whole(file: SourceFile, tensor: Tensor, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        refuse(file.path, f"whole numbers as offset and length of {tensor.name!r:.80}", f"{text!r:.80}")
    return int(text)


def _decoded(file: SourceFile, tensor: Tensor, shape: tuple[int, ...]) -> Array:
    """Numbers encoded one by one (small integers, mostly): the onnx package decodes that one tensor."""
    try:
        import onnx
        import onnx.numpy_helper
    except ImportError:
        hint = "pip install 'crystallite[onnx]'"
        refuse(file.path, f"the onnx package, to decode tensor {tensor.name!r:.80}", "none", hint)
    begin, end = tensor.span
    try:
        message = onnx.TensorProto.FromString(file.bytes(begin, end - begin))
        message.ClearField("external_data")  # a path that nobody has checked
        message.ClearField("data_location")
        values: np.ndarray[Any, Any] = onnx.numpy_helper.to_array(message)
        return np.ascontiguousarray(values).reshape(shape)
    except Exception as error:  # protobuf's DecodeError is not a common class across its versions
        refuse(file.path, f"readable numbers in tensor {tensor.name!r:.80}", f"{error}"[:200])
