"""The Open Inference Protocol v2: requests and answers as bytes, JSON alone or JSON and binary tensors behind it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import DATATYPES, Signature

__all__ = [
    "HEADER_LENGTH", "INPUT", "OUTPUT", "SERVER", "Request", "checked_shape", "decode", "describe", "encode",
    "from_bytes", "to_bytes",
]  # fmt: skip

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON before binary tensors
SERVER = {"name": "crystallite", "version": version("crystallite")}
INPUT, OUTPUT = "input", "output"
_MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    x: Tensor
    id: str | None
    binary: bool  # whether the answer's tensor comes in binary
    timeout: float | None  # seconds


def describe(name: str, version: str, signature: Signature) -> dict[str, Any]:
    """A model's metadata."""
    taken = {"datatype": DATATYPES[signature.input_dtype], "shape": [-1, *signature.input_shape]}
    returned = {"datatype": DATATYPES[signature.output_dtype], "shape": [-1, *signature.output_shape]}
    return {
        "name": name,
        "versions": [version],
        "platform": "crystallite",
        "inputs": [{"name": INPUT, **taken}],
        "outputs": [{"name": OUTPUT, **returned}],
    }


def decode(body: bytes, header_length: str | None, signature: Signature) -> Request:
    """The request in a body; a `Refusal` that says what is wrong with it.

    What it claims is compared with what came before anything is made of it.
    """
    end = len(body)
    if header_length is not None:
        if not (header_length.isascii() and header_length.isdigit() and int(header_length[:20]) <= end):
            raise Refusal(400, f"{HEADER_LENGTH}: expected at most the {end} bytes that came, got {header_length:.40}")
        end = int(header_length)
    try:
        header = json.loads(body[:end])
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"expected a request in JSON: {error!s:.200}") from None
    if not isinstance(header, dict):
        raise Refusal(400, f"expected a JSON object, got {type(header).__name__}")
    identifier = header.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise Refusal(400, f"id: expected a string, got {identifier!r:.80}")
    parameters = _parameters(header, "the request")
    timeout = parameters.get("timeout")
    if timeout is not None and (type(timeout) is not int or timeout < 1):
        raise Refusal(400, f"timeout: expected microseconds, 1 or more, got {timeout!r:.80}")
    x = _input(header, body[end:], signature)
    binary = _binary_output(header, parameters.get("binary_data_output") is True)
    return Request(x, identifier, binary, None if timeout is None else min(timeout, 10**12) / 1e6)


def encode(y: Tensor, request: Request, name: str, version: str) -> tuple[bytes, dict[str, str]]:
    """The body of an answer and its headers."""
    output: dict[str, Any] = {"name": OUTPUT, "datatype": DATATYPES[y.dtype], "shape": list(y.shape)}
    answer: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": [output]}
    if request.id is not None:
        answer["id"] = request.id
    if request.binary:
        raw = to_bytes(y)
        output["parameters"] = {"binary_data_size": len(raw)}
        header = json.dumps(answer).encode()
        return header + raw, {HEADER_LENGTH: str(len(header)), "content-type": "application/octet-stream"}
    output["data"] = y.flatten().tolist()
    try:
        return json.dumps(answer, allow_nan=False).encode(), {"content-type": "application/json"}
    except ValueError:
        raise Refusal(406, "the answer holds NaN or infinity, which JSON has not; ask for binary output") from None


def _input(header: dict[str, Any], raw: bytes, signature: Signature) -> Tensor:
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise Refusal(400, f"inputs: expected a list of one tensor, {INPUT!r}, got {inputs!r:.80}")
    tensor = inputs[0]
    sizes = checked_shape(tensor.get("name"), tensor.get("datatype"), tensor.get("shape"), signature)
    claimed = _parameters(tensor, "input").get("binary_data_size")
    if claimed is None:
        if raw:
            raise Refusal(400, f"{len(raw)} bytes follow the JSON, but no tensor claims them with binary_data_size")
        return _from_json(tensor.get("data"), sizes, signature.input_dtype)
    if "data" in tensor:
        raise Refusal(400, "input: expected data or binary_data_size, got both")
    if claimed != len(raw) or type(claimed) is not int:
        needed = math.prod(sizes) * signature.input_dtype.itemsize
        found = f"binary_data_size {claimed!r:.40} and {len(raw)} bytes"
        raise Refusal(400, f"input: expected {needed} bytes for shape {sizes}, got {found}")
    return from_bytes(raw, sizes, signature.input_dtype)


