"""`RequestGuard`: authorization, metrics and logging of requests, the same for HTTP and gRPC."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from crystallite.core.errors import CrystalliteError
from crystallite.serving.headers import Caller, check_hosts
from crystallite.serving.logs import Entry, current, server_log
from crystallite.serving.protocol import Request
from crystallite.serving.refusal import CLIENT_LEFT, Refusal
from crystallite.serving.service import Service
from crystallite.serving.signature import Answer
from crystallite.serving.tracing import span_of_request

__all__ = ["RequestGuard"]


class RequestGuard:
    """Checks who sent each request to a service, and records the request in the metrics and the log."""

    def __init__(self, service: Service, token: str | None, allow_hosts: Iterable[str] = ()) -> None:
        self.service = service
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._hosts = check_hosts(allow_hosts)
        self.has_token = token is not None

    def admit(self, caller: Caller) -> None:
        """Refuse a request without the token, or, where there is none, one that another site's page may have sent."""
        if self._hosts or self._expected is None:
            caller.check_host(self._hosts)
        given = (caller.authorization or "").encode()
        if self._expected is not None and not hmac.compare_digest(given, self._expected):
            raise Refusal(401, "expected the service's token: Authorization: Bearer …")

    async def answer(self, entry: Entry, asked: Request, model: str, version: str | None) -> tuple[Answer, str]:
        """The model's answer and the version that gave it."""
        entry.samples = asked.samples
        if entry.given_id is None:
            entry.given_id = asked.id
        about = {"model": model, "protocol": entry.protocol, "samples": asked.samples, "request_id": entry.request_id}
        with span_of_request("infer", entry.trace, **about):
            answer, entry.version = await self.service.answered(model, asked.given, asked.timeout, version)
        return answer, entry.version

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
        except MemoryError:
            entry.status, entry.error = 503, "out of memory"
            raise Refusal(503, "there is not enough memory for this request now", retry_after=1) from None
        except Exception as error:  # ours: the caller learns that, and the log what it was
            entry.status, entry.error = 500, f"{type(error).__name__}: {error}"
            server_log.exception("request %s failed", entry.request_id)
            raise Refusal(500, f"the service failed; its log says why, under {entry.request_id}") from None
        finally:
            current.reset(token)
            if entry.call == "infer" and entry.model is not None:
                metrics, elapsed = self.service.metrics, time.perf_counter() - entry.started
                metrics.count("crystallite_requests_total", model=entry.model, status=str(entry.status))
                metrics.observe("crystallite_request_seconds", elapsed, model=entry.model)
                model = self.service.models.get(entry.model)
                if model is not None and entry.version in model.versions:
                    times = entry.queue_seconds, entry.compute_seconds
                    model.statistics.request(entry.status, elapsed, entry.samples, *times)
            entry.write()
