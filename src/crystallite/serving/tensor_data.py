"""The data of one tensor of the protocol: bytes and JSON values as numbers or strings, and back."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crystallite.serving.refusal import Refusal
from crystallite.serving.signature import BYTES, DATATYPES, Signature, TensorSpec

__all__ = ["Value", "Written", "checked_spec", "classified", "from_bytes", "from_json", "strings", "written"]

Value = Tensor | list[str]  # strings in the place of BYTES
_MOST_DIMENSIONS = 32
_LENGTH = struct.Struct("<I")  # before each string


def checked_spec(name: object, datatype: object, shape: object, signature: Signature) -> tuple[TensorSpec, list[int]]:
    """The input that a tensor is, by its name, and its shape; a `Refusal` if that or its datatype does not fit."""
    spec = signature.input(name)
    if datatype != spec.datatype:
        raise Refusal(400, f"{spec.name}: expected datatype {spec.datatype}, got {datatype!r:.80}")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if len(sizes) > _MOST_DIMENSIONS or any(type(size) is not int or not 0 <= size < 2**40 for size in sizes):
        raise Refusal(400, f"{spec.name}: expected a shape, got {shape!r:.80}")
    if not spec.fits(sizes) and not (spec.dtype is None and spec.fits(sizes[:1]) and sizes[1:] == [1]):
        raise Refusal(400, f"{spec.name}: expected shape {spec.described_shape}, got {shape!r:.80}")
    return spec, sizes


def from_bytes(raw: bytes, spec: TensorSpec, shape: list[int]) -> Value:
    """The tensor in some bytes, if they are as many as its shape says; else a `Refusal`."""
    if spec.dtype is None:
        return strings(_unpacked(raw, spec.name), spec, shape)
    needed = math.prod(shape) * spec.dtype.itemsize
    if len(raw) != needed:
        raise Refusal(400, f"{spec.name}: expected {needed} bytes for shape {shape}, got {len(raw)}")
    if spec.dtype == torch.bool and raw.translate(None, b"\0\1"):
        raise Refusal(400, f"{spec.name}: expected bytes 0 and 1")
    return torch.frombuffer(bytearray(raw), dtype=spec.dtype).reshape(shape)


@dataclass(frozen=True)
class Written:
    """A tensor of an answer as both protocols write it."""

    datatype: str
    shape: list[int]
    values: Value  # of strings all, row by row

    def flat(self) -> list[Any]:
        """Numbers or strings, row by row."""
        return self.values if isinstance(self.values, list) else self.values.flatten().tolist()

    def raw(self) -> bytes:
        """The same in binary."""
        if isinstance(self.values, list):
            encoded = [text.encode() for text in self.values]
            return b"".join(_LENGTH.pack(len(text)) + text for text in encoded)
        return self.values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def written(value: Value) -> Written:
    """One output; strings are one for each sample."""
    if isinstance(value, list):
        return Written(BYTES, [len(value)], value)
    return Written(DATATYPES[value.dtype], list(value.shape), value)


def classified(y: Tensor, count: int, labels: Sequence[str]) -> Written:
    """The largest entries of each row as Triton's clients read them: "entry:place", and ":label" where it has a name.

    >>> classified(torch.tensor([[1.0, 5.0, 10.0, 4.0]]), 2, ("cat", "dog", "apple", "pear")).values
    ['10.000000:2:apple', '5.000000:1:dog']
    """
    largest = y.topk(min(count, y.shape[-1]))  # (samples, count)
    pairs = zip(largest.values.flatten().tolist(), largest.indices.flatten().tolist(), strict=True)
    texts = [f"{value:f}:{place}" + (f":{labels[place]}" if labels else "") for value, place in pairs]
    return Written(BYTES, list(largest.values.shape), texts)


def strings(content: Sequence[bytes], spec: TensorSpec, shape: list[int]) -> list[str]:
    """Texts in UTF-8, if they are as many as the shape says; else a `Refusal`."""
    if len(content) != math.prod(shape):
        raise Refusal(400, f"{spec.name}: expected {math.prod(shape)} strings for shape {shape}, got {len(content)}")
    try:
        return [text.decode() for text in content]
    except UnicodeDecodeError as error:
        raise Refusal(400, f"{spec.name}: expected text in UTF-8: {error!s:.200}") from None


def _unpacked(raw: bytes, name: str) -> list[bytes]:
    """Strings that each stand behind their length, four bytes, the lowest first."""
    found, place = [], 0
    while place < len(raw):
        if place + _LENGTH.size > len(raw):
            raise Refusal(400, f"{name}: expected a length of {_LENGTH.size} bytes before each string")
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size + length
        if place > len(raw):
            raise Refusal(400, f"{name}: a string of {length} bytes was announced, {len(raw) - place + length} came")
        found.append(raw[place - length : place])
    return found


def from_json(data: Any, spec: TensorSpec, shape: list[int]) -> Value:
    """The tensor in a list of JSON values, flat or nested as its shape; else a `Refusal`."""
    if not isinstance(data, list):
        what = "strings" if spec.dtype is None else "numbers"
        raise Refusal(400, f"{spec.name}: expected data, a list of {what}, got {data!r:.80}")
    if spec.dtype is None:
        flat = [row[0] if isinstance(row, list) and len(row) == 1 else row for row in data]
        if not all(isinstance(text, str) for text in flat):
            raise Refusal(400, f"{spec.name}: expected strings, got {data!r:.80}")
        return strings([text.encode("utf-8", "surrogatepass") for text in flat], spec, shape)
    try:
        with np.errstate(over="ignore"):
            numbers = np.array(data)
    except (ValueError, OverflowError):  # lists of different lengths, or nested too deeply
        numbers = np.array(None)
    kinds, what = _kinds(spec.dtype)
    if numbers.dtype.kind not in kinds or numbers.size != math.prod(shape):
        came = f"{numbers.size} values" if numbers.dtype.kind in kinds else "something else"
        raise Refusal(400, f"{spec.name}: expected {math.prod(shape)} {what} for shape {shape}, got {came}")
    if numbers.ndim > 1 and list(numbers.shape) != shape:
        raise Refusal(400, f"{spec.name}: expected a flat list or one of shape {shape}, got {list(numbers.shape)}")
    if numbers.dtype.kind == "u":  # beyond 2**63, which torch has no integers for
        numbers = numbers.astype(np.float64) if spec.dtype.is_floating_point else np.full(numbers.shape, -1)
    found = torch.from_numpy(numbers)
    if numbers.dtype.kind == "i" and spec.dtype != torch.int64 and not spec.dtype.is_floating_point:
        limits = torch.iinfo(spec.dtype)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise Refusal(400, f"{spec.name}: expected integers from {limits.min} to {limits.max}")
    return found.to(spec.dtype).reshape(shape)


def _kinds(dtype: torch.dtype) -> tuple[str, str]:
    """The kinds of NumPy's numbers that JSON may have for a dtype, and what they are called."""
    if dtype == torch.bool:
        return "b", "booleans"
    return ("fiu", "numbers") if dtype.is_floating_point else ("iu", "integers")
