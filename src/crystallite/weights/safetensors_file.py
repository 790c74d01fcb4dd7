"""Reads safetensors: eight bytes of header length, a JSON header, then the tensors back to back.

The header is parsed here, not by the library, so that each tensor can be mapped alone and let go of alone.
"""

from __future__ import annotations

from typing import Any

from crystallite.weights.stored import (
    Contents,
    SourceFile,
    StoredTensor,
    TensorInfo,
    byte_count,
    check_names,
    checked_shape,
    load_json,
    refuse,
)

__all__ = ["read_safetensors"]

_DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    **{"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"},
    **{"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8"},
    **{"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8"},
    **{"BOOL": "bool", "C64": "complex64"},
}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


def read_safetensors(file: SourceFile) -> Contents:
    """The tensors of one safetensors file, checked to tile the file exactly: no holes, no overlaps."""
    header_bytes = int.from_bytes(file.head(8), "little")
    room = file.size - 8
    if not 2 <= header_bytes <= min(room, _MAX_HEADER_BYTES):
        expected = f"a safetensors header of 2 to {max(2, min(room, _MAX_HEADER_BYTES))} bytes"
        refuse(file.path, expected, f"a length of {header_bytes} in a file of {file.size} bytes")
    header = load_json(file.path, file.bytes(8, header_bytes), "safetensors header", file.size)
    header.pop("__metadata__", None)
    check_names(file.path, header, len(header), file.size)
    data_start = 8 + header_bytes
    spans = [(*_checked_entry(file, name, entry), name) for name, entry in header.items()]
    _check_tiling(file, [(begin, end, name) for _, _, begin, end, name in spans], file.size - data_start)
    return Contents(
        "safetensors",
        [
            _stored(file, name, shape, dtype, data_start + begin, end - begin)
            for shape, dtype, begin, end, name in spans
        ],
    )


def _checked_entry(file: SourceFile, name: str, entry: Any) -> tuple[tuple[int, ...], str, int, int]:
    if not (isinstance(entry, dict) and {"dtype", "shape", "data_offsets"} <= entry.keys()):
        refuse(file.path, f"dtype, shape and data_offsets for tensor {name!r:.80}", f"{entry!r:.80}")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        refuse(file.path, f"one of {', '.join(_DTYPES)} as dtype of {name!r:.80}", f"{entry['dtype']!r:.80}")
    if not isinstance(entry["shape"], list):
        refuse(file.path, f"a list as shape of {name!r:.80}", f"{entry['shape']!r:.80}")
    shape = checked_shape(file.path, name, entry["shape"])
    offsets = entry["data_offsets"]
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int for o in offsets)):
        refuse(file.path, f"two whole numbers as data_offsets of {name!r:.80}", f"{offsets!r:.80}")
    begin, end = offsets
    if not 0 <= begin <= end:
        refuse(file.path, f"data_offsets of {name!r:.80} that begin before they end", f"{offsets!r:.80}")
    needed = byte_count(shape, dtype)
    if end - begin != needed:
        refuse(file.path, f"{needed} bytes for {name!r:.80}, {dtype} of shape {shape}", f"{end - begin}")
    return shape, dtype, begin, end


def _check_tiling(file: SourceFile, spans: list[tuple[int, int, str]], room: int) -> None:
    """The format allows neither holes nor overlaps: either could hide data or alias one tensor to another."""
    position = 0
    for begin, end, name in sorted(spans):
        if end > room:
            refuse(file.path, f"tensor {name!r:.80} inside the {room} bytes of data", f"an end at {end}: truncated?")
        if begin != position:
            what = "overlaps the one before" if begin < position else "leaves a hole before it"
            refuse(file.path, f"tensor {name!r:.80} to begin at {position}", f"{begin}, which {what}")
        position = end
    if position != room:
        refuse(file.path, f"{position} bytes of data, as the header says", f"{room}")


def _stored(file: SourceFile, name: str, shape: tuple[int, ...], dtype: str, offset: int, nbytes: int) -> StoredTensor:
    info = TensorInfo(name, shape, dtype, nbytes, file.fingerprint(offset))
    return StoredTensor(info, lambda: file.map(offset, shape, dtype))
