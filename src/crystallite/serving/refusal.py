"""`Refusal`: an error that is returned to the client, with its HTTP status."""

from __future__ import annotations

from crystallite.core.errors import CrystalliteError

__all__ = ["CLIENT_LEFT", "Refusal", "not_opened"]

CLIENT_LEFT = 499  # nginx's code, for metrics and logs: nobody is there to read it


class Refusal(CrystalliteError):
    """A request that was not answered: `status` is its HTTP code, `retry_after` seconds after which to try again.

    >>> Refusal(429, "the queue is full", retry_after=2).status
    429
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


def not_opened(name: str, error: BaseException) -> Refusal:
    """What is said of a new version that could not be opened, for a reason that nobody foresaw.

    >>> str(not_opened("small", MemoryError()))
    'small: its new version could not be opened: MemoryError'
    """
    reason = f"{type(error).__name__}: {error!s:.300}".removesuffix(": ")
    return Refusal(409, f"{name}: its new version could not be opened: {reason}")
