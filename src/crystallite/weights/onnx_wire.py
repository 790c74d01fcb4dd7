"""The few parts of an ONNX file that describe its weights, read from the protobuf wire format in place.

Parsing the whole message would copy every weight into memory, and a hostile one can be a thousand times larger
parsed than stored. Walking it touches only the fields that are asked for.
"""

from __future__ import annotations

import mmap
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from crystallite.weights.stored import SourceFile, refuse

__all__ = ["Graph", "Node", "Tensor", "walk_model"]

Span: TypeAlias = tuple[int, int]

_MAX_FIELDS = 1_000_000  # two seconds of walking; the graph of a large language model has two fifths
_MAX_KEPT = 100_000  # each becomes an object a hundred times its size in the file
_FIXED = {1: 8, 5: 4}
_MAX_TEXT = 1 << 16
_MAX_NAME = 1 << 12
_MAX_ADDED = 16 << 20  # characters that names grow by where they get the names of the graphs around them
_MAX_DEPTH = 16
_FLOATS = (1, 10, 11, 16, 17, 18, 19, 20)
_TENSOR, _SUBGRAPH = 5, 6  # fields of an attribute


@dataclass(slots=True)
class Node:
    """An operator: what it is, what it reads and writes, and its whole-number attributes."""

    op: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, list[int]] = field(default_factory=dict)
    messages: dict[str, tuple[int, Span]] = field(default_factory=dict)  # attributes that are tensors or graphs


@dataclass(slots=True)
class Tensor:
    """An initialiser: its description, and where its numbers lie in this file or which other file has them."""

    span: Span
    name: str = ""
    dims: list[int] = field(default_factory=list)
    data_type: int = 0
    payload: dict[int, Span] = field(default_factory=dict)  # protobuf field number → bytes in the file
    external: dict[str, str] = field(default_factory=dict)
    is_external: bool = False


@dataclass(frozen=True)
class Graph:
    """A model's operators and weights; those of If and Loop bodies too, under the name of their operator."""

    nodes: list[Node]
    initializers: list[Tensor]  # Constant nodes included


def walk_model(file: SourceFile) -> Graph:
    """The model's graph, or an error if the file is not an ONNX model."""
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walk = _Walk(file, data)
        graphs = [value for number, value in walk.fields((0, file.size)) if number == 7 and isinstance(value, tuple)]
        if len(graphs) != 1:
            refuse(file.path, "an ONNX model with one graph", f"{len(graphs)}: not an ONNX file, or a corrupt one")
        walk.graph(graphs[0], "", ChainMap())
    return walk.found


