"""Files that ask for much more time or memory than they have bytes, and what opening one takes.

`python -m benchmarks.attacks.large_files` writes each to the folder for temporary files, opens it in a process of its
own, looks what every tensor is, reads all of them, and prints processor time and memory beside the size of the file.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

SLACK_BYTES, TIMES_THE_FILE = 64 << 20, 3  # what any file may take, and what a large one may take beyond
_MEGABYTE = 1 << 20


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _keys(count: int, name: Callable[[int], str]) -> bytes:
    entries = (f'"{name(i)}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return safetensors(f"{{{','.join(entries)}}}".encode())


def npz(names: Iterator[str]) -> bytes:
    stream, array = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(2, np.float32))
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(f"{name}.npy", array.getvalue())
    return stream.getvalue()


def torch_archive(pickled: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in (("data.pkl", b"\x80\x02" + pickled), ("version", b"3\n"), ("byteorder", b"little")):
            archive.writestr(f"a/{name}", data)
    return stream.getvalue()


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _text(text: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text


def _copies(function: bytes, *more: bytes) -> bytes:
    """A list of what a function makes of the same megabyte, 3,000 times."""
    held = _text(b"k" * _MEGABYTE) + b"q\x010c" + function + b"q\x020" + b"".join(_text(m) + b"q\x030" for m in more)
    call = b"h\x02h\x01" + (b"h\x03\x86" if more else b"\x85") + b"R"
    return torch_archive(b"](" + held + call * 3000 + b"e.")


def _number(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(g | 0x80 for g in groups[:-1]), groups[-1]])


def _field(number: int, content: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(content)) + content


_WEIGHT = _field(5, b"\x08\x01\x10\x01" + _field(8, b"w") + _field(9, bytes(4)))


def _nested_graphs(depth: int, nodes: int, name: bytes, branches: int) -> bytes:
    graph = _WEIGHT
    for _ in range(depth):
        around = _field(1, _field(1, b"x") + _field(2, b"y" * 100) + _field(4, b"Add")) * nodes
        bodies = b"".join(_field(5, _field(1, b"b%d" % i) + _field(6, graph)) for i in range(branches))
        graph = around + _field(1, _field(3, name) + _field(4, b"If") + bodies)
    return b"\x08\x08" + _field(7, graph + _WEIGHT)


def gguf(tensors: int, keys: int) -> bytes:
    header = [b"GGUF", struct.pack("<IQQ", 3, tensors, keys)]
    header += [struct.pack("<Q6sII", 6, b"%06d" % i, 4, 0) for i in range(keys)]
    header += [struct.pack("<Q6sIQIQ", 6, b"%06d" % i, 1, 1, 0, 32 * i) for i in range(tensors)]
    content = b"".join(header)
    return content + bytes(-len(content) % 32 + 32 * tensors)


FILES: dict[str, Callable[[], bytes]] = {
    "60,000 members.npz": lambda: npz(f"w{i}" for i in range(60_000)),
    "names of 60,000 characters.npz": lambda: npz(f"{i:060000}" for i in range(200)),
    "16,000 members.npz": lambda: npz(f"w{i}" for i in range(16_000)),
    "lists nested 10⁶ deep.pt": lambda: torch_archive(b"]" * 10**6 + b"a" * (10**6 - 1) + b"."),
    "tuples nested 10⁶ deep.pt": lambda: torch_archive(b")" + b"\x85" * 10**6 + b"."),
    "dicts nested 10⁶ deep.pt": lambda: torch_archive((b"}" + _text(b"a")) * 10**6 + b"]" + b"s" * 10**6 + b"."),
    "a key of a megabyte, 2,000 deep.pt": lambda: torch_archive(
        b"}" + _text(b"k" * _MEGABYTE) + b"q\x01" + b"}h\x01" * 2000 + b"]" + b"s" * 2001 + b"."
    ),
    "a key of a megabyte over 3,000 tensors.pt": lambda: _saved(
        {"k" * _MEGABYTE: {f"{i}": torch.ones(1) for i in range(3000)}}
    ),
    "a million sets.pt": lambda: torch_archive(b"](" + b"\x8f" * 10**6 + b"e."),
    "a bytearray of 2 GB.pt": lambda: torch_archive(b"cbuiltins\nbytearray\nJ\x00\x94\x35\x77\x85R."),
    "3,000 encoded copies of a megabyte.pt": lambda: _copies(b"_codecs\nencode\n", b"utf16"),
    "3,000 counts of a megabyte.pt": lambda: _copies(b"collections\nCounter\n"),
    "16,000 tensors.pt": lambda: _saved({f"layer{i}.weight": torch.ones(1) for i in range(16_000)}),
    "1.4 million keys.safetensors": lambda: _keys(1_400_000, lambda i: f"{i:07}"),
    "290,000 keys of 247 characters.safetensors": lambda: _keys(290_000, lambda i: f"{i:0247}"),
    "1,000 keys of 90,000 characters.safetensors": lambda: _keys(1000, lambda i: f"{i:090000}"),
    "16,000 keys.safetensors": lambda: _keys(16_000, lambda i: f"{i}"),
    "90 MB of metadata.safetensors": lambda: safetensors(
        b'{"__metadata__":{' + b",".join(b'"k%07d":""' % i for i in range(6_000_000)) + b"}}"
    ),
    "45 million dimensions.safetensors": lambda: safetensors(
        b'{"w":{"dtype":"F32","shape":[' + b",".join([b"1"] * 45_000_000) + b'],"data_offsets":[0,4]}}', bytes(4)
    ),
    "names that regular expressions dread.safetensors": lambda: _keys(
        16_000, lambda i: f"{'norm' * 200}!{i}.{'bias_' * 30}!.c_attn.weight"
    ),
    "14 nested graphs.onnx": lambda: _nested_graphs(14, 0, b"n", 1),
    "14 nested graphs, two in each.onnx": lambda: _nested_graphs(14, 0, b"n", 2),
    "14 nested graphs of 7,000 nodes.onnx": lambda: _nested_graphs(14, 7000, b"n" * 20, 1),
    "14 nested graphs with long names.onnx": lambda: _nested_graphs(14, 1000, b"n" * 300, 1),
    "1 million empty nodes.onnx": lambda: b"\x08\x08" + _field(7, b"\x0a\x00" * 499_000 + _WEIGHT),
    "100,000 tensors.gguf": lambda: gguf(100_000, 0),
    "16,000 tensors.gguf": lambda: gguf(16_000, 0),
    "99,000 keys.gguf": lambda: gguf(1, 99_000),
}

_OPEN = """
import json, sys, time
import gguf, onnx  # what a reader may import is not what a file costs
from crystallite.core.errors import CrystalliteError
from crystallite.weights import open_checkpoint, recognise

