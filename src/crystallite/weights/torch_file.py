"""Reads what torch.save wrote, with the unpickler that builds tensors and runs nothing else."""

from __future__ import annotations

import mmap
import pickletools
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

import numpy as np
import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights.archive import ARCHIVE_ERRORS, open_zip
from crystallite.weights.stored import Array, Contents, SourceFile, StoredTensor, TensorInfo, in_memory, refuse

__all__ = ["is_legacy_torch", "named_tensors", "read_torch"]

_LEGACY_MAGIC = (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "params")
_TRAINING_STATE = ("optim", "lr_sched", "scheduler", "scaler", "callbacks", "loops")
_LEGACY_PICKLES = 5  # magic number, version, system, the object itself, the order of its storages
_MAX_OPERATIONS = 4_000_000  # a tensor takes about 60
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
        for position, (name, stored) in enumerate(self._load().items()):
            info = stored.info
            if info.nbytes > self._file.size:  # a stride of 0 can claim any shape from one number
                refuse(self._file.path, f"tensor {name!r:.80} within {self._file.size} bytes", f"shape {info.shape}")
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
            tensors = in_memory(named_tensors(_safe_load(self._file, self._zipped)), str(self._file.path))
            self._tensors = {stored.info.name: stored for stored in tensors}
        return self._tensors


def named_tensors(value: Any) -> dict[str, Any]:
    """Tensors by dotted path in nested dicts and lists, without optimiser state.

    >>> list(named_tensors({"epoch": 3, "state_dict": {"fc.weight": torch.zeros(2, 2)}}))
    ['fc.weight']
    """
    value = _unwrapped(value)
    found: dict[str, Any] = {}
    seen: set[int] = set()  # each container once: a pickle may hold a list in itself, or 2^n times
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, item = pending.pop()
        if _is_array(item):
            found.setdefault(path or "tensor", item)
        elif isinstance(item, (Mapping, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
            children = [(f"{path}.{k}" if path else str(k), child) for k, child in pairs if isinstance(k, (str, int))]
            pending += [c for c in reversed(children) if path or _is_array(c[1]) or not _is_training_state(c[0])]
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


def _is_training_state(key: str) -> bool:
    return key.lower().startswith(_TRAINING_STATE)


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _check_archive(file: SourceFile) -> None:
    """Members must be stored as they are, which is how torch.save writes them: no expansion, so no bomb."""
    end = file.bytes(max(0, file.size - 22), min(22, file.size))
    if not (end.startswith(b"PK\x05\x06") and end.endswith(b"\0\0")):  # else torch may find another directory
        refuse(file.path, "a torch archive that ends with its directory", "other bytes: truncated or corrupt")
    with open_zip(file) as archive:
        entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        hint = "save module.state_dict() with torch.save instead"
        refuse(file.path, "weights only", "a TorchScript archive, which carries code", hint)
    compressed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    if compressed:
        refuse(file.path, "uncompressed members, as torch.save writes", f"compressed {compressed[0]!r:.80}")
    with open_zip(file) as archive:
        for name in (entry.filename for entry in entries if entry.filename.endswith(".pkl")):
            try:
                stream = archive.open(name)
            except ARCHIVE_ERRORS as error:
                refuse(file.path, f"a readable member {name!r:.80}", str(error))
            with stream:
                _check_pickles(file, stream, 1)


def _check_pickles(file: SourceFile, stream: IO[bytes] | mmap.mmap, count: int) -> None:
    """Counts instructions without following them: a byte of pickle can ask for an object of 64."""
    operations = 0
    try:
        for _ in range(count):
            for _operation in pickletools.genops(cast(IO[bytes], stream)):
                operations += 1
                if operations > _MAX_OPERATIONS:
                    refuse(file.path, f"a pickle of at most {_MAX_OPERATIONS} instructions", "more")
    except ARCHIVE_ERRORS as error:
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
