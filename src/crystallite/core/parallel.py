"""Compiling kernels, and running them over the rows of a matrix on as many threads as torch may use."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from crystallite.core.arrays import Magnitudes
from crystallite.core.compiling import COMPILES, njit
from crystallite.core.index_checks import CHECK_INDICES

__all__ = ["compiled", "compiled_or", "over_rows", "over_tasks", "run_on_openmp_threads", "thread_count"]

Task = TypeVar("Task")
Result = TypeVar("Result")

_BYTES_PER_THREAD = 8 << 20  # below this a thread costs more than it saves


def compiled(function: Any) -> Any:
    """The function as machine code that runs without the interpreter lock, kept on disk where some folder allows it.

    numba refuses a cache it can write nowhere (read-only packages and no home, as in many containers); without one
    each process compiles for itself. What is kept checks no index, so it is not used where indices are checked.
    Without numba it stays what it is.
    """
    if not COMPILES:
        return function
    if CHECK_INDICES:
        return njit(nogil=True)(function)
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


def compiled_or(plain: Any) -> Callable[[Any], Any]:
    """Decorates a loop over all entries: it is compiled, or replaced by `plain` where there is no compiler."""
    return compiled if COMPILES else lambda _function: plain


def thread_count(matrix: Magnitudes) -> int:
    """How many threads a pass over this matrix is worth; `torch.set_num_threads` is the upper bound."""
    return max(1, min(torch.get_num_threads(), matrix.bits.nbytes // _BYTES_PER_THREAD, matrix.shape[0]))


def over_rows(matrix: Magnitudes, work: Callable[[int, int, np.ndarray], None]) -> None:
    """Call work(thread, first_row, block) for contiguous row blocks; each thread gets its own range of rows in order.

    The blocks are views of the matrix, or copies of a few megabytes where its memory layout needs them. `work`
    runs without the interpreter lock only while it is inside compiled code.
    """
    rows = matrix.shape[0]
    threads = thread_count(matrix)
    bounds = [rows * i // threads for i in range(threads + 1)]
    step = matrix.rows_per_block

    def run(thread: int) -> None:
        for start in range(bounds[thread], bounds[thread + 1], step):
            work(thread, start, matrix.block(start, min(start + step, bounds[thread + 1])))

    over_tasks(threads, range(threads), run)


def run_on_openmp_threads(threads: int, function: Any, argument: int) -> None:
    """function(argument) by so many threads at the same time; function is a cfunc of one 64-bit number.

    The threads are those of PyTorch's OpenMP, where it can be found: they spin for a while after each operation, so
    they are there at once, and any others would have to wait for the cores until they are done with that.
    """
    if threads == 1 or CHECK_INDICES:  # the others would wait for ever for one that met an error
        function.ctypes(argument)
    elif (start := _openmp()) is not None:
        start(function.address, argument, threads, 0)
    else:
        over_tasks(threads, range(threads), lambda _: function.ctypes(argument))


@functools.cache
def _openmp() -> Any:
    """GOMP_parallel(function, argument, threads, flags) of the library that PyTorch has loaded, or None.

    LLVM's and Intel's OpenMP have it too. In a process that was forked it would wait for threads that are gone.
    """
    if not hasattr(os, "RTLD_NOLOAD") or not torch.backends.openmp.is_available():
        return None
    home = Path(torch.__file__).parent
    for path in [*home.glob("lib/lib*omp*"), *home.parent.glob("torch.libs/lib*omp*"), "libgomp.so.1", "libomp.so"]:
        try:
            function = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    return None


def over_tasks(threads: int, tasks: Iterable[Task], work: Callable[[Task], Result]) -> list[Result]:
    """[work(task) for task in tasks], by the calling thread and `threads` − 1 others, each taking the next one.

    Another thread may come late: for a while after a call of PyTorch its threads hold the cores. What it has not begun
    when nothing is left to do is not waited for.
    """
    queue = list(tasks)
    results: list[Any] = [None] * len(queue)
    numbers = iter(range(len(queue)))  # its next number is given out once, whoever asks

    def run() -> None:
        for i in numbers:
            results[i] = work(queue[i])

    others = [_workers().submit(run) for _ in range(min(threads, len(queue)) - 1)]
    try:
        run()
    finally:  # nobody may still be writing when the caller goes on
        failures = [other.exception() for other in others if not other.cancel()]
    for failure in filter(None, failures):
        raise failure
    return results


@functools.cache
def _workers() -> ThreadPoolExecutor:
    """Threads that stay: starting one costs as much as a pass over a small matrix."""
    return ThreadPoolExecutor(thread_name_prefix="crystallite")


def _forget_threads() -> None:
    """They do not survive a fork."""
    global _openmp
    _workers.cache_clear()
    _openmp = functools.cache(lambda: None)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_threads)
