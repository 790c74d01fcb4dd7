"""The messages of the Open Inference Protocol v2 over gRPC, as `protoc` describes them (`make proto`).

A generated module would put their names into protobuf's common pool, where there is one place for each: a program that
also imports a client of the protocol would not start. These live in a pool of their own.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["PACKAGE", "message"]

PACKAGE = "inference"


@cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    content = (files(__package__) / "inference.binpb").read_bytes()
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.Add(file)
    return pool


@cache
def message(name: str) -> type[Any]:
    """The class of a message.

    >>> message("ModelReadyRequest")(name="small").SerializeToString()
    b'\\n\\x05small'
    """
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))
