"""What every file format shares: a checked description of each tensor and a way to map its bytes.

Nothing here allocates what a file merely claims: sizes are compared with the file before a byte is mapped.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch

from crystallite.core.errors import CheckpointError

__all__ = [
    "NUMPY_DTYPES",
    "Array",
    "Contents",
    "Layout",
    "Role",
    "SourceFile",
    "StoredTensor",
    "TensorInfo",
    "byte_count",
    "check_names",
    "checked_shape",
    "in_memory",
    "load_json",
    "refuse",
    "refuse_overlaps",
]

Array: TypeAlias = np.ndarray[Any, Any] | torch.Tensor
Layout: TypeAlias = Literal["out-in", "in-out", "kernel-in-out"]  # the last: Keras convolutions

_NUMPY_NAMES = (
    *("float64", "float32", "float16", "bool", "complex64", "complex128"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in _NUMPY_NAMES}
NUMPY_DTYPES = frozenset(_NUMPY_DTYPES)  # names of those that `SourceFile.map` gives as arrays
_TORCH_DTYPES: dict[str, torch.dtype] = {  # formats NumPy has no name for
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
    "float8_e8m0fnu": getattr(torch, "float8_e8m0fnu", torch.uint8),  # bare exponents; since torch 2.7
}
_INTEGER_BEHIND: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2")}

_MAX_DIMENSIONS = 32
_MAX_ELEMENTS = 1 << 60
_MAX_JSON_BYTES = 100 << 20
_MAX_NAME = 1024
_MAX_TENSORS = 16_000  # of small files: a tensor costs 50 to 150 microseconds and a kilobyte, whatever its size
_BYTES_PER_TENSOR = 1 << 12  # of larger files
_SLACK_BYTES = 64 << 20  # that any file may take
# What Python makes of a character of JSON, in bytes: items of lists, of objects, quotes, lists and objects.
_JSON_COSTS = {b",": 28, b":": 100, b'"': 28, b"[": 64, b"{": 240}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, described without reading it.

    `fingerprint` is made of the file's name, size, time and the tensor's offset: equal strings mean the same
    bytes, so results can be kept across runs. It is empty for tensors that live in memory, which nothing vouches
    for. `alias_of` names the earlier tensor that shares the same data.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's or torch's name, or the quantisation a GGUF file uses
    nbytes: int  # as stored
    fingerprint: str = ""
    alias_of: str | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's description and the function that reads it."""

    info: TensorInfo
    load: Callable[[], Array]


@dataclass(frozen=True)
class Role:
    """What whoever uses a tensor (a module class, an ONNX node) says it is; stronger than any name."""

    kind: str
    reason: str = ""
    layout: Layout = "out-in"
    groups: int | None = None
    gates: tuple[str, ...] = ()
    feedback: bool = False
    certain: bool = True  # False: a telling name may know better


@dataclass(frozen=True)
class Contents:
    """What a format's reader found in one source."""

    format: str
    tensors: list[StoredTensor]
    config: dict[str, Any] = field(default_factory=dict)
    roles: dict[str, Role] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # on what is in it, for people


