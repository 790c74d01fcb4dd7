"""Files and folders written whole or not at all, and one kind of error where they cannot be.

What is written gets its name last, after its contents are on the disk: neither a kill nor a power cut leaves half of
something under a name that somebody opens. Left-overs of killed writers are removed by the next one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from crystallite.core.errors import WriteError

try:
    import fcntl
except ImportError:  # Windows: left-overs stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["new_file", "new_folder", "sync_folder", "write_file", "writing"]


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Says what could not be written, and why, in one kind of error.

    >>> with writing("model"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    crystallite.core.errors.WriteError: model: expected a place that can be written to, got: No space left on device
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WriteError(f"{path}: expected a place that can be written to, got: {reason:.300}") from error


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file under another name, which gets its own when it is written; if there is an error, nothing stays.

    A file that has the name by then is replaced. The folder is made where it is missing.
    """
    target = Path(path)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            _sync(unfinished)
            unfinished.replace(target)
            _sync(target.parent)
        finally:
            with suppress(OSError):  # there is none, or no folder for it
                unfinished.unlink()


def write_file(path: str | os.PathLike[str], contents: bytes) -> Path:
    """Write or replace a file at once or not at all, in a folder that is made where it is missing; returns its path."""
    with new_file(path) as unfinished:
        unfinished.write_bytes(contents)
    return Path(path)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder under another name, which gets its own when all in it is written; if there is an error, nothing stays.

    A folder that has the name by then is replaced, so whoever would not replace one looks before; a kill at the worst
    moment leaves it as `name.old`.
    """
    target = Path(path)
    unfinished, aside = target.parent / f".{target.name}.{uuid.uuid4().hex}", target.with_name(f"{target.name}.old")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        unfinished.mkdir()
        try:
            with _held(unfinished):
                yield unfinished
                sync_folder(unfinished)
                if target.is_dir():
                    _remove(aside)
                    target.rename(aside)  # a kill from here on leaves one of them
                unfinished.rename(target)
                _sync(target.parent)
                _remove(aside)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a folder that may be there; what a kill leaves of it has the name of a left-over."""
    if folder.is_dir():
        left = folder.with_name(f".{folder.name.removesuffix('.old')}.{uuid.uuid4().hex}")
        folder.rename(left)
        shutil.rmtree(left, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until all in a folder is on the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place, name))
        _sync(Path(place))


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """While this lasts, nobody takes the folder for a left-over; the system lets go of it when the process ends."""
    handle = os.open(folder, os.O_RDONLY) if fcntl else -1
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        if fcntl:
            os.close(handle)


def _sweep(target: Path) -> None:
    """Remove what killed writers of this folder have left beside it."""
    of_ours = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]{32}")
    for left in target.parent.iterdir() if fcntl else ():
        if of_ours.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            with suppress(OSError), _held(left):  # refused where somebody is still writing
                shutil.rmtree(left, ignore_errors=True)
