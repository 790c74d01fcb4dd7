"""The Open Inference Protocol v2: requests and answers as bytes, JSON alone or JSON and binary tensors behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import Answer, Given, Signature, TensorSpec
from crystallite.serving.tensor_data import Value, Written, checked_spec, classified, from_bytes, from_json, written

__all__ = [
    "EXTENSIONS",
    "HEADER_LENGTH",
    "SERVER",
    "Request",
    "Wanted",
    "check_classes",
    "decode",
    "describe",
    "encode",
    "request_of",
]

HEADER_LENGTH = "Inference-Header-Content-Length"  # bytes of JSON before binary tensors
SERVER = {"name": "crystallite", "version": version("crystallite")}
EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
]


@dataclass(frozen=True)
class Wanted:
    """How an output comes that a client asks for."""

    is_binary: bool
    classes: int = 0  # the largest entries instead of all, with their places and names
    labels: tuple[str, ...] = ()  # the names, where there are any


@dataclass(frozen=True)
class Request:
    """What a client asks for."""

    given: Given
    id: str | None
    outputs: Mapping[str, Wanted]  # by name
    timeout: float | None  # seconds

    @property
    def samples(self) -> int:
        return len(self.given) if isinstance(self.given, list) else next(iter(self.given.values())).shape[0]

    def written(self, answer: Answer) -> Iterator[tuple[str, bool, Written]]:
        """The outputs that are wanted: name, whether in binary, and what is written."""
        for name, wanted in self.outputs.items():
            y = answer[name]
            if wanted.classes and isinstance(y, Tensor):
                yield name, wanted.is_binary, classified(y, wanted.classes, wanted.labels)
            else:
                yield name, wanted.is_binary, written(y)


def describe(name: str, versions: Sequence[str], signature: Signature) -> dict[str, Any]:
    """A model's metadata; outputs whose last axis is classes with names have them as a parameter `labels`."""

    def described(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        found = [{"name": spec.name, "datatype": spec.datatype, "shape": spec.sizes} for spec in specs]
        named = [{"parameters": {"labels": list(spec.labels)}} if spec.labels else {} for spec in specs]
        return [one | labels for one, labels in zip(found, named, strict=True)]

    return {
        "name": name,
        "versions": list(versions),
        "platform": "crystallite",
        "inputs": described(signature.all_inputs),
        "outputs": described((*signature.outputs, *signature.text_outputs)),
    }


def request_of(
    given: Mapping[str, Value],
    signature: Signature,
    wanted: Mapping[str, Wanted],
    identifier: str | None,
    timeout: float | None,
    binary: bool,
) -> Request:
    """A request of some inputs, whose names are compared with the model's; the outputs are those wanted, or all.

    binary: how outputs come that the request does not name.
    """
    signature.check_names(list(given))
    texts = next((value for value in given.values() if isinstance(value, list)), None)
    known = {spec.name: spec for spec in signature.outputs_for(texts is not None)}
    for name, how in wanted.items():
        if name not in known:
            expected = ", ".join(map(repr, known))
            raise Refusal(400, f"outputs: expected {'some of ' * (len(known) > 1)}{expected}, got {name!r:.80}")
        if how.classes and (known[name].dtype in (None, torch.bool) or len(known[name].shape) != 1):
            shape = f"{known[name].datatype} {known[name].described_shape}"
            raise Refusal(400, f"{name}: classification needs numbers of shape [samples, classes], not {shape}")
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    named = {name: replace(how, labels=known[name].labels) for name, how in wanted.items()}
    outputs = named or dict.fromkeys(known, Wanted(binary))
    return Request(texts if texts is not None else tensors, identifier, outputs, timeout)


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
    seconds = None if timeout is None else min(timeout, 10**12) / 1e6
    given = _inputs(header, memoryview(body)[end:], signature)
    binary = parameters.get("binary_data_output") is True
    return request_of(given, signature, _wanted(header, binary), identifier, seconds, binary)


def encode(answer: Answer, request: Request, name: str, version: str) -> tuple[bytes, dict[str, str]]:
    """The body of an answer and its headers."""
    outputs: list[dict[str, Any]] = []
    behind: list[bytes] = []
    for output, binary, y in request.written(answer):
        described: dict[str, Any] = {"name": output, "datatype": y.datatype, "shape": y.shape}
        if binary:
            behind.append(y.raw())
            described["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            described["data"] = y.flat()
        outputs.append(described)
    message: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": outputs}
    if request.id is not None:
        message["id"] = request.id
    try:
        header = json.dumps(message, allow_nan=False).encode()
    except ValueError:
        raise Refusal(406, "the answer holds NaN or infinity, which JSON has not; ask for binary output") from None
    if not behind:
        return header, {"content-type": "application/json"}
    headers = {HEADER_LENGTH: str(len(header)), "content-type": "application/octet-stream"}
    return b"".join([header, *behind]), headers


def _inputs(header: dict[str, Any], raw: memoryview, signature: Signature) -> dict[str, Value]:
    """The tensors by name; those in binary take what follows the JSON one after the other, all of it together."""
    inputs = header.get("inputs")
    if not isinstance(inputs, list) or not inputs or not all(isinstance(tensor, dict) for tensor in inputs):
        raise Refusal(400, f"inputs: expected a list of tensors, got {inputs!r:.80}")
    if len(inputs) > len(signature.all_inputs):
        raise Refusal(400, f"inputs: expected at most {len(signature.all_inputs)} tensors, got {len(inputs)}")
    names = [tensor.get("name") for tensor in inputs]
    for name in names:
        signature.input(name)
    signature.check_names(names)
    found: dict[str, Value] = {}
    place = 0
    for tensor in inputs:
        spec, shape = checked_spec(tensor["name"], tensor.get("datatype"), tensor.get("shape"), signature)
        claimed = _parameters(tensor, spec.name).get("binary_data_size")
        if claimed is None:
            found[spec.name] = from_json(tensor.get("data"), spec, shape)
            continue
        if "data" in tensor:
            raise Refusal(400, f"{spec.name}: expected data or binary_data_size, got both")
        left = len(raw) - place
        if type(claimed) is not int or not 0 <= claimed <= left:
            came = f"binary_data_size {claimed!r:.40} and {left} bytes"
            raise Refusal(400, f"{spec.name}: expected as many bytes behind the JSON as it claims, got {came}")
        found[spec.name] = from_bytes(bytes(raw[place : place + claimed]), spec, shape)
        place += claimed
    if place < len(raw):
        more = len(raw) - place
        raise Refusal(400, f"{more} bytes follow the JSON that no tensor claims with binary_data_size")
    return found


def _wanted(header: dict[str, Any], binary: bool) -> dict[str, Wanted]:
    """The outputs that a request names, and how each comes."""
    outputs = header.get("outputs")
    if outputs is None:
        return {}
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise Refusal(400, f"outputs: expected a list of tensors, got {outputs!r:.80}")
    found: dict[str, Wanted] = {}
    for output in outputs:
        name = output.get("name")
        if not isinstance(name, str) or name in found:
            raise Refusal(400, f"outputs: expected different names, got {name!r:.80}")
        parameters = _parameters(output, name)
        if unknown := parameters.keys() - {"binary_data", "classification"}:
            known = "binary_data or classification"
            raise Refusal(400, f"{name:.80}: expected no parameter but {known}, got {min(unknown)!r:.80}")
        is_binary = bool(parameters.get("binary_data", binary))
        classes = check_classes(name, parameters["classification"]) if "classification" in parameters else 0
        found[name] = Wanted(is_binary, classes)
    return found


def check_classes(name: str, count: object) -> int:
    """How many classes of an output are wanted; a `Refusal` if that is no count."""
    if type(count) is not int or count < 1:
        raise Refusal(400, f"{name:.80}: expected a classification of 1 or more classes, got {count!r:.80}")
    return count


def _parameters(holder: dict[str, Any], name: str) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal(400, f"parameters of {name:.80}: expected a JSON object, got {parameters!r:.80}")
    return parameters
