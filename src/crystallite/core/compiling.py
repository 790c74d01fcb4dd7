"""numba, or stand-ins where it cannot be imported: modules of kernels then load, and nothing in them is compiled.

Kernels that are plain loops run as Python; those that would take too long so have an equal in NumPy (`compiled_or`);
those written as machine instructions are never called, as `operators` then takes PyTorch's own products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "COMPILES", "REGISTER_BITS", "carray", "cfunc", "cgutils", "intrinsic", "ir", "njit", "numba", "overload", "types",
]  # fmt: skip

try:
    import numba
    from llvmlite import ir
    from numba import carray, cfunc, njit, types
    from numba.core import cgutils
    from numba.core.codegen import get_host_cpu_features
    from numba.extending import intrinsic, overload

    COMPILES = True
    """Whether there is a compiler."""
    _FEATURES = numba.config.CPU_FEATURES  # what the user says the processor has, as in the key of numba's cache
    if _FEATURES is None:
        _FEATURES = get_host_cpu_features()
    REGISTER_BITS = 512 if "+avx512f" in _FEATURES.split(",") else 256
    """Of the vectors that kernels are written in: twice as many products an instruction where registers are so wide."""
except ImportError:  # no build for this machine or this Python
    COMPILES = False
    REGISTER_BITS = 256

    class _Absent:
        """Whatever is asked of it, it is the answer."""

        def __getattr__(self, _name: str) -> _Absent:
            return self

        def __call__(self, *_arguments: Any, **_options: Any) -> _Absent:
            return self

    def _as_it_is(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
        return lambda function: function

    numba = ir = carray = cfunc = types = cgutils = intrinsic = _Absent()
    njit = overload = _as_it_is
