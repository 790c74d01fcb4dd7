"""What compiled functions need to work in a team on the same memory: arrays by address, counters, a way in."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from crystallite.core.compiling import carray, cfunc, intrinsic, ir, njit, types
from crystallite.core.index_checks import CHECK_INDICES

__all__ = ["array_at", "claim", "finish", "member", "part", "wait"]

part = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorates what only compiled functions call."""


@intrinsic
def _pointer(_typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to numbers of the kind of an array."""
    pointer = types.CPointer(like.dtype)

    def generate(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@part
def array_at(address, length, like):
    """The vector of so many numbers that lies at an address; they are of the kind of `like`."""
    return carray(_pointer(address, like), length)


def _place(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    array = context.make_array(sig.args[0])(context, builder, args[0])
    return builder.gep(array.data, [args[1]])


@intrinsic
def _add_one(_typing: Any, counters: Any, i: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        one = ir.Constant(ir.IntType(64), 1)
        return builder.atomic_rmw("add", _place(context, builder, sig, args), one, "seq_cst")

    return types.int64(counters, types.intp), generate


@intrinsic
def _value(_typing: Any, counters: Any, i: Any) -> Any:
    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, sig, args), "seq_cst", 8)

    return types.int64(counters, types.intp), generate


@part
def claim(counters, step):
    """The next part of a step that nobody has begun; every part is given out once."""
    return _add_one(counters, 2 * step)


@part
def finish(counters, step):
    """Say that a part of a step is done."""
    _add_one(counters, 2 * step + 1)


@part
def wait(counters, step, parts):
    """Return when all parts of a step are done. Who has begun one is running: nobody waits for who came late."""
    while _value(counters, 2 * step + 1) < parts:
        pass


def member(run: Callable[[Any], None]) -> Any:
    """What each thread of a team calls, compiled: (address of its arguments) → nothing."""
    signature = types.void(types.int64)
    if CHECK_INDICES:  # a cfunc would print an error and go on
        return SimpleNamespace(ctypes=njit(signature, nogil=True)(run))
    try:
        return cfunc(signature, cache=True)(run)
    except RuntimeError:  # no folder can be written
        return cfunc(signature)(run)
