"""The Open Inference Protocol v2 over gRPC: the same service, checks, token and limits as over HTTP."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.serving.grpc_messages import PACKAGE, message
from crystallite.serving.logs import Entry
from crystallite.serving.protocol import OUTPUT, SERVER, Request, checked_shape, describe, from_bytes, to_bytes
from crystallite.serving.refusal import CLIENT_LEFT, Refusal
from crystallite.serving.request_guard import RequestGuard
from crystallite.serving.service import Service
from crystallite.serving.signature import DATATYPES, Signature

__all__ = ["GrpcServer"]

Method = Callable[[Entry, Any, Any], Awaitable[Any]]
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CLIENT_LEFT: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_TYPED = {torch.float32: "fp32_contents", torch.float64: "fp64_contents", torch.int64: "int64_contents"}
_ENVELOPE = 1 << 16  # bytes of a message beyond its tensor


class GrpcServer:
    """A gRPC port of a service; made, started and stopped on the service's event loop."""

    def __init__(self, service: Service, address: str, token: str | None, tls: tuple[bytes, bytes] | None) -> None:
        """`address` is host:port; `tls` a private key and a chain of certificates, PEM."""
        methods = _Methods(RequestGuard(service, token))
        options = [
            ("grpc.max_receive_message_length", service.limits.max_bytes + _ENVELOPE),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
            # a message is no larger than it looks: a compressed one is refused, not unpacked
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
        ]
        self._server = grpc.aio.server(handlers=[methods.handlers()], options=options)
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([tls]))
        except RuntimeError as error:
            raise InvalidOption(f"cannot listen on {address}: {error}") from None

    async def start(self) -> None:
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and return when the accepted ones are answered, or after `grace` seconds."""
        await self._server.stop(grace)


class _Methods:
    def __init__(self, guard: RequestGuard) -> None:
        self._door, self._service = guard, guard.service

    def handlers(self) -> grpc.GenericRpcHandler:
        """Handlers of bytes: what cannot be read as a message is the caller's error, which gRPC would call ours."""
        methods: dict[str, Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(self._guard(name, method)) for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(f"{PACKAGE}.GRPCInferenceService", handlers)

    def _guard(self, name: str, method: Method) -> Callable[[bytes, Any], Awaitable[bytes]]:
        request_of = message(f"{name}Request")
        call = "infer" if name == "ModelInfer" else name
        is_open = name in ("ServerLive", "ServerReady")  # what a supervisor asks before it has a token

        async def guarded(content: bytes, context: Any) -> bytes:
            metadata = dict(context.invocation_metadata() or ())
            entry = Entry("grpc", call, metadata.get("x-request-id"), metadata.get("traceparent"))
            refused: Refusal | None = None
            try:
                with self._door.recorded(entry):
                    if not is_open:
                        self._door.authorize(metadata.get("authorization"))
                    try:
                        request = request_of.FromString(content)
                    except DecodeError:
                        raise Refusal(400, f"expected a {name}Request in protobuf") from None
                    response = await method(entry, request, context)
                    entry.status = 200
            except Refusal as refusal:
                refused = refusal
            trailing = [("x-request-id", entry.request_id)]
            if refused is None:
                context.set_trailing_metadata(tuple(trailing))
                return response.SerializeToString()
            if refused.retry_after is not None:
                trailing.append(("retry-after", str(refused.retry_after)))
            code = _CODES.get(refused.status, grpc.StatusCode.FAILED_PRECONDITION)
            await context.abort(code, str(refused), tuple(trailing))
            raise AssertionError("abort raises")

        return guarded

    async def _server_live(self, _entry: Entry, _request: Any, _context: Any) -> Any:
        return message("ServerLiveResponse")(live=True)

    async def _server_ready(self, _entry: Entry, _request: Any, _context: Any) -> Any:
        return message("ServerReadyResponse")(ready=True)  # models are loaded before the port is opened

    async def _server_metadata(self, _entry: Entry, _request: Any, _context: Any) -> Any:
        return message("ServerMetadataResponse")(**SERVER)

    async def _model_ready(self, _entry: Entry, request: Any, _context: Any) -> Any:
        try:
            self._service.model(request.name, request.version or None)
        except Refusal:
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=True)

    async def _model_metadata(self, _entry: Entry, request: Any, _context: Any) -> Any:
        model = self._service.model(request.name, request.version or None)
        return message("ModelMetadataResponse")(**describe(model.name, model.version, model.signature))

    async def _model_infer(self, entry: Entry, request: Any, context: Any) -> Any:
        model = self._service.model(request.model_name, request.model_version or None)
        entry.model, entry.version = model.name, model.version
        asked = _decoded(request, model.signature, context.time_remaining())
        y, version = await self._door.answer(entry, asked, model.name, request.model_version or None)
        return _encoded(y, asked, model.name, version)


def _decoded(request: Any, signature: Signature, remaining: float | None) -> Request:
    """The request in a message, under the deadline of its call; a `Refusal` that says what is wrong with it."""
    if len(request.inputs) != 1:
        raise Refusal(400, f"inputs: expected one tensor, got {len(request.inputs)}")
    tensor = request.inputs[0]
    shape = checked_shape(tensor.name, tensor.datatype, list(tensor.shape), signature)
    is_raw = len(request.raw_input_contents) > 0
    if is_raw:
        if len(request.raw_input_contents) != 1 or tensor.HasField("contents"):
            raise Refusal(400, "input: expected one raw_input_contents, or contents of the tensor, got several")
        x = from_bytes(request.raw_input_contents[0], shape, signature.input_dtype)
    else:
        x = _from_contents(tensor.contents, shape, signature.input_dtype)
    for output in request.outputs:
        if output.name != OUTPUT or len(request.outputs) > 1 or output.parameters:
            raise Refusal(400, f"outputs: expected {OUTPUT!r} without parameters, got {output.name!r:.80}")
    timeout = remaining
    if "timeout" in request.parameters:
        microseconds = request.parameters["timeout"].int64_param
        if microseconds < 1:
            raise Refusal(400, f"timeout: expected microseconds, 1 or more, got {microseconds}")
        timeout = min(microseconds / 1e6, math.inf if remaining is None else remaining)
    return Request(x, request.id or None, is_raw, timeout)


def _from_contents(contents: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    field = _TYPED.get(dtype)
    if field is None:
        raise Refusal(400, f"input: {DATATYPES[dtype]} has no typed contents; expected raw_input_contents")
    numbers = np.array(getattr(contents, field), dtype=str(dtype).removeprefix("torch."))
    if numbers.size != math.prod(shape):
        raise Refusal(400, f"input: expected {math.prod(shape)} {field} for shape {shape}, got {numbers.size}")
    return torch.from_numpy(numbers).reshape(shape)


def _encoded(y: Tensor, asked: Request, name: str, version: str) -> Any:
    """The answer, in raw bytes if the question was, or where its datatype has no other form."""
    response = message("ModelInferResponse")(model_name=name, model_version=version, id=asked.id or "")
    output = response.outputs.add(name=OUTPUT, datatype=DATATYPES[y.dtype], shape=list(y.shape))
    if asked.binary or y.dtype not in _TYPED:
        response.raw_output_contents.append(to_bytes(y))
    else:
        getattr(output.contents, _TYPED[y.dtype]).extend(y.flatten().tolist())
    return response
