"""GGUF files written byte by byte, and what the reader must say of each."""

import struct


def text(value):
    return struct.pack("<Q", len(value)) + value


def tensor(name=b"w", dims=(4, 2), kind=0, offset=0, rank=None):
    dimensions = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        text(name)
        + struct.pack("<I", len(dims) if rank is None else rank)
        + dimensions
        + struct.pack("<IQ", kind, offset)
    )


def header(version=3, tensors=(), keys=(), data=b"", counts=None):
    counts = counts or (len(tensors), len(keys))
    content = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return content + bytes(-len(content) % 32) + data


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


HUGE = 1 << 62
HOSTILE = {
    "magic only": (b"GGUF", "at least 24 bytes"),
    "version": (header(version=77), "version 2 or 3"),
    "big-endian": (header(version=3 << 24), "version 2 or 3"),
    "tensor count": (header(counts=(HUGE, 0)), "as many tensors as"),
    "key count": (header(counts=(0, HUGE)), "as many keys as"),
    "name length": (header(counts=(1, 0), tensors=[struct.pack("<Q", HUGE)]), "more bytes of GGUF header"),
    "array length": (header(keys=[key(b"k", 9, struct.pack("<IQ", 4, HUGE))]), "more bytes of GGUF header"),
    "string array length": (header(keys=[key(b"k", 9, struct.pack("<IQ", 8, HUGE))]), "more bytes of GGUF header"),
    "array of arrays": (header(keys=[key(b"k", 9, struct.pack("<IQ", 9, 1))]), "numbers or strings"),
    "value type": (header(keys=[key(b"k", 99, b"")]), "a known GGUF value type"),
    "key twice": (header(keys=[key(b"k", 4, bytes(4))] * 2), "each GGUF key once"),
    "alignment": (header(keys=[key(b"general.alignment", 4, struct.pack("<I", 7))]), "power of two"),
    "alignment text": (header(keys=[key(b"general.alignment", 8, text(b"x"))]), "power of two"),
    "rank": (header(tensors=[tensor(rank=4_000_000)]), "at most 8 dimensions"),
    "shape": (header(tensors=[tensor(dims=(HUGE, HUGE))]), "a shape that can exist"),
    "beyond the file": (header(tensors=[tensor()], data=bytes(31)), "truncated or corrupt"),
    "offset": (header(tensors=[tensor(offset=HUGE)], data=bytes(32)), "truncated or corrupt"),
    "type": (header(tensors=[tensor(kind=999)], data=bytes(32)), "a known GGUF type"),
    "blocks": (header(tensors=[tensor(kind=8)], data=bytes(32)), "in blocks of 32"),
    "overlap": (header(tensors=[tensor(b"a"), tensor(b"b", offset=16)], data=bytes(64)), "do not overlap"),
    "name twice": (header(tensors=[tensor(), tensor(offset=32)], data=bytes(64)), "each tensor name once"),
    "no tensors": (header(), "at least one tensor"),
}
