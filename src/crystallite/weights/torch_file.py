"""Reads what torch.save wrote, with the unpickler that builds tensors and runs nothing else."""

from __future__ import annotations

import io
import mmap
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import numpy as np
import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights.archive import ARCHIVE_ERRORS, open_zip
from crystallite.weights.pickle_cost import pickle_cost
from crystallite.weights.stored import (
    Array,
    Contents,
    SourceFile,
    StoredTensor,
    TensorInfo,
    check_names,
    in_memory,
    refuse,
)

__all__ = ["is_legacy_torch", "named_tensors", "read_torch"]

_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "params")
_TRAINING_STATE = ("optim", "lr_sched", "scheduler", "scaler", "callbacks", "loops")
_LEGACY_PICKLES = 5  # magic number, version, system, the object itself, the order of its storages
_SLACK_BYTES = 64 << 20  # that any file may take
_MAX_OVERLAP = 8  # tensors may share storage, but each would be read alone
_RELOAD_BYTES = 32 << 20  # loading again costs milliseconds: only the pickle is read


def is_legacy_torch(head: bytes) -> bool:
    """Whether these first bytes are of a file that torch.save wrote before it used zip archives."""
    return head[:1] == b"\x80" and _LEGACY_MAGIC in head[:32]


def read_torch(file: SourceFile, zipped: bool) -> Contents:
    """The tensors of a .pt, .pth, .bin or .ckpt file; a wrapping `state_dict` or `model` key is looked through."""
    if zipped:
        _check_archive(file)
    else:
        with file.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check_pickles(file, data, _LEGACY_PICKLES)
    mapped = _Mapped(file, zipped)
    tensors = [
        StoredTensor(info, lambda name=info.name: mapped.read(name))  # type: ignore[misc]
        for info in mapped.describe()
    ]
    return Contents("torch", tensors)


class _Mapped:
    """The loaded state dict, let go of after every few megabytes handed out and then loaded again.

    torch maps the whole file at once, and pages once touched stay resident until that mapping goes.
    """

    def __init__(self, file: SourceFile, zipped: bool) -> None:
        self._file, self._zipped = file, zipped
        self._tensors: dict[str, StoredTensor] | None = None
        self._handed_out = 0

    def describe(self) -> Iterator[TensorInfo]:
        tensors = self._load()
        check_names(self._file.path, tensors, len(tensors), self._file.size)
        claimed = 0
        for position, (name, stored) in enumerate(tensors.items()):
            info = stored.info
            if info.nbytes > self._file.size:  # a stride of 0 can claim any shape from one number
                refuse(self._file.path, f"tensor {name!r:.80} within {self._file.size} bytes", f"shape {info.shape}")
            claimed += info.nbytes if info.alias_of is None else 0
            if claimed > _MAX_OVERLAP * self._file.size:
                most = f"tensors of at most {_MAX_OVERLAP} × {self._file.size} bytes in all"
                refuse(self._file.path, most, f"more, as they share storage: {name!r:.80}")
            fingerprint = self._file.fingerprint(f"#{position}")
            yield TensorInfo(name, info.shape, info.dtype, info.nbytes, fingerprint, info.alias_of)

    def read(self, name: str) -> Array:
        stored = self._load()[name]
        self._handed_out += stored.info.nbytes
        if self._handed_out > _RELOAD_BYTES and self._zipped:
            self._tensors = None
        return stored.load()

    def _load(self) -> dict[str, StoredTensor]:
        if self._tensors is None:
            self._handed_out = 0
            source = str(self._file.path)
            tensors = in_memory(named_tensors(_safe_load(self._file, self._zipped), source), source)
            self._tensors = {stored.info.name: stored for stored in tensors}
        return self._tensors


