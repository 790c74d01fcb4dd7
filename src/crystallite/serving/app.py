"""The ASGI application: the Open Inference Protocol v2 over a `Service`."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from crystallite.errors import CrystalliteError
from crystallite.serving.model import ServedModel
from crystallite.serving.protocol import HEADER_LENGTH, decode, describe, encode
from crystallite.serving.refusal import Refusal
from crystallite.serving.service import Service

__all__ = ["application"]

Handler = Callable[[Request], Awaitable[Response]]
_OPEN = ("/v2/health/live", "/v2/health/ready")  # what a supervisor asks before it has a token
_LINGER_BYTES, _LINGER_SECONDS = 1 << 20, 1.0
_CLIENT_LEFT = 499  # nginx's code, for the metrics: nobody is there to read it


def application(service: Service, token: str | None = None) -> Starlette:
    """The service as an ASGI application; with a token, requests must carry it as `Authorization: Bearer …`."""
    handlers = _Handlers(service, token)
    routes = [
        ("/v2/health/live", "GET", handlers.live),
        ("/v2/health/ready", "GET", handlers.live),  # models are loaded before the port is opened
        ("/v2", "GET", handlers.server),
        ("/v2/repository/index", "POST", handlers.index),
        ("/v2/repository/models/{model}/load", "POST", handlers.load),
        ("/metrics", "GET", handlers.metrics),
    ]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        routes.append((base, "GET", handlers.metadata))
        routes.append((f"{base}/ready", "GET", handlers.ready))
        routes.append((f"{base}/infer", "POST", handlers.infer))
    guarded = [Route(path, handlers.guard(handler), methods=[method]) for path, method, handler in routes]
    return Starlette(routes=guarded, exception_handlers={HTTPException: _not_found})


class _Handlers:
    def __init__(self, service: Service, token: str | None) -> None:
        self._service, self._token = service, token

    def guard(self, handler: Handler) -> Handler:
        """The handler behind the token, with refusals as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                self._authorize(request)
                return await handler(request)
            except Refusal as refusal:
                return _refused(refusal)
            except CrystalliteError as error:
                return _refused(Refusal(409, str(error)))

        return guarded

    def _authorize(self, request: Request) -> None:
        if self._token is None or request.url.path in _OPEN:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refusal(401, "expected the service's token: Authorization: Bearer …")

    async def live(self, _request: Request) -> Response:
        return Response()

    async def server(self, _request: Request) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse({"name": "crystallite", "version": "2", "extensions": extensions})

    async def metadata(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse(describe(model.name, model.version, model.signature))

    async def ready(self, request: Request) -> Response:
        self._model(request)
        return Response()

    async def index(self, _request: Request) -> Response:
        models = self._service.models.values()
        return JSONResponse([{"name": m.name, "version": m.version, "state": "READY", "reason": ""} for m in models])

    async def load(self, request: Request) -> Response:
        model = await self._service.reloaded(request.path_params["model"])
        return JSONResponse({"name": model.name, "version": model.version})

    async def metrics(self, _request: Request) -> Response:
        queues = {name: model.batcher.waiting for name, model in self._service.models.items()}
        return PlainTextResponse(self._service.metrics.text(queues), media_type="text/plain; version=0.0.4")

    async def infer(self, request: Request) -> Response:
        model, started, status = self._model(request), time.perf_counter(), 500
        try:
            response = await self._answer(request, model)
            status = response.status_code
            return response
        except Refusal as refusal:
            status = refusal.status
            raise
        finally:
            labels = {"model": model.name, "status": str(status)}
            self._service.metrics.count("crystallite_requests_total", **labels)
            elapsed = time.perf_counter() - started
            self._service.metrics.observe("crystallite_request_seconds", elapsed, model=model.name)

    async def _answer(self, request: Request, model: ServedModel) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "expected a body without compression")
        asked = decode(await self._body(request), request.headers.get(HEADER_LENGTH), model.signature)
        version = request.path_params.get("version")
        answer = asyncio.ensure_future(self._service.answered(model.name, asked.x, asked.timeout, version))
        leaving = asyncio.ensure_future(request.receive())  # the body was read: what comes now is the end
        try:
            await asyncio.wait([answer, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=_CLIENT_LEFT)
        finally:
            for task in (answer, leaving):
                task.cancel()
        y, version = answer.result()
        body, headers = encode(y, asked, model.name, version)
        return Response(body, headers=headers)

    async def _body(self, request: Request) -> bytes:
        """The whole body, but not more of it than is allowed, nor slower."""
        most = self._service.limits.max_bytes
        too_large = Refusal(413, f"expected a body of at most {most} bytes")
        claimed = request.headers.get("content-length", "0")
        if claimed.isdigit() and int(claimed[:20]) > most:
            await _linger(request.stream(), request)
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._service.limits.timeout):
                async for chunk in (stream := request.stream()):
                    body += chunk
                    if len(body) > most:
                        await _linger(stream, request)
                        raise too_large
        except TimeoutError:
            raise Refusal(408, f"the body did not come within {self._service.limits.timeout:g} s") from None
        except ClientDisconnect:
            raise Refusal(_CLIENT_LEFT, "the client left while it was sending") from None
        return bytes(body)

    def _model(self, request: Request) -> ServedModel:
        return self._service.model(request.path_params["model"], request.path_params.get("version"))


async def _linger(stream: AsyncIterator[bytes], request: Request) -> None:
    """Read on a little: a client that is still sending when the connection closes may never see why."""
    if request.headers.get("expect", "").lower() == "100-continue":  # it waits for leave before it sends
        return
    left = _LINGER_BYTES
    with suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_LINGER_SECONDS):
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return


def _refused(refusal: Refusal) -> Response:
    headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status == 413:
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse({"error": str(refusal)}, refusal.status, headers)


async def _not_found(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path:.200}: {error.detail}"
    return Response(json.dumps({"error": message}), error.status_code, error.headers, "application/json")
