"""ONNX files written byte by byte, and what the reader must say of each."""


def varint(number):
    groups = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(g | 0x80 for g in groups[:-1]), groups[-1]])


def message(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def model(graph):
    return b"\x08\x08" + message(7, graph)


def nested(depth):
    graph = b""
    for _ in range(depth):
        graph = message(1, message(4, b"If") + message(5, message(1, b"b") + message(6, graph)))
    return graph


def tensor(dims, kind=1, raw=b""):
    return message(
        5, b"".join(b"\x08" + varint(d) for d in dims) + b"\x10" + varint(kind) + message(8, b"w") + message(9, raw)
    )


HOSTILE = {
    "no graph": (b"\x08\x08", "one graph"),
    "two graphs": (model(b"") + message(7, b""), "one graph"),
    "no weights": (model(b""), "at least one tensor"),
    "length beyond file": (b"\x08\x08\x3a\xff\xff\xff\xff\x0f", "beyond its message"),
    "unfinished number": (b"\x08\x08\x3a\xff", "an unfinished number"),
    "endless number": (b"\x08" + b"\xff" * 40, "an unfinished number"),
    "unknown wire type": (b"\x08\x08\x0f", "unknown field type"),
    "shape": (model(tensor((1 << 40, 1 << 40))), "a shape that can exist"),
    "negative dimension": (model(tensor(((1 << 64) - 2, 2))), "non-negative"),
    "too few bytes": (model(tensor((1 << 20, 1 << 20), raw=bytes(8))), "bytes for 'w'"),
    "no data": (model(message(5, b"\x08\x04\x10\x01" + message(8, b"w"))), "4 numbers for 'w'"),
    "unknown data type": (model(tensor((1,), kind=99, raw=bytes(4))), "a known ONNX data type"),
    "name twice": (model(tensor((1,), raw=bytes(4)) * 2), "each tensor name once"),
    "graphs in graphs": (model(nested(40)), "at most 16 deep"),
    "empty nodes": (model(b"\x0a\x00" * 1_100_000), "at most 1000000 fields"),
    "small nodes": (model(message(1, b"\x0a\x01x\x22\x01A") * 110_000), "at most 100000 nodes and weights"),
    "small weights": (model(b"\x2a\x00" * 110_000), "at most 100000 nodes and weights"),
    "endless name": (model(message(1, message(3, b"n" * 100_000))), "absurdly long"),
}
