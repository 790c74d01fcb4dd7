"""The one door through which matrices enter: checks them, and shows their magnitudes as ordered integers.

The absolute value of an IEEE number is its bit pattern with the sign bit cleared, and patterns order as
unsigned integers exactly as the numbers do. So |w| ≥ c is one integer comparison, for float64, float32,
float16, bfloat16 and float8 alike, without conversion and without a copy: that is what lets the graph engine
run at memory speed on any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from crystallite.core.errors import InvalidMatrix, InvalidOption

__all__ = ["Magnitudes", "as_matrix", "magnitudes", "odd_tensor"]

_BLOCK_BYTES = 4 << 20  # rows converted at a time when the matrix cannot be viewed in place


@dataclass(frozen=True)
class _Format:
    """How a number format spells magnitudes: its storage integer, sign-clearing mask and first non-finite pattern."""

    storage: type[np.unsignedinteger]
    mask: int
    infinity: int  # patterns from here on are not finite numbers; mask + 1 where every pattern is finite
    torch_dtype: torch.dtype | None  # decodes a pattern back to its value; None: the pattern is the value


_FORMATS = {
    "float64": _Format(np.uint64, (1 << 63) - 1, 0x7FF << 52, torch.float64),
    "float32": _Format(np.uint32, (1 << 31) - 1, 0xFF << 23, torch.float32),
    "float16": _Format(np.uint16, (1 << 15) - 1, 0x1F << 10, torch.float16),
    "bfloat16": _Format(np.uint16, (1 << 15) - 1, 0xFF << 7, torch.bfloat16),
    "float8_e5m2": _Format(np.uint8, 0x7F, 0x7C, torch.float8_e5m2),
    "float8_e4m3fn": _Format(np.uint8, 0x7F, 0x7F, torch.float8_e4m3fn),
    "bool": _Format(np.uint8, 0xFF, 0x100, None),
    **{f"uint{b}": _Format(np.dtype(f"u{b // 8}").type, (1 << b) - 1, 1 << b, None) for b in (8, 16, 32, 64)},
    **{f"int{b}": _Format(np.dtype(f"u{b // 8}").type, (1 << b) - 1, 1 << b, None) for b in (8, 16, 32, 64)},
}
_ACCEPTED = "float64, 32, 16, bfloat16, float8_e4m3fn or e5m2, integers or booleans"
_TORCH_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Magnitudes:
    """|w| of a matrix as unsigned integers in the same order, viewed in place where memory layout allows it.

    `bits` may carry sign bits; `mask` clears them. Row blocks come from `block`, always contiguous.
    """

    bits: np.ndarray[Any, Any]  # (rows, cols) in the storage integer, or signed integers that `block` makes absolute
    format: str
    transposed: bool = False  # bits show the transpose of the caller's matrix (its memory was column-major)

    @property
    def shape(self) -> tuple[int, int]:
        return self.bits.shape[0], self.bits.shape[1]

    @property
    def mask(self) -> int:
        return _FORMATS[self.format].mask

    @property
    def infinity(self) -> int:
        return _FORMATS[self.format].infinity

    @property
    def storage(self) -> type[np.unsignedinteger]:
        return _FORMATS[self.format].storage

    @property
    def rows_per_block(self) -> int:
        """How many rows a worker should ask `block` for at once: all of them when that costs no copy."""
        rows, cols = self.shape
        if self.bits.dtype.kind == "u" and self.bits.flags.c_contiguous:
            return max(rows, 1)
        return max(1, _BLOCK_BYTES // max(1, cols * self.bits.dtype.itemsize))

    def block(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as contiguous storage integers (a view when the memory already is)."""
        rows = self.bits[start:stop]
        if rows.dtype.kind == "i":  # two's complement is not sign-magnitude; |−128| needs the unsigned type
            return np.abs(rows).view(self.storage)
        return np.ascontiguousarray(rows)

    def pattern(self, threshold: float) -> int:
        """The smallest pattern whose value is ≥ threshold, so that |w| ≥ threshold ⇔ pattern(w) ≥ it; exact.

        >>> magnitudes(np.zeros((1, 1), np.float32)).pattern(1.0) == 0x3F800000
        True
        """
        return int(self.patterns(np.array([threshold], np.float64))[0])

    def patterns(self, thresholds: np.ndarray) -> np.ndarray:
        """`pattern` of each threshold: rounded to the format, and one step up where that fell short. Vectorised."""
        fmt = _FORMATS[self.format]
        thresholds = np.abs(thresholds)  # −0 is 0 too
        if fmt.torch_dtype is None:
            if thresholds.max(initial=0) > fmt.mask:
                raise InvalidOption(f"threshold {thresholds.max():g} is above every value of {self.format}")
            return np.ceil(thresholds).astype(fmt.storage)
        if self.format in ("float64", "float32", "float16"):
            with np.errstate(over="ignore"):
                bits = thresholds.astype(self.format).view(fmt.storage)
        else:
            rounded = torch.from_numpy(thresholds).to(fmt.torch_dtype)
            bits = rounded.view(_TORCH_INTEGERS[rounded.element_size()]).numpy().view(fmt.storage)
        bits = np.minimum(bits, fmt.storage(fmt.infinity))
        finite = bits < fmt.infinity
        short = np.zeros(len(bits), bool)
        short[finite] = self.values(bits[finite]) < thresholds[finite]
        return bits + short.astype(fmt.storage)

    def value(self, pattern: int) -> float:
        """The magnitude that a pattern stands for."""
        return float(self.values(np.array([pattern], self.storage))[0])

    def values(self, patterns: np.ndarray) -> np.ndarray:
        """Magnitudes of an array of patterns (sign bits ignored), as float64."""
        fmt = _FORMATS[self.format]
        clean = patterns.astype(fmt.storage) & fmt.storage(fmt.mask)
        if fmt.torch_dtype is None:
            return clean.astype(np.float64)
        if self.format in ("float64", "float32", "float16"):
            return clean.view(self.format).astype(np.float64)
        signed = torch.from_numpy(np.ascontiguousarray(clean).view(f"i{clean.dtype.itemsize}"))
        return signed.view(fmt.torch_dtype).to(torch.float64).numpy()


