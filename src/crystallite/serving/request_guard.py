"""`RequestGuard`: authorization, metrics and logging of requests, the same for HTTP and gRPC."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from crystallite.core.errors import CrystalliteError
from crystallite.serving.logs import Entry, current
from crystallite.serving.protocol import Request
from crystallite.serving.refusal import CLIENT_LEFT, Refusal
from crystallite.serving.service import Service

__all__ = ["RequestGuard"]


class RequestGuard:
    """Checks the token of each request to a service, and records the request in the metrics and the log."""

    def __init__(self, service: Service, token: str | None) -> None:
        self.service = service
        self._expected = None if token is None else f"Bearer {token}".encode()
        self.has_token = token is not None

    def authorize(self, given: str | None) -> None:
        """Refuse a request that does not carry the token, if there is one."""
        if self._expected is not None and not hmac.compare_digest((given or "").encode(), self._expected):
            raise Refusal(401, "expected the service's token: Authorization: Bearer …")

    async def answer(self, entry: Entry, asked: Request, model: str, version: str | None) -> tuple[Tensor, str]:
        """The model's answer and the version that gave it."""
        entry.samples = len(asked.x)
        if entry.given_id is None:
            entry.given_id = asked.id
        y, entry.version = await self.service.answered(model, asked.x, asked.timeout, version)
        return y, entry.version

    @contextmanager
    def recorded(self, entry: Entry) -> Iterator[None]:
        """A request that ends in metrics and in the log; whatever it fails with comes out as a `Refusal`."""
        token = current.set(entry)
        try:
            yield
        except CrystalliteError as error:
            refusal = error if isinstance(error, Refusal) else Refusal(409, str(error))
            entry.status, entry.error = refusal.status, str(refusal)
            raise refusal from None
        except asyncio.CancelledError:
            entry.status = CLIENT_LEFT
            raise
        finally:
            current.reset(token)
            if entry.call == "infer" and entry.model is not None:
                metrics, elapsed = self.service.metrics, time.perf_counter() - entry.started
                metrics.count("crystallite_requests_total", model=entry.model, status=str(entry.status))
                metrics.observe("crystallite_request_seconds", elapsed, model=entry.model)
            entry.write()
