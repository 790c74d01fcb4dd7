"""The ASGI application: the Open Inference Protocol v2 over a `Service`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from crystallite.serving.headers import Caller
from crystallite.serving.live_trial import SYSTEMS
from crystallite.serving.logs import Entry, current
from crystallite.serving.model import ServedModel
from crystallite.serving.openapi import document
from crystallite.serving.protocol import EXTENSIONS, HEADER_LENGTH, SERVER, decode, describe, encode
from crystallite.serving.refusal import CLIENT_LEFT, Refusal
from crystallite.serving.request_guard import RequestGuard
from crystallite.serving.usage import curl, docs_page, example_request

__all__ = ["application"]

Handler = Callable[[Request], Awaitable[Response]]
_OPEN = (
    "/v2/health/live",
    "/v2/health/ready",
    "/docs",
)  # what is asked before there is a token; the page holds nothing
_LINGER_BYTES, _LINGER_SECONDS = 1 << 20, 1.0


def application(guard: RequestGuard) -> Starlette:
    """The service behind a guard as an ASGI application."""
    handlers = _Handlers(guard)
    routes: list[tuple[str, str, Handler]] = [("/v2/models/stats", "GET", handlers.all_stats)]
    for base in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):  # first what is asked most
        routes.append((f"{base}/infer", "POST", handlers.infer))
        routes.append((f"{base}/ready", "GET", handlers.ready))
        routes.append((f"{base}/stats", "GET", handlers.stats))
        routes.append((base, "GET", handlers.metadata))
    routes += [
        ("/v2/health/live", "GET", handlers.live),
        ("/v2/health/ready", "GET", handlers.live),  # models are loaded before the port is opened
        ("/v2", "GET", handlers.server),
        ("/v2/models", "GET", handlers.models),
        ("/v2/models/{model}/plan", "GET", handlers.plan),
        ("/v2/models/{model}/trial", "GET", handlers.trial),
        ("/v2/models/{model}/trial", "POST", handlers.switch),
        ("/v2/models/{model}/example", "GET", handlers.example),
        ("/v2/repository/index", "POST", handlers.index),
        ("/v2/repository/models/{model}/load", "POST", handlers.load),
        ("/v2/repository/models/{model}/unload", "POST", handlers.unload),
        ("/metrics", "GET", handlers.metrics),
        ("/openapi.json", "GET", handlers.openapi),
        ("/docs", "GET", handlers.docs),
    ]
    guarded = [Route(path, handlers.guard(handler), methods=[method]) for path, method, handler in routes]
    app = Starlette(routes=guarded, exception_handlers={HTTPException: _not_found})
    app.router.redirect_slashes = False  # a path that is nearly right is not found: no answer leads elsewhere
    return app


class _Handlers:
    def __init__(self, guard: RequestGuard) -> None:
        self._service, self._guard = guard.service, guard

    def guard(self, handler: Handler) -> Handler:
        """The handler with authorization, errors as JSON, metrics and logging."""
        call = handler.__name__

        async def guarded(request: Request) -> Response:
            entry = Entry("http", call)
            try:
                with self._guard.recorded(entry):
                    target = request.scope["path"] + request.scope["query_string"].decode("latin-1")
                    caller = Caller.of(request.headers.items(), target)
                    entry.given_id, entry.trace = caller.request_id, caller.trace
                    if request.scope["path"] not in _OPEN:
                        self._guard.admit(caller)
                    response = await handler(request)
                    entry.status = response.status_code
            except Refusal as refusal:
                response = _refused(refusal)
            response.headers["x-request-id"] = entry.request_id
            return response

        return guarded

    async def live(self, _request: Request) -> Response:
        return Response()

    async def server(self, _request: Request) -> Response:
        return JSONResponse({**SERVER, "extensions": EXTENSIONS})

    async def openapi(self, _request: Request) -> Response:
        return JSONResponse(document(self._service.models, self._guard.has_token))

    async def metadata(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse(describe(model.name, model.versions, model.signature))

    async def ready(self, request: Request) -> Response:
        self._model(request)
        return Response()

    async def index(self, _request: Request) -> Response:
        return JSONResponse(self._service.states)

    async def models(self, _request: Request) -> Response:
        models = self._service.models
        tried = {name for name, model in models.items() if model.trial is not None}
        return JSONResponse({"models": [{**one, "trial": one["name"] in tried} for one in self._service.states]})

    async def load(self, request: Request) -> Response:
        model = await self._service.reloaded(request.path_params["model"])
        return JSONResponse({"name": model.name, "version": model.version})

    async def unload(self, request: Request) -> Response:
        await self._service.unloaded(request.path_params["model"])
        return JSONResponse({"name": request.path_params["model"]})

    async def stats(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse({"model_stats": [model.statistics.to_json(model.name, model.version)]})

    async def all_stats(self, _request: Request) -> Response:
        models = self._service.models.values()
        return JSONResponse({"model_stats": [model.statistics.to_json(model.name, model.version) for model in models]})

    async def trial(self, request: Request) -> Response:
        trial = self._service.trial_of(request.path_params["model"])
        return JSONResponse(await asyncio.to_thread(trial.summary))

    async def switch(self, request: Request) -> Response:
        trial = self._service.trial_of(request.path_params["model"])
        try:
            asked = json.loads(await self._body(request))
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict) or asked.keys() != {"answer_from"} or asked["answer_from"] not in SYSTEMS:
            raise Refusal(400, 'expected {"answer_from": "original"} or {"answer_from": "reorganized"}')
        await asyncio.to_thread(trial.switch, asked["answer_from"])
        return await self.trial(request)

    async def plan(self, request: Request) -> Response:
        return JSONResponse(self._model(request).plan.to_json())

    async def example(self, request: Request) -> Response:
        model, url = self._model(request), f"{request.url.scheme}://{request.url.netloc}"
        return JSONResponse({"request": example_request(model), "curl": curl(model, url, self._guard.has_token)})

    async def docs(self, _request: Request) -> Response:
        page, policy = docs_page(self._guard.has_token)
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(page, headers=headers)

    async def metrics(self, _request: Request) -> Response:
        models = self._service.models
        queues = {name: model.waiting for name, model in models.items()}
        replicas = {
            (name, piece): count
            for name, model in models.items()
            for piece, count in (await model.engine.replicas()).items()
        }
        return PlainTextResponse(self._service.metrics.text(queues, replicas), media_type="text/plain; version=0.0.4")

    async def infer(self, request: Request) -> Response:
        model, entry = self._model(request), current.get()
        assert entry is not None
        entry.model, entry.version = model.name, model.version
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "expected a body without compression")
        asked = decode(await self._body(request), request.headers.get(HEADER_LENGTH), model.signature)
        with _cancelled_if_left(request) as left:
            try:
                answer, version = await self._guard.answer(entry, asked, model.name, request.path_params.get("version"))
            except asyncio.CancelledError:
                if not left():
                    raise
                return Response(status_code=CLIENT_LEFT)
        body, headers = encode(answer, asked, model.name, version)
        return Response(body, headers=headers)

    async def _body(self, request: Request) -> bytes:
        """The whole request body; refused if it is larger or slower than the limits allow."""
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
            raise Refusal(CLIENT_LEFT, "the client left while it was sending") from None
        return bytes(body)

    def _model(self, request: Request) -> ServedModel:
        return self._service.model(request.path_params["model"], request.path_params.get("version"))


@contextmanager
def _cancelled_if_left(request: Request) -> Iterator[Callable[[], bool]]:
    """Cancel the current task when the client disconnects; yields a function that says whether it did."""
    task, is_watched = asyncio.current_task(), True

    def leave(leaving: asyncio.Future[Any]) -> None:
        if is_watched and not leaving.cancelled() and task is not None:
            task.cancel()

    leaving = asyncio.ensure_future(request.receive())  # the body was read: what comes now is the end
    leaving.add_done_callback(leave)
    try:
        yield leaving.done
    finally:
        is_watched = False
        leaving.cancel()


async def _linger(stream: AsyncIterator[bytes], request: Request) -> None:
    """Read on for a moment: a client that is still sending when the connection closes may never see the error."""
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