def peak():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10

def read(path):
    try:
        with open_checkpoint(path) as checkpoint:
            for layer in recognise(checkpoint):
                layer.matrices(checkpoint)
            for name in checkpoint.tensors:
                checkpoint.read(name)
            return f"{len(checkpoint.tensors)} tensors"
    except CrystalliteError as error:
        return str(error).removeprefix(path)

read(sys.argv[1])  # the first file of a kind brings code with it
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before, start = peak(), time.process_time()
answer = read(sys.argv[2])
print(json.dumps([time.process_time() - start, peak() - before, answer]))
"""


def opened(path: Path, warm: Path) -> tuple[float, int, str]:
    """Seconds of processor time, bytes of memory, and what came of it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _OPEN, str(warm), str(path)]
    output = subprocess.run(command, check=True, capture_output=True, env=environment, timeout=600).stdout
    seconds, peak, answer = json.loads(output)
    return seconds, peak, answer


def main() -> None:
    print(f"| {'file':50} | MB | seconds | × file in memory | answer |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder, "warm.pt")
        warm.write_bytes(_saved({"w": torch.ones(1)}))
        for name, content in FILES.items():
            path = Path(folder, name)
            path.write_bytes(content())
            seconds, peak, answer = opened(path, warm)
            size = path.stat().st_size
            over = " OVER" if peak > TIMES_THE_FILE * size + SLACK_BYTES else ""
            times = f"{peak / size:.1f}" if peak > SLACK_BYTES else f"{peak >> 20} MB"
            print(f"| {name:50} | {size / 1e6:.1f} | {seconds:.2f} | {times}{over} | {answer[:100]} |", flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
