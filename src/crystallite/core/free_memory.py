"""Memory that a process no longer uses, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["give_back"]


def give_back() -> None:
    """Give back what was freed and is kept for later, where the C library can be asked for that (glibc).

    It keeps blocks of up to 32 MB, and holes between them add up to hundreds. Worth a call before much is allocated.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # another system, or another C library
        return None
    return found
