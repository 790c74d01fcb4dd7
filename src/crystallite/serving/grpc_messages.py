"""The messages of the Open Inference Protocol v2 over gRPC, made from the text that defines them.

A generated module would put their names into protobuf's common pool, where there is one place for each: a program that
also imports a client of the protocol would not start. These live in a pool of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["PACKAGE", "message"]

PACKAGE = "inference"
_DEFINITION = """
message ServerLiveRequest {}
message ServerLiveResponse { bool live = 1; }
message ServerReadyRequest {}
message ServerReadyResponse { bool ready = 1; }
message ModelReadyRequest { string name = 1; string version = 2; }
message ModelReadyResponse { bool ready = 1; }
message ServerMetadataRequest {}
message ServerMetadataResponse { string name = 1; string version = 2; repeated string extensions = 3; }
message ModelMetadataRequest { string name = 1; string version = 2; }
message ModelMetadataResponse {
  message TensorMetadata { string name = 1; string datatype = 2; repeated int64 shape = 3; }
  string name = 1;
  repeated string versions = 2;
  string platform = 3;
  repeated ModelMetadataResponse.TensorMetadata inputs = 4;
  repeated ModelMetadataResponse.TensorMetadata outputs = 5;
}
message InferParameter {
  oneof parameter_choice {
    bool bool_param = 1;
    int64 int64_param = 2;
    string string_param = 3;
    double double_param = 4;
    uint64 uint64_param = 5;
  }
}
message InferTensorContents {
  repeated bool bool_contents = 1;
  repeated int32 int_contents = 2;
  repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4;
  repeated uint64 uint64_contents = 5;
  repeated float fp32_contents = 6;
  repeated double fp64_contents = 7;
  repeated bytes bytes_contents = 8;
}
message ModelInferRequest {
  message InferInputTensor {
    string name = 1;
    string datatype = 2;
    repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  message InferRequestedOutputTensor { string name = 1; map<string, InferParameter> parameters = 2; }
  string model_name = 1;
  string model_version = 2;
  string id = 3;
  map<string, InferParameter> parameters = 4;
  repeated ModelInferRequest.InferInputTensor inputs = 5;
  repeated ModelInferRequest.InferRequestedOutputTensor outputs = 6;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  message InferOutputTensor {
    string name = 1;
    string datatype = 2;
    repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4;
    InferTensorContents contents = 5;
  }
  string model_name = 1;
  string model_version = 2;
  string id = 3;
  map<string, InferParameter> parameters = 4;
  repeated ModelInferResponse.InferOutputTensor outputs = 5;
  repeated bytes raw_output_contents = 6;
}
"""
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


def _file(definition: str) -> descriptor_pb2.FileDescriptorProto:
    """The definition as protobuf holds it; knows as much of its language as is used above."""
    words = iter(re.findall(r"[\w.]+|[{}<>,;=]", definition))
    file = descriptor_pb2.FileDescriptorProto(name="crystallite/inference.proto", package=PACKAGE, syntax="proto3")
    for _message in words:
        _read(words, file.message_type.add(), "")
    return file


def _read(words: Iterator[str], into: descriptor_pb2.DescriptorProto, scope: str) -> None:
    """A message, from its name to its closing bracket."""
    into.name = next(words)
    scope = f"{scope}.{into.name}"
    assert next(words) == "{"
    in_choice = False
    for word in words:
        if word == "message":
            _read(words, into.nested_type.add(), scope)
        elif word == "oneof":
            into.oneof_decl.add(name=next(words))
            in_choice = next(words) == "{"
        elif word != "}":
            _read_field(words, word, into, scope, in_choice)
        elif in_choice:
            in_choice = False
        else:
            return


def _read_field(
    words: Iterator[str], word: str, into: descriptor_pb2.DescriptorProto, scope: str, in_choice: bool
) -> None:
    field = into.field.add(label=_Field.LABEL_REPEATED if word in ("repeated", "map") else _Field.LABEL_OPTIONAL)
    kind = next(words) if word == "repeated" else word
    if kind == "map":  # on the wire, repeated pairs of key and value
        _, key, _, value, _ = (next(words) for _ in range(5))
    field.name, _, number, _ = (next(words) for _ in range(4))
    field.number = int(number)
    if kind == "map":
        entry = into.nested_type.add(name=f"{field.name.title()}Entry")
        entry.options.map_entry = True
        for place, (name, part) in enumerate([("key", key), ("value", value)], 1):
            _set_type(entry.field.add(name=name, number=place, label=_Field.LABEL_OPTIONAL), part)
        kind = f"{scope}.{entry.name}".lstrip(".")
    _set_type(field, kind)
    if in_choice:
        field.oneof_index = 0


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    field.type = _SCALARS.get(kind, _Field.TYPE_MESSAGE)
    if kind not in _SCALARS:
        field.type_name = f".{PACKAGE}.{kind}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file(_DEFINITION))


@cache
def message(name: str) -> type[Any]:
    """The class of a message.

    >>> message("ModelReadyRequest")(name="small").SerializeToString()
    b'\\n\\x05small'
    """
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