def odd_tensor(tensor: torch.Tensor) -> str:
    """What was expected, what came and the way out where a tensor is no plain block of numbers; "" where it is one.

    >>> odd_tensor(torch.eye(2)), odd_tensor(torch.eye(2, device="meta"))
    ('', 'numbers, got a tensor on the meta device')
    """
    if tensor.is_nested:
        return "a plain tensor, got a nested one; call .to_padded_tensor(0) first"
    if tensor.layout != torch.strided:
        return f"a dense tensor, got layout {tensor.layout}; call .to_dense() first"
    return "numbers, got a tensor on the meta device" if tensor.is_meta else ""


def as_matrix(matrix: Any, name: str = "matrix") -> np.ndarray | torch.Tensor:
    """The argument as a 2-D real array or detached tensor, without a copy; `InvalidMatrix` says why it cannot be."""
    if isinstance(matrix, torch.Tensor):
        if odd := odd_tensor(matrix):
            raise InvalidMatrix(f"{name}: expected {odd}")
        if matrix.is_quantized:
            raise InvalidMatrix(f"{name}: expected plain numbers, got a quantised tensor; call .dequantize() first")
        result: np.ndarray | torch.Tensor = matrix.detach().resolve_neg()  # a minus sign may be a bit of the tensor
    else:
        try:
            result = np.asanyarray(matrix)
        except ValueError as error:
            raise InvalidMatrix(f"{name}: expected a rectangular 2-D array, got {error}") from None
        if isinstance(result, np.ma.MaskedArray):
            raise InvalidMatrix(f"{name}: masked arrays are ambiguous here; fill the masked entries first")
    if result.ndim == 0:
        hint = "; call .toarray() first" if hasattr(matrix, "toarray") else ""
        raise InvalidMatrix(f"{name}: expected a 2-D matrix, got {type(matrix).__name__}{hint}")
    if result.ndim != 2:
        raise InvalidMatrix(f"{name}: expected a 2-D matrix, got {result.ndim}-D of shape {tuple(result.shape)}")
    if _format_of(result) not in _FORMATS:
        raise InvalidMatrix(f"{name}: expected real numbers of {_ACCEPTED}, got dtype {result.dtype}")
    return result


def magnitudes(matrix: Any, name: str = "matrix") -> Magnitudes:
    """Checked |matrix| as ordered integers; non-finite entries are found by whoever streams them.

    >>> m = magnitudes([[1.0, -2.0]])
    >>> m.shape, m.format
    ((1, 2), 'float64')
    """
    array = as_matrix(matrix, name)
    fmt = _format_of(array)
    if isinstance(array, torch.Tensor):
        tensor = array.cpu().view(_TORCH_INTEGERS[array.element_size()])
        bits = tensor.numpy()
        if fmt.startswith("int"):
            bits = bits.view(fmt)  # torch.int8 came through as uint8
    else:
        bits = np.asarray(array)
        if not bits.dtype.isnative:
            bits = bits.astype(bits.dtype.newbyteorder("="))
    if not fmt.startswith("int"):
        bits = bits.view(_FORMATS[fmt].storage)
    column_major = bits.flags.f_contiguous and not bits.flags.c_contiguous
    return Magnitudes(bits.T if column_major else bits, fmt, column_major)


def _format_of(array: np.ndarray | torch.Tensor) -> str:
    if isinstance(array, torch.Tensor):
        return str(array.dtype).removeprefix("torch.")
    return array.dtype.name
