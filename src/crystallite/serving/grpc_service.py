"""The Open Inference Protocol v2 over gRPC: the same service, checks, token and limits as over HTTP."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.message import DecodeError

from crystallite.core.errors import InvalidOption
from crystallite.serving.grpc_messages import PACKAGE, message
from crystallite.serving.headers import Caller
from crystallite.serving.limits import MOST_HEADER_BYTES, MOST_HEADERS
from crystallite.serving.logs import Entry
from crystallite.serving.protocol import EXTENSIONS, SERVER, Request, Wanted, check_classes, describe, request_of
from crystallite.serving.refusal import CLIENT_LEFT, Refusal
from crystallite.serving.request_guard import RequestGuard
from crystallite.serving.signature import BYTES, Answer, Signature, TensorSpec
from crystallite.serving.tensor_data import Value, checked_spec, from_bytes, strings

__all__ = ["GrpcServer"]

Method = Callable[[Entry, Any, Any], Awaitable[Any]]
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    CLIENT_LEFT: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_CONTENTS = {  # others travel raw
    "FP32": "fp32_contents", "FP64": "fp64_contents", "INT64": "int64_contents", "INT32": "int_contents",
    "INT16": "int_contents", "INT8": "int_contents", "UINT8": "uint_contents", "BOOL": "bool_contents",
    BYTES: "bytes_contents",
}  # fmt: skip
_ENVELOPE = 1 << 16  # bytes of a message beyond its tensors


class GrpcServer:
    """A gRPC port of a service; made, started and stopped on the service's event loop."""

    def __init__(self, guard: RequestGuard, address: str, tls: tuple[bytes, bytes] | None, connections: int) -> None:
        """`address` is host:port; `tls` a private key and a chain of certificates, PEM; `connections`: at most."""
        limits = guard.service.limits
        options = [
            ("grpc.max_receive_message_length", limits.max_bytes + _ENVELOPE),
            ("grpc.max_send_message_length", -1),
            # the headers of both protocols are measured alike, by `Caller`; gRPC counts 32 more for each
            ("grpc.max_metadata_size", MOST_HEADER_BYTES + 32 * MOST_HEADERS),
            ("grpc.absolute_max_metadata_size", 2 * MOST_HEADER_BYTES),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", math.ceil(limits.header_timeout * 1000)),
            ("grpc.max_connection_idle_ms", math.ceil(limits.idle_timeout * 1000)),
            ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a lottery
            # a message is no larger than it looks: a compressed one is refused, not unpacked
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.per_message_decompression", 0),
        ]
        handlers = [_Methods(guard).handlers()]
        self._server = grpc.aio.server(handlers=handlers, options=options, maximum_concurrent_rpcs=connections)
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
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_model_load,
            "RepositoryModelUnload": self._repository_model_unload,
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
            entry = Entry("grpc", call)
            refused: Refusal | None = None
            try:
                with self._door.recorded(entry):
                    caller = Caller.of(context.invocation_metadata() or ())
                    entry.given_id, entry.trace = caller.request_id, caller.trace
                    if not is_open:
                        self._door.admit(caller)
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
        return message("ServerMetadataResponse")(**SERVER, extensions=EXTENSIONS)

    async def _model_ready(self, _entry: Entry, request: Any, _context: Any) -> Any:
        try:
            self._service.model(request.name, request.version or None)
        except Refusal:
            return message("ModelReadyResponse")(ready=False)
        return message("ModelReadyResponse")(ready=True)

    async def _model_metadata(self, _entry: Entry, request: Any, _context: Any) -> Any:
        model = self._service.model(request.name, request.version or None)
        found = describe(model.name, model.versions, model.signature)
        for tensor in found["outputs"]:
            tensor.pop("parameters", None)  # names of classes have no place in these messages; classification has
        return message("ModelMetadataResponse")(**found)

    async def _model_statistics(self, _entry: Entry, request: Any, _context: Any) -> Any:
        models = list(self._service.models.values())
        if request.name:
            models = [self._service.model(request.name, request.version or None)]
        found = [model.statistics.to_json(model.name, model.version) for model in models]
        return message("ModelStatisticsResponse")(model_stats=found)

    async def _repository_index(self, _entry: Entry, request: Any, _context: Any) -> Any:
        states = [state for state in self._service.states if state["state"] == "READY" or not request.ready]
        return message("RepositoryIndexResponse")(models=states)

    async def _repository_model_load(self, _entry: Entry, request: Any, _context: Any) -> Any:
        await self._service.reloaded(request.model_name)
        return message("RepositoryModelLoadResponse")()

    async def _repository_model_unload(self, _entry: Entry, request: Any, _context: Any) -> Any:
        await self._service.unloaded(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def _model_infer(self, entry: Entry, request: Any, context: Any) -> Any:
        model = self._service.model(request.model_name, request.model_version or None)
        entry.model, entry.version = model.name, model.version
        asked = _decoded(request, model.signature, context.time_remaining())
        answer, version = await self._door.answer(entry, asked, model.name, request.model_version or None)
        return _encoded(answer, asked, model.name, version)


def _decoded(request: Any, signature: Signature, remaining: float | None) -> Request:
    """The request in a message, under the deadline of its call; a `Refusal` that says what is wrong with it."""
    if not 0 < len(request.inputs) <= len(signature.all_inputs):
        most = len(signature.all_inputs)
        raise Refusal(400, f"inputs: expected one to {most} tensors, got {len(request.inputs)}")
    raw = request.raw_input_contents
    if raw and (len(raw) != len(request.inputs) or any(tensor.HasField("contents") for tensor in request.inputs)):
        raise Refusal(
            400, "inputs: expected raw_input_contents for each tensor, or contents of each, got other numbers of them"
        )
    signature.check_names([tensor.name for tensor in request.inputs])
    given: dict[str, Value] = {}
    for i, tensor in enumerate(request.inputs):
        spec, shape = checked_spec(tensor.name, tensor.datatype, list(tensor.shape), signature)
        given[spec.name] = from_bytes(raw[i], spec, shape) if raw else _from_contents(tensor.contents, spec, shape)
    wanted: dict[str, Wanted] = {}
    for output in request.outputs:
        if output.parameters.keys() - {"classification"} or output.name in wanted:
            only = "expected different names and no parameter but classification"
            raise Refusal(400, f"outputs: {only}, got {output.name!r:.80}")
        classes = 0
        if "classification" in output.parameters:
            classes = check_classes(output.name, output.parameters["classification"].int64_param)
        wanted[output.name] = Wanted(bool(raw), classes)
    timeout = remaining
    if "timeout" in request.parameters:
        microseconds = request.parameters["timeout"].int64_param
        if microseconds < 1:
            raise Refusal(400, f"timeout: expected microseconds, 1 or more, got {microseconds}")
        timeout = min(microseconds / 1e6, math.inf if remaining is None else remaining)
    return request_of(given, signature, wanted, request.id or None, timeout, bool(raw))


def _from_contents(contents: Any, spec: TensorSpec, shape: list[int]) -> Value:
    if spec.dtype is None:
        return strings(contents.bytes_contents, spec, shape)
    field = _CONTENTS.get(spec.datatype)
    if field is None:
        raise Refusal(400, f"{spec.name}: {spec.datatype} has no typed contents; expected raw_input_contents")
    content = getattr(contents, field)
    if len(content) != math.prod(shape):
        raise Refusal(400, f"{spec.name}: expected {math.prod(shape)} {field} for shape {shape}, got {len(content)}")
    try:
        numbers = np.array(content, dtype=str(spec.dtype).removeprefix("torch."))
    except OverflowError:
        limits = torch.iinfo(spec.dtype)
        raise Refusal(400, f"{spec.name}: expected integers from {limits.min} to {limits.max}") from None
    return torch.from_numpy(numbers).reshape(shape)


def _encoded(answer: Answer, asked: Request, name: str, version: str) -> Any:
    """The answer, in raw bytes if the question was, or where a datatype of it has no other form."""
    response = message("ModelInferResponse")(model_name=name, model_version=version, id=asked.id or "")
    outputs = list(asked.written(answer))
    raw = any(binary or y.datatype not in _CONTENTS for _, binary, y in outputs)
    for output, _, y in outputs:
        described = response.outputs.add(name=output, datatype=y.datatype, shape=y.shape)
        if raw:
            response.raw_output_contents.append(y.raw())
            continue
        values = y.flat()
        if y.datatype == BYTES:
            values = [text.encode() for text in values]
        getattr(described.contents, _CONTENTS[y.datatype]).extend(values)
    return response
