"""Opens the zip archives that .npz and torch files are, once their directory is known to be no bomb.

Own code because `zipfile` reads a directory of any size into memory first.
"""

from __future__ import annotations

import zipfile
import zlib

from crystallite.weights.stored import SourceFile, check_names, refuse

__all__ = ["ARCHIVE_ERRORS", "open_zip"]

ARCHIVE_ERRORS = (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError)  # of damaged ones

_DEFLATE_LIMIT = 1100  # deflate cannot expand more than 1032-fold; a directory that claims it lies
_PLAUSIBLE_EXPANSION = 100  # zeros compress like this, trained weights do not
_MAX_DIRECTORY_BYTES = 16 << 20
_SLACK_BYTES = 64 << 20  # up to here even zeros do no harm


def open_zip(file: SourceFile) -> zipfile.ZipFile:
    """The archive with its directory checked: no encryption, no member bigger than the file can hold."""
    directory_bytes = _directory_bytes(file)
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        refuse(file.path, f"an archive directory of at most {_MAX_DIRECTORY_BYTES} bytes", f"{directory_bytes}")
    try:
        archive = zipfile.ZipFile(file.path)
    except ARCHIVE_ERRORS as error:
        refuse(file.path, "a zip archive", f"{error}: truncated or corrupt")
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    check_names(file.path, names, len(names), file.size)
    if len(set(names)) != len(names):
        refuse(file.path, "each archive member once", "one name twice")
    if sum(entry.compress_size for entry in entries) > file.size:
        refuse(file.path, f"members that fit in {file.size} bytes", "overlapping ones (a zip bomb)")
    for entry in entries:
        if entry.flag_bits & 1:
            refuse(file.path, "an archive that is not encrypted", f"encrypted member {entry.filename!r:.80}")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            refuse(file.path, "stored or deflated members", f"compression method {entry.compress_type}")
        _check_expansion(file, entry)
    return archive


def _directory_bytes(file: SourceFile) -> int:
    """The size of the archive's directory, each entry of which becomes an object ten times as large."""
    count = min(file.size, 22 + (1 << 16) + 76)  # its end record, a comment, and what precedes it in large files
    tail = file.bytes(file.size - count, count)
    end = tail.rfind(b"PK\x05\x06")
    if end >= 76 and tail[end - 20 : end - 16] == b"PK\x06\x07":
        return int.from_bytes(tail[end - 36 : end - 28], "little")
    return int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0


def _check_expansion(file: SourceFile, entry: zipfile.ZipInfo) -> None:
    stored = entry.compress_type == zipfile.ZIP_STORED
    factor = entry.file_size / max(1, entry.compress_size)
    plausible = entry.file_size <= _SLACK_BYTES or factor <= _PLAUSIBLE_EXPANSION
    if (stored and entry.file_size != entry.compress_size) or factor > _DEFLATE_LIMIT or not plausible:
        came = f"{entry.compress_size} bytes said to become {entry.file_size} (a zip bomb)"
        refuse(file.path, f"a plausible size for member {entry.filename!r:.80}", came)