class _Walk:
    """Protobuf fields of a mapped file; every length is compared with the message it lies in."""

    def __init__(self, file: SourceFile, data: mmap.mmap) -> None:
        self._file, self._data, self._walked, self._added = file, data, 0, 0
        self.found = Graph([], [])

    def graph(self, span: Span, prefix: str, scope: ChainMap[str, str]) -> None:
        """Adds a graph's nodes and weights; `scope` gives values of the graphs around it their full names."""
        if len(scope.maps) > _MAX_DEPTH:
            refuse(self._file.path, f"ONNX graphs at most {_MAX_DEPTH} deep in each other", "more")
        for number, value in self.fields(span):
            if number == 5 and isinstance(value, tuple):
                tensor = self.tensor(value)
                scope[tensor.name] = tensor.name = self._full_name(prefix, tensor.name)
                self._keep(tensor)
        for number, value in self.fields(span):  # again: a graph's weights come after its nodes
            if number == 1 and isinstance(value, tuple):
                self._add_node(self.node(value), prefix, scope)

    def _add_node(self, node: Node, prefix: str, scope: ChainMap[str, str]) -> None:
        node.inputs = [scope.get(name, name) for name in node.inputs]
        outputs = [self._full_name(prefix, name) for name in node.outputs]
        scope.update(zip(node.outputs, outputs, strict=True))
        node.outputs = outputs
        if node.inputs:
            self._keep(node)
        for attribute, (number, span) in node.messages.items():
            if number == _SUBGRAPH:
                inner = self._full_name(prefix, f"{node.name or node.op}.{attribute}.")
                self.graph(span, inner, scope.new_child())
            elif node.op == "Constant" and attribute == "value" and node.outputs:
                tensor = self.tensor(span)
                tensor.name = node.outputs[0]
                if tensor.dims and tensor.data_type in _FLOATS:  # the others are sizes and axes by the hundred
                    self._keep(tensor)

    def _full_name(self, prefix: str, name: str) -> str:
        """The name inside the graphs around it; a short file could make names of any length that way."""
        self._added += len(prefix)
        if len(prefix) + len(name) > _MAX_NAME or self._added > _MAX_ADDED + self._file.size:
            refuse(self._file.path, f"names of at most {_MAX_NAME} characters in the ONNX graph", "longer ones")
        return prefix + name

    def fields(self, span: Span) -> Iterator[tuple[int, int | Span]]:
        """(field number, whole number or span of bytes) of one message."""
        position, end = span
        while position < end:
            self._walked += 1
            if self._walked > _MAX_FIELDS:
                refuse(self._file.path, f"an ONNX graph of at most {_MAX_FIELDS} fields", "more")
            key, position = self._varint(position, end)
            number, wire = key >> 3, key & 7
            if key >= 1 << 32:  # protobuf would drop the upper bits, or the file
                refuse(self._file.path, "an ONNX model", f"an impossible field at byte {position}: corrupt?")
            if wire == 0:
                value, position = self._varint(position, end)
                yield number, value
                continue
            if wire == 2:
                length, position = self._varint(position, end)
            elif wire in _FIXED:
                length = _FIXED[wire]
            else:
                refuse(self._file.path, "an ONNX model", f"an unknown field type at byte {position}: corrupt?")
            if number == 0 or length > end - position:
                came = f"a field of {length} bytes at byte {position}, beyond its message: truncated or corrupt"
                refuse(self._file.path, "an ONNX model", came)
            yield number, (position, position + length)
            position += length

    def _keep(self, item: Node | Tensor) -> None:
        nodes, initializers = self.found.nodes, self.found.initializers
        if len(nodes) + len(initializers) >= _MAX_KEPT:
            refuse(self._file.path, f"an ONNX graph of at most {_MAX_KEPT} nodes and weights", "more")
        if isinstance(item, Node):
            nodes.append(item)
        else:
            initializers.append(item)

    def node(self, span: Span) -> Node:
        node = Node("", "", [], [])
        for number, value in self.fields(span):
            if number == 1:
                node.inputs.append(self._text(value))
            elif number == 2:
                node.outputs.append(self._text(value))
            elif number == 3:
                node.name = self._text(value)
            elif number == 4:
                node.op = self._text(value)
            elif number == 5 and isinstance(value, tuple):
                self._attribute(value, node)
        return node

    def tensor(self, span: Span) -> Tensor:
        tensor = Tensor(span)
        for number, value in self.fields(span):
            if number == 1:
                tensor.dims += self._numbers(value)
            elif number == 2 and isinstance(value, int):
                tensor.data_type = _int32(value)
            elif number == 8:
                tensor.name = self._text(value)
            elif number == 13 and isinstance(value, tuple):
                entry = {key: self._text(text) for key, text in self.fields(value)}
                tensor.external[entry.get(1, "")] = entry.get(2, "")
            elif number == 14 and isinstance(value, int):
                if _int32(value) in (0, 1):  # protobuf, too, passes over values that the enumeration does not have
                    tensor.is_external = _int32(value) == 1
            elif isinstance(value, tuple):
                tensor.payload[number] = value
        return tensor

    def _attribute(self, span: Span, node: Node) -> None:
        name, numbers, message = "", [], None
        for number, value in self.fields(span):
            if number == 1:
                name = self._text(value)
            elif number in (3, 8):  # i, ints
                numbers += self._numbers(value)
            elif number in (_TENSOR, _SUBGRAPH) and isinstance(value, tuple):
                message = number, value
        node.attributes[name] = numbers
        if message is not None:
            node.messages[name] = message

    def _numbers(self, value: int | Span) -> list[int]:
        """One number, or a packed list of them."""
        if isinstance(value, int):
            return [_signed(value)]
        position, end = value
        if end - position > _MAX_TEXT:
            refuse(self._file.path, f"at most {_MAX_TEXT} bytes of dimensions or attributes", f"{end - position}")
        numbers = []
        while position < end:
            number, position = self._varint(position, end)
            numbers.append(_signed(number))
        return numbers

    def _text(self, value: int | Span) -> str:
        if isinstance(value, int) or value[1] - value[0] > _MAX_TEXT:
            refuse(self._file.path, "names in the ONNX graph", "a number or an absurdly long text")
        return self._data[value[0] : value[1]].decode("utf-8", errors="backslashreplace")

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        result = shift = 0
        while position < end and shift < 70:
            byte = self._data[position]
            position += 1
            result |= (byte & 0x7F) << shift
            if byte < 0x80:
                return result, position
            shift += 7
        refuse(self._file.path, "an ONNX model", f"an unfinished number at byte {position}: truncated or corrupt")


def _signed(number: int, bits: int = 64) -> int:
    """The number in so many bits, as protobuf keeps it."""
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _int32(number: int) -> int:
    """A small number or a choice, of which protobuf reads the lower half: 2³² + 1 is 1."""
    return _signed(number, 32)