def checked_shape(name: object, datatype: object, shape: object, signature: Signature) -> list[int]:
    """The shape of a tensor that is called as the model's input, has its datatype and fits it; else a `Refusal`."""
    if name != INPUT:
        raise Refusal(400, f"inputs: expected the name {INPUT!r}, got {name!r:.80}")
    if datatype != DATATYPES[signature.input_dtype]:
        raise Refusal(400, f"input: expected datatype {DATATYPES[signature.input_dtype]}, got {datatype!r:.80}")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if len(sizes) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size < 2**40 for size in sizes):
        raise Refusal(400, f"input: expected a shape, got {shape!r:.80}")
    if tuple(sizes[1:]) != signature.input_shape or sizes[:1] in ([], [0]):
        wanted = ", ".join(["samples", *map(str, signature.input_shape)])
        raise Refusal(400, f"input: expected shape [{wanted}], got {shape!r:.80}")
    return sizes


def from_bytes(raw: bytes, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The tensor in some bytes, if they are as many as its shape says; else a `Refusal`."""
    needed = math.prod(shape) * dtype.itemsize
    if len(raw) != needed:
        raise Refusal(400, f"input: expected {needed} bytes for shape {shape}, got {len(raw)}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def to_bytes(y: Tensor) -> bytes:
    """The numbers of a tensor, row by row."""
    return y.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _from_json(data: Any, shape: list[int], dtype: torch.dtype) -> Tensor:
    if not isinstance(data, list):
        raise Refusal(400, f"input: expected data, a list of numbers, got {data!r:.80}")
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(data)
    except (ValueError, OverflowError):  # lists of different lengths, or nested too deeply
        numbers = np.array(None)
    kinds = "fiu" if dtype.is_floating_point else "iu"
    if numbers.dtype.kind not in kinds or numbers.size != math.prod(shape):
        what = "numbers" if dtype.is_floating_point else "integers"
        found = f"{numbers.size} values" if numbers.dtype.kind in kinds else "something else"
        raise Refusal(400, f"input: expected {math.prod(shape)} {what} for shape {shape}, got {found}")
    if numbers.ndim > 1 and list(numbers.shape) != shape:
        raise Refusal(400, f"input: expected a flat list or one of shape {shape}, got {list(numbers.shape)}")
    if numbers.dtype.kind == "u":  # beyond 2**63, which torch has no integers for
        numbers = numbers.astype(np.float64) if dtype.is_floating_point else np.full(numbers.shape, -1)
    return torch.from_numpy(numbers).to(dtype).reshape(shape)


def _binary_output(header: dict[str, Any], binary: bool) -> bool:
    outputs = header.get("outputs")
    if outputs is None or outputs == []:
        return binary
    if not isinstance(outputs, list) or len(outputs) != 1 or not isinstance(outputs[0], dict):
        raise Refusal(400, f"outputs: expected a list of one tensor, {OUTPUT!r}, got {outputs!r:.80}")
    if outputs[0].get("name") != OUTPUT:
        raise Refusal(400, f"outputs: expected the name {OUTPUT!r}, got {outputs[0].get('name')!r:.80}")
    parameters = _parameters(outputs[0], "output")
    if unknown := parameters.keys() - {"binary_data"}:
        raise Refusal(400, f"output: expected no parameter but binary_data, got {min(unknown)!r:.80}")
    return bool(parameters.get("binary_data", binary))


def _parameters(holder: dict[str, Any], name: str) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal(400, f"parameters of {name}: expected a JSON object, got {parameters!r:.80}")
    return parameters
