"""The OpenAPI 3.1 document of the REST interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from crystallite.serving.protocol import HEADER_LENGTH, SERVER
from crystallite.serving.signature import BYTES, DATATYPES

__all__ = ["document"]

_REASONS = {
    400: "The request is not what the protocol or the model expects",
    401: "The service's token is missing",
    403: "Without a token: a Host that is not this machine, or a page of another site",
    404: "No such model or version",
    406: "The answer holds NaN or infinity, which JSON has not; ask for binary output",
    408: "The body did not come in time",
    409: "The new version may not be served; the old one stays",
    413: "The body is too large",
    415: "The body is compressed",
    429: "Too many requests, or reloads, wait already; Retry-After says when to try again",
    431: "The headers are too large",
    500: "The service failed; its log says why",
    501: "The models run on Ray, where whoever deployed them brings new versions",
    503: "A part of the model failed, or the service ends; Retry-After says when to try again",
    504: "No answer within the time that was allowed",
}
_TEXT = {"type": "string"}
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 32}
_DATATYPE = {"type": "string", "enum": sorted([*DATATYPES.values(), BYTES])}
_VALUE = {"type": ["number", "string", "boolean"]}
_VALUES = {"type": "array", "items": {"anyOf": [_VALUE, {"$ref": "#/components/schemas/Nested"}]}}


def document(models: Iterable[str], has_token: bool) -> dict[str, Any]:
    """The paths, messages and errors of a service of these models.

    >>> sorted(document(["small"], False)["paths"])[:2]
    ['/docs', '/metrics']
    """
    paths: dict[str, Any] = {
        "/v2/health/live": {"get": _operation("Whether the server runs", {}, is_open=True)},
        "/v2/health/ready": {"get": _operation("Whether it answers", {}, is_open=True)},
        "/v2": {"get": _operation("What the server is", _json("Server"))},
        "/v2/models": {"get": _operation("The models and whether each is loaded", _json("States"))},
        "/v2/models/stats": {"get": _operation("What all models have answered", _json("Statistics"))},
        "/v2/repository/index": {"post": _operation("The models", _json({"type": "array", "items": _ref("State")}))},
        "/v2/repository/models/{model}/load": {
            "post": _operation("Open the model's folder again", _json("Loaded"), 404, 409, 429, 501),
            "parameters": [_in_path("model", models)],
        },
        "/v2/repository/models/{model}/unload": {
            "post": _operation("Stop the model and release its memory", _json("Unloaded"), 404, 429, 501),
            "parameters": [_in_path("model", models)],
        },
        "/v2/models/{model}/plan": {
            "get": _operation("Which pieces of the model are services", _json({"type": "object"}), 404),
            "parameters": [_in_path("model", models)],
        },
        "/v2/models/{model}/trial": {
            "get": _operation("What a trial against the original has shown", _json("Trial"), 404),
            "post": _switch(),
            "parameters": [_in_path("model", models)],
        },
        "/v2/models/{model}/example": {
            "get": _operation("A request to copy, as JSON and for a shell", _json("Example"), 404),
            "parameters": [_in_path("model", models)],
        },
        "/docs": {"get": _operation("A page to try the service", {"content": {"text/html": {}}}, is_open=True)},
        "/metrics": {"get": _operation("Numbers for Prometheus", {"content": {"text/plain": {"schema": _TEXT}}})},
    }
    for suffix in ("", "/versions/{version}"):
        base, parameters = f"/v2/models/{{model}}{suffix}", [_in_path("model", models)]
        if suffix:
            parameters.append(_in_path("version"))
        infer = _operation("The model's answer", _answer(), 400, 404, 406, 408, 413, 415, 429, 503, 504)
        infer["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref("Request")}}}
        infer["parameters"].append(_header(HEADER_LENGTH, {"type": "integer", "minimum": 0}))
        infer["description"] = (
            f"Binary tensors stand behind the JSON, whose length is then said in {HEADER_LENGTH}; a tensor in binary "
            "has no data but the parameter binary_data_size."
        )
        paths[base] = {"get": _operation("What the model takes and returns", _json("Model"), 404)}
        paths[f"{base}/ready"] = {"get": _operation("Whether the model answers", {}, 404)}
        paths[f"{base}/infer"] = {"post": infer}
        paths[f"{base}/stats"] = {"get": _operation("What the model has answered", _json("Statistics"), 404)}
        for path in (base, f"{base}/ready", f"{base}/infer", f"{base}/stats"):
            paths[path]["parameters"] = parameters
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"{SERVER['name']}: Open Inference Protocol v2", "version": SERVER["version"]},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if has_token:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"token": []}]
    return described


def _operation(summary: str, answer: dict[str, Any], *errors: int, is_open: bool = False) -> dict[str, Any]:
    statuses = sorted({*errors, 400, 431, 500} | (set() if is_open else {401, 403}))
    refused = {str(status): {"description": _REASONS[status], **_json("Error")} for status in statuses}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": summary, **answer}, **refused},
        "parameters": [_header("X-Request-Id", _TEXT), _header("traceparent", _TEXT)],
    }
    if is_open:
        operation["security"] = []
    return operation


def _switch() -> dict[str, Any]:
    operation = _operation("Choose the system that answers", _json("Trial"), 404, 408, 409, 413)
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref("Switch")}}}
    return operation


def _schemas() -> dict[str, Any]:
    tensor = {"name": _TEXT, "datatype": _DATATYPE, "shape": _SHAPE}
    labels = {"type": "object", "properties": {"labels": {"type": "array", "items": _TEXT}}}
    metadata = {**tensor, "shape": {"type": "array", "items": {"type": "integer", "minimum": -1}}, "parameters": labels}
    size = {"type": "object", "properties": {"binary_data_size": {"type": "integer", "minimum": 0}}}
    forms = {"binary_data": {"type": "boolean"}, "classification": {"type": "integer", "minimum": 1}}
    form = {"type": "object", "properties": forms, "additionalProperties": False}
    asked = {"binary_data_output": {"type": "boolean"}, "timeout": {"type": "integer", "minimum": 1}}
    given = _object({**tensor, "data": _VALUES, "parameters": size}, "name datatype shape")
    wanted = _object({"name": _TEXT, "parameters": form}, "name")
    values = {"type": "array", "items": {"type": ["number", "boolean", "string"]}}
    returned = _object({**tensor, "data": values, "parameters": size})
    described = {"type": "array", "items": _object(metadata, "name datatype shape")}
    return {
        "Error": _object({"error": _TEXT}),
        "Server": _object({"name": _TEXT, "version": _TEXT, "extensions": {"type": "array", "items": _TEXT}}),
        "State": _object({"name": _TEXT, "version": _TEXT, "state": _TEXT, "reason": _TEXT}),
        "States": _object({"models": {"type": "array", "items": _ref("State")}}),
        "Loaded": _object({"name": _TEXT, "version": _TEXT}),
        "Unloaded": _object({"name": _TEXT}),
        "Switch": _object({"answer_from": {"enum": ["original", "reorganized"]}}) | {"additionalProperties": False},
        "Trial": _object({"answer_from": _TEXT, "requests": {"type": "integer"}}),
        "Example": _object({"request": _ref("Request"), "curl": _TEXT}),
        "Statistics": _object({"model_stats": {"type": "array", "items": {"type": "object"}}}),
        "Model": _object({
            "name": _TEXT, "versions": {"type": "array", "items": _TEXT}, "platform": _TEXT, "inputs": described,
            "outputs": described,
        }),
        "Request": _object({
            "id": _TEXT, "parameters": {"type": "object", "properties": asked},
            "inputs": {"type": "array", "items": given, "minItems": 1},
            "outputs": {"type": "array", "items": wanted},
        }, "inputs"),
        "Answer": _object({
            "id": _TEXT, "model_name": _TEXT, "model_version": _TEXT,
            "outputs": {"type": "array", "items": {**returned, "required": [*tensor]}},
        }, "model_name model_version outputs"),
        "Nested": _VALUES,
    }  # fmt: skip


def _object(properties: dict[str, Any], required: str | None = None) -> dict[str, Any]:
    names = list(properties) if required is None else required.split()
    return {"type": "object", "properties": properties, "required": names}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: str | dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": _ref(schema) if isinstance(schema, str) else schema}}}


def _answer() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Answer")}, "application/octet-stream": {}}
    return {"content": content, "headers": {HEADER_LENGTH: {"schema": _TEXT, "description": "of the JSON, in bytes"}}}


def _header(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema}


def _in_path(name: str, choices: Iterable[str] | None = None) -> dict[str, Any]:
    schema = _TEXT if choices is None else {**_TEXT, "enum": list(choices)}
    return {"name": name, "in": "path", "required": True, "schema": schema}
