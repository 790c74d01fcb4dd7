"""How a module of the transform tier reaches the pieces that it was cut into, whatever runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from crystallite.serving.signature import Tensors

__all__ = ["Caller", "Request", "call_pieces", "calls_go_to"]

Request = tuple[str, Tensors]  # a piece, and what it is called with
Caller = Callable[[Sequence[Request]], list[Tensors]]

_caller: ContextVar[Caller] = ContextVar("crystallite_pieces")


def call_pieces(requests: Sequence[Request]) -> list[Tensors]:
    """What the pieces return, all called at once, by whoever runs the model: see `calls_go_to`."""
    return _caller.get()(requests)


@contextmanager
def calls_go_to(caller: Caller) -> Iterator[None]:
    """Have `call_pieces` call this meanwhile, in this thread."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
