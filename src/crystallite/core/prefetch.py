"""Asking for memory before it is needed, in kernels that read more streams of it than a processor follows by itself."""

from __future__ import annotations

from typing import Any

from crystallite.core.compiling import cgutils, ir

__all__ = ["ask_for"]


def ask_for(builder: Any, array: Any, offset: Any, ahead: int, *, write: bool = False) -> None:
    """In an intrinsic: have the cache line so many bytes after an entry on its way; it may lie past the array's end."""
    flag = ir.IntType(32)
    entry = builder.bitcast(builder.gep(array.data, [offset]), ir.IntType(8).as_pointer())
    place = builder.gep(entry, [ir.Constant(ir.IntType(64), ahead)])
    kind = ir.FunctionType(ir.VoidType(), [place.type, flag, flag, flag])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [place, *(ir.Constant(flag, n) for n in (int(write), 3, 1))])  # to be kept; data
