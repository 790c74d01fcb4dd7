"""Reads .npy and .npz without pickle: the header first, and nothing is allocated that the archive cannot hold.

Own code because `numpy.load` allocates what the header of an archive's member claims.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from crystallite.weights.archive import ARCHIVE_ERRORS, open_zip
from crystallite.weights.stored import (
    NUMPY_DTYPES,
    Array,
    Contents,
    SourceFile,
    StoredTensor,
    TensorInfo,
    checked_shape,
    refuse,
)

__all__ = ["read_npy", "read_npz"]

_CHUNK = 1 << 20


class _Header:
    """Shape, order and dtype of one .npy stream, and where its data begins in it."""

    def __init__(self, path: Path, name: str, stream: IO[bytes]) -> None:
        try:
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"format version {version}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # headers that Python 2 wrote
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(stream)
        except Exception as error:  # NumPy parses it as Python text: SyntaxError, TokenError, TypeError …
            reason = f"{type(error).__name__} {error}".splitlines()[0]
            refuse(path, f"a NumPy header for {name!r:.80}", f"{reason:.160}")
        if dtype.hasobject:
            refuse(path, f"numbers in {name!r:.80}", "pickled Python objects, which are never loaded")
        if dtype.kind not in "biufcSU" or dtype.itemsize == 0:
            refuse(path, f"numbers in {name!r:.80}", f"dtype {dtype}")
        self.shape = checked_shape(path, name, shape)
        self.fortran = bool(fortran)
        self.dtype: np.dtype[Any] = dtype
        self.offset = stream.tell()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.fortran else self.shape

    def oriented(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return native.T if self.fortran else native

    def info(self, name: str, fingerprint: str) -> TensorInfo:
        return TensorInfo(name, self.shape, self.dtype.name, self.nbytes, fingerprint)


def read_npy(file: SourceFile) -> Contents:
    """The one array of a .npy file, named after the file and mapped in place."""
    name = file.path.stem
    header = _Header(file.path, name, io.BytesIO(file.head(1 << 16)))
    if header.offset + header.nbytes != file.size:
        expected = f"{header.offset + header.nbytes} bytes for {header.dtype} of shape {header.shape}"
        refuse(file.path, expected, f"{file.size}: truncated or corrupt")

    def load() -> Array:
        return header.oriented(_map(file, header, header.offset))

    return Contents("npy", [StoredTensor(header.info(name, file.fingerprint(header.offset)), load)])


def read_npz(file: SourceFile) -> Contents:
    """The arrays of an .npz archive; stored ones are mapped when aligned, the rest is read one at a time."""
    with open_zip(file) as archive:
        tensors = [_member(file, archive, entry) for entry in archive.infolist()]
    return Contents("npz", tensors)


def _member(file: SourceFile, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> StoredTensor:
    name = entry.filename.removesuffix(".npy")
    try:
        with archive.open(entry) as stream:
            header = _Header(file.path, name, stream)
    except ARCHIVE_ERRORS as error:
        refuse(file.path, f"a readable member {name!r:.80}", str(error))
    if header.offset + header.nbytes != entry.file_size:
        expected = f"{entry.file_size - header.offset} bytes of data in {name!r:.80}, as the archive says"
        refuse(file.path, expected, f"{header.nbytes} for {header.dtype} of shape {header.shape}")

    def load() -> Array:
        data_at = _data_offset(file, entry) + header.offset
        if entry.compress_type == zipfile.ZIP_STORED and data_at % header.dtype.alignment == 0:
            if data_at + header.nbytes > file.size:
                refuse(file.path, f"{header.nbytes} bytes of {name!r:.80}", "the end of the file")
            return header.oriented(_map(file, header, data_at))
        return header.oriented(_unpack(file, entry, header))

    return StoredTensor(header.info(name, file.fingerprint(entry.header_offset)), load)


def _data_offset(file: SourceFile, entry: zipfile.ZipInfo) -> int:
    local = file.bytes(entry.header_offset, 30)  # 30 fixed bytes, then the name and the extra field
    return entry.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


def _map(file: SourceFile, header: _Header, offset: int) -> np.ndarray[Any, Any]:
    if header.dtype.name not in NUMPY_DTYPES or header.dtype.byteorder == ">":
        data = np.frombuffer(file.bytes(offset, header.nbytes), header.dtype)
        return data.reshape(header.stored_shape)
    mapped = file.map(offset, header.stored_shape, header.dtype.name)
    assert isinstance(mapped, np.ndarray)
    return mapped


def _unpack(file: SourceFile, entry: zipfile.ZipInfo, header: _Header) -> np.ndarray[Any, Any]:
    """The member read in full, its checksum compared. `zipfile` would read the whole directory for each of them."""
    result = np.empty(header.nbytes, np.uint8)
    position, checksum = -header.offset, 0
    try:
        for chunk in _chunks(file, entry):
            checksum = zlib.crc32(chunk, checksum)
            data = np.frombuffer(chunk, np.uint8)[max(0, -position) :]
            position += len(chunk)
            if position > header.nbytes:
                break
            result[position - len(data) : position] = data
    except zlib.error as error:
        refuse(file.path, f"intact data in {entry.filename!r:.80}", str(error))
    if position != header.nbytes:
        came = "more" if position > header.nbytes else f"{max(0, position)}"
        refuse(file.path, f"{header.nbytes} bytes of data in {entry.filename!r:.80}", came)
    if checksum != entry.CRC:
        refuse(file.path, f"intact data in {entry.filename!r:.80}", "another checksum (CRC-32) than the archive says")
    return result.view(header.dtype).reshape(header.stored_shape)


def _chunks(file: SourceFile, entry: zipfile.ZipInfo) -> Iterator[bytes]:
    """The member's contents, a megabyte at a time however much a byte of it expands to."""
    position = _data_offset(file, entry)
    end = position + entry.compress_size
    if end > file.size:
        refuse(file.path, f"{entry.compress_size} bytes of {entry.filename!r:.80}", "the end of the file")
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    while position < end:
        stored = file.bytes(position, min(_CHUNK, end - position))
        position += len(stored)
        if entry.compress_type == zipfile.ZIP_STORED:
            yield stored
            continue
        while plain := inflate.decompress(stored, _CHUNK):
            yield plain
            stored = inflate.unconsumed_tail
