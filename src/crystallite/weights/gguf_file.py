"""Reads GGUF: the header is walked and checked here; the gguf package knows the quantised types.

The package's own reader trusts every count in the file, so it never sees one.
"""

from __future__ import annotations

import math
import mmap
import struct
from typing import Any

import numpy as np

from crystallite.weights.stored import (
    Array,
    Contents,
    SourceFile,
    StoredTensor,
    TensorInfo,
    byte_count,
    check_names,
    checked_shape,
    refuse,
    refuse_overlaps,
)

__all__ = ["read_gguf"]

_PLAIN = {
    **{0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"},
    **{24: "int8", 25: "int16", 26: "int32", 27: "int64"},
}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 8
_MAX_KEYS = 20_000  # a model has fifty
_MAX_STRINGS = 1_000_000  # walked one by one; the largest vocabularies have half of them


class _Walker:
    """A position in the header that never leaves the file."""

    def __init__(self, file: SourceFile, data: mmap.mmap) -> None:
        self._file, self._data, self.position, self._walked = file, data, 0, 0

    def bytes(self, count: int) -> bytes:
        self.skip(count)
        return self._data[self.position - count : self.position]

    def skip(self, count: int) -> None:
        if count > self._file.size - self.position:
            came = f"{self._file.size - self.position}: truncated or corrupt"
            refuse(self._file.path, f"{count} more bytes of GGUF header at {self.position}", came)
        self.position += count

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))[0]

    def string(self) -> str:
        self._count_one()
        return self.bytes(self.number("<Q")).decode("utf-8", errors="backslashreplace")

    def value(self, kind: int) -> Any:
        """A scalar or string; arrays (vocabularies) are passed over and come back as None."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            refuse(self._file.path, "a known GGUF value type", str(kind))
        item, count = self.number("<I"), self.number("<Q")
        if item in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[item]))
        elif item == _STRING:
            for _ in range(count):
                self._count_one()
                self.skip(self.number("<Q"))
        else:
            refuse(self._file.path, "a GGUF array of numbers or strings", f"items of type {item}")
        return None

    def _count_one(self) -> None:
        self._walked += 1
        if self._walked > _MAX_STRINGS:
            refuse(self._file.path, f"at most {_MAX_STRINGS} strings in a GGUF header", "more")


def read_gguf(file: SourceFile) -> Contents:
    """The tensors of a GGUF file, row-major (out, in); quantised ones are dequantised to float32 when read."""
    if file.size < 24:
        refuse(file.path, "a GGUF header of at least 24 bytes", f"{file.size}: truncated")
    with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        walker = _Walker(file, data)
        walker.skip(4)  # the magic, which brought us here
        version, tensor_count, key_count = walker.number("<I"), walker.number("<Q"), walker.number("<Q")
        if version not in (2, 3):
            refuse(file.path, "GGUF version 2 or 3 (little-endian)", f"{version}")
        for what, count, most in (("tensors", tensor_count, file.size), ("keys", key_count, _MAX_KEYS)):
            if count > min(most, file.size // 12):  # an entry takes at least 12 bytes
                refuse(file.path, f"as many {what} as {file.size} bytes can hold", f"a count of {count}")
        check_names(file.path, (), tensor_count, file.size)
        config = _metadata(file, walker, key_count)
        entries = [_tensor_entry(file, walker) for _ in range(tensor_count)]
        check_names(file.path, (entry[0] for entry in entries), tensor_count, file.size)
        header_end = walker.position
    alignment = config.get("general.alignment", 32)
    if not (isinstance(alignment, int) and 0 < alignment <= 1 << 20 and alignment & (alignment - 1) == 0):
        refuse(file.path, "a power of two as general.alignment", f"{alignment!r:.80}")
    data_start = -(-header_end // alignment) * alignment
    tensors = [_stored(file, name, shape, kind, data_start + offset) for name, shape, kind, offset in entries]
    spans = [
        (data_start + entry[3], data_start + entry[3] + tensor.info.nbytes, entry[0])
        for entry, tensor in zip(entries, tensors, strict=True)
    ]
    refuse_overlaps(file.path, spans)
    return Contents("gguf", tensors, config)


def _metadata(file: SourceFile, walker: _Walker, count: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(count):
        key = walker.string()
        if key in config:
            refuse(file.path, "each GGUF key once", f"{key!r:.80} twice")
        config[key] = walker.value(walker.number("<I"))
    return {key: value for key, value in config.items() if value is not None}


def _tensor_entry(file: SourceFile, walker: _Walker) -> tuple[str, tuple[int, ...], int, int]:
    name = walker.string()
    rank = walker.number("<I")
    if rank > _MAX_DIMENSIONS:
        refuse(file.path, f"at most {_MAX_DIMENSIONS} dimensions in tensor {name!r:.80}", str(rank))
    dims = [walker.number("<Q") for _ in range(rank)]
    shape = checked_shape(file.path, name, reversed(dims))  # the file counts the fastest dimension first
    return name, shape, walker.number("<I"), walker.number("<Q")


def _stored(file: SourceFile, name: str, shape: tuple[int, ...], kind: int, offset: int) -> StoredTensor:
    dtype, nbytes = _type_and_size(file, name, shape, kind)
    if offset + nbytes > file.size:
        came = f"bytes {offset} to {offset + nbytes}: truncated or corrupt"
        refuse(file.path, f"tensor {name!r:.80} within {file.size} bytes", came)
    info = TensorInfo(name, shape, dtype, nbytes, file.fingerprint(offset))
    if kind in _PLAIN:
        return StoredTensor(info, lambda: file.map(offset, shape, dtype))
    return StoredTensor(info, lambda: _dequantised(file, info, kind, offset))


def _type_and_size(file: SourceFile, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    if kind in _PLAIN:
        return _PLAIN[kind], byte_count(shape, _PLAIN[kind])
    constants = _gguf(file).constants
    try:
        quantisation = constants.GGMLQuantizationType(kind)
        block, block_bytes = constants.GGML_QUANT_SIZES[quantisation]
    except (ValueError, KeyError):
        refuse(file.path, f"a known GGUF type for tensor {name!r:.80}", f"type {kind}")
    if not shape or shape[-1] % block:
        came = f"shape {shape}"
        refuse(file.path, f"rows of {name!r:.80} in blocks of {block} for {quantisation.name}", came)
    return quantisation.name, math.prod(shape) // block * block_bytes


def _dequantised(file: SourceFile, info: TensorInfo, kind: int, offset: int) -> Array:
    gguf = _gguf(file)
    if 0 in info.shape:
        return np.empty(info.shape, np.float32)
    row_bytes = info.nbytes // math.prod(info.shape[:-1])
    packed = file.map(offset, (*info.shape[:-1], row_bytes), "uint8")
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # whoever uses the numbers looks for inf and NaN
            values = gguf.quants.dequantize(packed, gguf.constants.GGMLQuantizationType(kind))
    except NotImplementedError:
        refuse(file.path, f"a type the gguf package can dequantise for {info.name!r:.80}", info.dtype)
    return np.asarray(values, np.float32).reshape(info.shape)


def _gguf(file: SourceFile) -> Any:
    try:
        import gguf
        import gguf.constants
        import gguf.quants
    except ImportError:
        refuse(file.path, "the gguf package, for quantised tensors", "none", "pip install 'crystallite[gguf]'")
    return gguf