@dataclass(frozen=True)
class SourceFile:
    """A regular file as it was when it was opened; mapping fails if it has changed since."""

    path: Path
    size: int
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> SourceFile:
        try:
            status = path.stat()
        except OSError as error:
            refuse(path, "a readable file", error.strerror or str(error))
        if not stat.S_ISREG(status.st_mode):  # opening a pipe or a device could wait for ever
            refuse(path, "a regular file", "something else (a pipe, a device or a directory)")
        if status.st_size == 0:
            refuse(path, "weights", "an empty file (0 bytes)")
        return cls(path, status.st_size, status.st_mtime_ns)

    def fingerprint(self, position: int | str) -> str:
        return f"{self.path.name}:{self.size}:{self.mtime_ns}:{position}"

    def head(self, count: int) -> bytes:
        return self.bytes(0, min(count, self.size))

    def bytes(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset`; the caller has compared them with the size."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                data = file.read(count)
        except OSError as error:
            refuse(self.path, "a readable file", error.strerror or str(error))
        if len(data) != count:
            refuse(self.path, f"{count} bytes at {offset}", f"{len(data)}: the file shrank while being read")
        return data

    def map(self, offset: int, shape: tuple[int, ...], dtype: str) -> Array:
        """The tensor at `offset`, mapped: its pages are the file's, and go when the last view of it goes.

        The mapping is private and writable: kernels and torch take it without a copy, and a write never reaches
        the file. A tensor that does not lie on a multiple of its item size is copied, since kernels need it to.
        """
        torch_dtype = _TORCH_DTYPES.get(dtype)
        item: np.dtype[Any] = _NUMPY_DTYPES[dtype] if torch_dtype is None else _INTEGER_BEHIND[torch_dtype.itemsize]
        if 0 in shape:
            mapped: np.ndarray[Any, Any] = np.empty(shape, item)
        else:
            self._check_unchanged()
            try:
                mapped = np.memmap(self.path, item, mode="c", offset=offset, shape=shape)
            except (OSError, ValueError) as error:
                refuse(self.path, f"{math.prod(shape) * item.itemsize} bytes at {offset} to map", str(error))
            if not mapped.flags.aligned:
                mapped = np.array(mapped)
        return mapped if torch_dtype is None else torch.from_numpy(mapped).view(torch_dtype)

    def _check_unchanged(self) -> None:
        now = SourceFile.at(self.path)
        if now != self:
            refuse(self.path, f"the file that was opened ({self.size} bytes)", f"a changed one ({now.size} bytes)")


def refuse(source: Path | str, expected: str, came: str, hint: str = "") -> NoReturn:
    """Raises the one kind of error this package has for files, always saying which, what was expected, what came."""
    raise CheckpointError(f"{source}: expected {expected}, got {came}" + (f"; {hint}" if hint else "")) from None


def checked_shape(path: Path, name: str, dims: Iterable[Any]) -> tuple[int, ...]:
    """The dimensions as a tuple, or an error: a hostile header may claim anything.

    >>> checked_shape(Path("x.npy"), "w", [2, 3])
    (2, 3)
    """
    shape = tuple(dims)
    if len(shape) > _MAX_DIMENSIONS:
        refuse(path, f"at most {_MAX_DIMENSIONS} dimensions in tensor {_short(name)}", str(len(shape)))
    if not all(type(d) is int and d >= 0 for d in shape):
        refuse(path, f"a shape of non-negative whole numbers for tensor {_short(name)}", _short(list(shape)))
    if math.prod(d for d in shape if d) > _MAX_ELEMENTS:  # with a zero among them NumPy still multiplies the rest
        refuse(path, f"a shape that can exist for tensor {_short(name)}", _short(list(shape)))
    return shape


def byte_count(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes that a tensor of this shape takes in a format NumPy or torch has a name for.

    >>> byte_count((2, 3), "bfloat16")
    12
    """
    item = _TORCH_DTYPES[dtype].itemsize if dtype in _TORCH_DTYPES else _NUMPY_DTYPES[dtype].itemsize
    return math.prod(shape) * item


def refuse_overlaps(path: Path, spans: Iterable[tuple[int, int, str]]) -> None:
    """Refuses two tensors, given as (begin, end, name), that share bytes of the file."""
    previous_end, previous_name = 0, ""
    for begin, end, name in sorted(span for span in spans if span[0] < span[1]):
        if begin < previous_end:
            refuse(path, "tensors that do not overlap", f"{_short(name)} starting inside {_short(previous_name)}")
        previous_end, previous_name = end, name


def check_names(path: Path | str, names: Iterable[str], count: int, size: int) -> None:
    """Refuse more tensors than a file of this size has, or names that only a bomb has: both cost time and memory."""
    most = _MAX_TENSORS + size // _BYTES_PER_TENSOR
    if count > most:
        refuse(path, f"at most {most} tensors in {size} bytes", f"{count}")
    long = next((name for name in names if len(name) > _MAX_NAME), None)
    if long is not None:
        refuse(path, f"names of at most {_MAX_NAME} characters", f"{len(long)} in {_short(long)}")


def load_json(path: Path, text: bytes, what: str, size: int = 0) -> dict[str, Any]:
    """The JSON object in `text`, which came in a file of so many bytes, or alone.

    Duplicate keys and other values are refused, and so is what would take more than a few times the file in memory.
    """
    if len(text) > _MAX_JSON_BYTES:
        refuse(path, f"a {what} of at most {_MAX_JSON_BYTES} bytes", f"{len(text)}")
    cost, most = (
        sum(text.count(sign) * each for sign, each in _JSON_COSTS.items()),
        _SLACK_BYTES + 2 * max(size, len(text)),
    )
    if cost > most:
        refuse(path, f"a {what} that takes at most {most >> 20} MB of memory", f"one of {cost >> 20} MB")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:  # one reader would take the first and another the last
                refuse(path, f"each name once in the {what}", f"{_short(key)} twice")
            result[key] = value
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, bad JSON, numbers of absurd length
        refuse(path, f"a {what} in JSON", _short(str(error)))
    if not isinstance(value, dict):
        refuse(path, f"a JSON object as {what}", type(value).__name__)
    return value


def in_memory(named: Mapping[str, Any], source: str) -> list[StoredTensor]:
    """Tensors or arrays that are already loaded; those that share their data name the first as `alias_of`."""
    first_with: dict[tuple[Any, ...], str] = {}
    stored = []
    for name, value in named.items():
        tensor = _checked_value(name, value, source)
        nbytes = tensor.nbytes
        alias = first_with.setdefault(_data_key(tensor), name) if nbytes else name
        dtype = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else tensor.dtype.name
        info = TensorInfo(name, tuple(tensor.shape), dtype, nbytes, alias_of=None if alias == name else alias)
        stored.append(StoredTensor(info, lambda tensor=tensor: tensor))  # type: ignore[misc]
    return stored


def _checked_value(name: str, value: Any, source: str) -> Array:
    if torch.nn.parameter.is_lazy(value):
        refuse(source, f"numbers in tensor {_short(name)}", "a lazy parameter", "run the model once first")
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            refuse(source, f"a plain tensor {_short(name)}", "a nested one", "call .to_padded_tensor(0) first")
        if value.layout != torch.strided:
            refuse(source, f"a dense tensor {_short(name)}", str(value.layout), "call .to_dense() first")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):  # of torchao, or spread over processes
            came = f"a {type(value).__name__} of {type(value).__module__.partition('.')[0]}"
            refuse(source, f"plain numbers in tensor {_short(name)}", came, "dequantise or gather it first")
        if value.device.type == "meta":
            refuse(source, f"numbers in tensor {_short(name)}", "a tensor on the meta device")
        plain = value.detach().cpu().resolve_conj().resolve_neg()
        return plain.dequantize() if plain.is_quantized else plain
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    came = "an array of Python objects" if isinstance(value, np.ndarray) else type(value).__name__
    refuse(source, f"a tensor or array as {_short(name)}", came)


def _data_key(tensor: Array) -> tuple[Any, ...]:
    if isinstance(tensor, torch.Tensor):
        return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return tensor.__array_interface__["data"][0], tensor.shape, tensor.strides, tensor.dtype.str


def _short(value: Any) -> str:
    """A value for an error message: quoted, escaped and never a screenful."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
