"""Compiled code that checks every index: `CRYSTALLITE_CHECK_INDICES=1`, set before Python starts.

Kernels trust their index tables, which are checked where they enter. With this switch they trust nothing: an index
outside its array raises IndexError, in loops and in the vector instructions that we write ourselves. It is for tests:
everything is compiled anew in each process, runs on one thread and takes many times as long.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import os
from typing import Any

from crystallite.core.compiling import COMPILES, ir, numba

__all__ = ["CHECK_INDICES", "check_span"]

CHECK_INDICES = COMPILES and os.environ.get("CRYSTALLITE_CHECK_INDICES", "0") not in ("", "0")
if CHECK_INDICES:
    numba.config.BOUNDSCHECK = 1  # for all that is compiled in this process, whoever calls it


def check_span(context: Any, builder: Any, array: Any, first: Any, count: int) -> None:
    """In an intrinsic: raise IndexError unless entries [first, first + count) of a contiguous array are inside it.

    No instruction is emitted without the switch.
    """
    if not CHECK_INDICES:
        return
    zero, last = ir.Constant(first.type, 0), builder.add(first, ir.Constant(first.type, count))
    below = builder.icmp_signed("<", first, zero)
    with builder.if_then(builder.or_(below, builder.icmp_signed(">", last, array.nitems)), likely=False):
        context.call_conv.return_user_exc(builder, IndexError, ("a vector of numbers outside its array",))