def named_tensors(value: Any, source: str = "state dict") -> dict[str, Any]:
    """Tensors by dotted path in nested dicts and lists, without optimiser state; `source` is for the error.

    >>> list(named_tensors({"epoch": 3, "state_dict": {"fc.weight": torch.zeros(2, 2)}}))
    ['fc.weight']
    """
    value = _unwrapped(value)
    found: dict[str, Any] = {}
    seen: set[int] = set()  # each container once: a pickle may hold a list in itself, or 2^n times
    pending: list[tuple[str, Any, Any]] = [("", "", value)]
    while pending:
        outer, key, item = pending.pop()
        path = (
            f"{outer}.{key}" if outer else str(key)
        )  # only now: a million of them would take a thousand times the file
        check_names(source, [path], 1, 0)
        if _is_array(item):
            found.setdefault(path or "tensor", item)
        elif id(item) not in seen:
            seen.add(id(item))
            pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
            children = [(path, k, child) for k, child in pairs if _is_key(k) and _may_hold(child)]
            pending += [c for c in reversed(children) if path or _is_array(c[2]) or not _is_training_state(c[1])]
    return found


def _unwrapped(value: Any) -> Any:
    """The state dict inside {"epoch": …, "state_dict": …}, however many wrappers deep."""
    seen: set[int] = set()
    while isinstance(value, Mapping) and id(value) not in seen:
        seen.add(id(value))
        if any(_is_array(item) for item in value.values()):
            break
        value = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), Mapping)), value)
    return value


def _is_key(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and abs(key) < 1 << 63)


def _is_training_state(key: str | int) -> bool:
    return isinstance(key, str) and key[:16].lower().startswith(_TRAINING_STATE)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _may_hold(value: Any) -> bool:
    """Whether the value is an array or may have some inside."""
    return isinstance(value, (torch.Tensor, np.ndarray, dict, list, tuple, Mapping))


def _check_archive(file: SourceFile) -> None:
    """Members must be stored as they are, which is how torch.save writes them: no expansion, so no bomb."""
    end = file.bytes(max(0, file.size - 22), min(22, file.size))
    if not (end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0")):  # else torch may find another directory
        refuse(file.path, "a torch archive that ends with its directory", "other bytes: truncated or corrupt")
    with open_zip(file) as archive:
        _check_members(file, archive)


def _check_members(file: SourceFile, archive: zipfile.ZipFile) -> None:
    entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        hint = "save module.state_dict() with torch.save instead"
        refuse(file.path, "weights only", "a TorchScript archive, which carries code", hint)
    compressed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    if compressed:
        refuse(file.path, "uncompressed members, as torch.save writes", f"compressed {compressed[0]!r:.80}")
    for name in (entry.filename for entry in entries if entry.filename.endswith(".pkl")):
        try:
            pickled = io.BytesIO(archive.read(name))  # a byte at a time from the archive takes three times as long
        except ARCHIVE_ERRORS as error:
            refuse(file.path, f"a readable member {name!r:.80}", str(error))
        _check_pickles(file, pickled, 1)


def _check_pickles(file: SourceFile, stream: IO[bytes] | mmap.mmap, count: int) -> None:
    """Refuse pickles that would take more than twice the file, before one is followed."""
    most = _SLACK_BYTES + 2 * file.size
    try:
        for _ in range(count):
            if pickle_cost(cast(IO[bytes], stream), most) > most:
                refuse(file.path, f"a pickle that takes at most {most >> 20} MB of memory", "one that takes more")
    except (*ARCHIVE_ERRORS, LookupError) as error:
        refuse(file.path, "a file that torch.save wrote", f"{str(error)[:160]}: truncated or corrupt")


def _safe_load(file: SourceFile, zipped: bool) -> Any:
    try:
        if file.path.suffix == ".safetensors":  # torch would believe the name; an open file has none, nor a mapping
            with file.path.open("rb") as opened:
                return torch.load(opened, map_location="cpu", weights_only=True)
        return torch.load(file.path, map_location="cpu", weights_only=True, mmap=zipped)
    except CheckpointError:
        raise
    except Exception as error:  # the unpickler meets garbage in its own ways: KeyError, IndexError, struct.error …
        text = str(error).strip()
        if "Unsupported global" in text or "GLOBAL" in text or "Unsupported operand" in text:
            reason = text.split("WeightsUnpickler error:")[-1].strip().splitlines()[0]
            came = f"a pickle with more than tensors in it, which is never run ({reason:.200})"
            refuse(file.path, "tensors only", came, "save module.state_dict() with torch.save, or use safetensors")
        first = f"{type(error).__name__} {text}".strip().splitlines()[0]
        refuse(file.path, "a file that torch.save wrote", f"{first:.160}: truncated or corrupt")
