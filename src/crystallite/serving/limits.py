"""`Limits`: batch size, queue length, timeouts and request size of a service."""

from __future__ import annotations

from dataclasses import dataclass

from crystallite.core.errors import InvalidOption

__all__ = ["MOST_HEADERS", "MOST_HEADER_BYTES", "Limits"]

MOST_HEADER_BYTES = 1 << 16  # of a request, with its first line
MOST_HEADERS = 200


@dataclass(frozen=True)
class Limits:
    """The limits of a service; each model has a queue of its own.

    >>> Limits(max_batch=0)
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: max_batch: expected at least 1, got 0
    """

    max_batch: int = 64  # samples that are computed together; a larger request is computed alone
    max_wait: float = 0.0  # seconds an idle model waits for more samples before it computes a batch that is not full
    max_queue: int = 256  # requests that wait while others are computed
    timeout: float = 30.0  # seconds a request may take, unless it names fewer
    max_bytes: int = 64 << 20  # of a request's body
    attempts: int = 3  # calls of a piece before its failure is believed
    max_connections: int = 512  # open at once, of each protocol, or fewer if the process may not open as many files
    header_timeout: float = 10.0  # seconds until a connection must have sent a request's headers
    idle_timeout: float = 60.0  # seconds that a connection may stay open without a request, or without reading answers

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_bytes", "attempts", "max_connections"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.max_wait >= 0:
            raise InvalidOption(f"max_wait: expected seconds, 0 or more, got {self.max_wait}")
        for name in ("timeout", "header_timeout", "idle_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidOption(f"{name}: expected seconds, more than 0, got {getattr(self, name)}")
