"""Damaged and hostile files: one clear error each, no code run, no memory taken, nothing written."""

import io
import json
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint
from tests.helpers import hostile_gguf, hostile_onnx
from tests.helpers.waiting import finished


def safetensors(entries, data=b"", header=None, length=None):
    header = json.dumps(entries).encode() if header is None else header
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


GOOD = safetensors({"w": entry()}, bytes(8))
SAFETENSORS = {
    "length beyond file": (safetensors({}, length=1 << 40), "header of 2 to"),
    "length over the limit": (safetensors({}, length=(1 << 64) - 1), "header of 2 to"),
    "length only": (b"\x10\0\0\0\0\0\0\0", "header of 2 to"),
    "five bytes": (b"\x01\0\0\0\0", "header of 2 to"),
    "truncated data": (GOOD[:-3], "truncated"),
    "truncated header": (GOOD[:30], "header of 2 to"),
    "trailing data": (GOOD + b"more", "8 bytes of data, as the header says, got 12"),
    "not json": (safetensors({}, header=b"{not json}"), "header in JSON"),
    "not utf-8": (safetensors({}, header=b'{"\xff\xfe": 1}'), "header in JSON"),
    "a list": (safetensors({}, header=b"[1, 2, 3]"), "JSON object"),
    "nested too deep": (safetensors({}, header=b'{"a":' + b"[" * 900 + b"]" * 900 + b"}" * 1), "dtype, shape"),
    "brackets": (safetensors({}, header=b'{"a":[' + b"[]," * 900_000 + b"[]]}"), "at most 69 MB of memory"),
    "absurd number": (safetensors({}, header=b'{"a":' + b"9" * 9000 + b"}"), "header in JSON"),
    "duplicate name": (safetensors({}, bytes(8), b'{"w":%b,"w":%b}' % ((json.dumps(entry()).encode(),) * 2)), "twice"),
    "no tensors": (safetensors({}), "at least one tensor"),
    "entry is a number": (safetensors({"w": 3}), "dtype, shape and data_offsets"),
    "entry lacks shape": (safetensors({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "dtype, shape"),
    "unknown dtype": (safetensors({"w": entry("F13")}, bytes(8)), "one of F64, F32"),
    "dtype is a list": (safetensors({"w": entry(["F32"])}, bytes(8)), "one of F64, F32"),
    "negative dimension": (safetensors({"w": entry(shape=(-2, -1))}, bytes(8)), "non-negative whole numbers"),
    "fractional dimension": (safetensors({"w": entry(shape=(2.0,))}, bytes(8)), "non-negative whole numbers"),
    "boolean dimension": (safetensors({"w": entry(shape=(True, 2))}, bytes(8)), "non-negative whole numbers"),
    "shape is text": (safetensors({"w": {**entry(), "shape": "2"}}, bytes(8)), "a list as shape"),
    "overflowing shape": (safetensors({"w": entry(shape=(1 << 32, 1 << 33))}, bytes(8)), "a shape that can exist"),
    "overflow behind a zero": (safetensors({"w": entry(shape=(0, 1 << 62), offsets=(0, 0))}), "a shape that can exist"),
    "too many dimensions": (safetensors({"w": entry(shape=(1,) * 99)}, bytes(4)), "at most 32 dimensions"),
    "shape and size differ": (safetensors({"w": entry(shape=(3,))}, bytes(8)), "12 bytes for 'w'"),
    "begin after end": (safetensors({"w": entry(offsets=(8, 0))}, bytes(8)), "begin before they end"),
    "negative offset": (safetensors({"w": entry(offsets=(-8, 0))}, bytes(8)), "begin before they end"),
    "offset beyond file": (safetensors({"w": entry(offsets=(800, 808))}, bytes(8)), "truncated"),
    "three offsets": (safetensors({"w": entry(offsets=(0, 4, 8))}, bytes(8)), "two whole numbers"),
    "overlap": (safetensors({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps the one before"),
    "hole": (safetensors({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)), "leaves a hole"),
    "too many tensors": (
        safetensors(
            {},
            header=b"{"
            + b",".join(b'"%d":{"dtype":"F32","shape":[],"data_offsets":[0,0]}' % i for i in range(20_000))
            + b"}",
        ),
        r"at most \d+ tensors",
    ),
    "escape codes in a name": (safetensors({"w\x1b[2J": entry()}, bytes(8)), "printable tensor names"),
}


def npy(shape="(2,)", descr="'<f4'", data=bytes(8)):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def archive(*members, method=zipfile.ZIP_STORED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for name, data in members:
            out.writestr(name, data)
    return buffer.getvalue()


def lying_archive(claimed):
    """A deflated member whose directory entry claims another uncompressed size."""
    data = bytearray(archive(("w.npy", npy("(250000,)", data=bytes(1_000_000))), method=zipfile.ZIP_DEFLATED))
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", claimed)
    return bytes(data)


def objects():
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def corrupted_member():
    data = bytearray(
        archive(
            ("w.npy", npy("(300000,)", data=np.random.default_rng(0).bytes(1_200_000))), method=zipfile.ZIP_DEFLATED
        )
    )
    data[-200] ^= 0xFF  # well behind the header, before the archive's directory
    return bytes(data)


NUMPY = {
    "claims a terabyte": (npy("(274877906944,)"), r"\d+ bytes for float32"),
    "truncated": (npy(data=bytes(5)), "truncated"),
    "overflowing": (npy("(4611686018427387904, 4)"), "a shape that can exist"),
    "negative": (npy("(-2,)"), "non-negative"),
    "no header": (b"\x93NUMPY\x01\x00", "a NumPy header"),
    "future version": (b"\x93NUMPY\x09\x00" + npy()[8:], "a NumPy header"),
    "code as header": (npy("__import__('os').getcwd()"), "a NumPy header"),
    "pickled objects": (objects(), "never loaded"),
    "structured": (npy(descr="[('a', '<f4')]"), "numbers"),
    "npz with objects": (archive(("w.npy", objects())), "never loaded"),
    "npz header disagrees": (archive(("w.npy", npy("(999,)"))), "as the archive says"),
    "npz of nothing": (archive(), "an archive of .npy arrays"),
    "npz of text": (archive(("readme.txt", b"hello")), "an archive of .npy arrays"),
    "npz truncated": (archive(("w.npy", npy()))[:-30], "truncated or corrupt"),
    "npz member twice": (None, "one name twice"),
    "zip bomb": (lying_archive(4_000_000_000), "zip bomb"),
    "honest zeros": (None, "zip bomb"),
    "lzma": (archive(("w.npy", npy()), method=zipfile.ZIP_LZMA), "stored or deflated"),
    "archive of countless members": (
        archive(*((f"{i:060}", b"") for i in range(160_000))),
        "an archive directory of at most",
    ),
    "zip magic only": (b"PK\x03\x04", "a zip archive"),
}
with pytest.warns(UserWarning, match="Duplicate name"):
    NUMPY["npz member twice"] = (archive(("w.npy", npy()), ("w.npy", npy())), "one name twice")
NUMPY["honest zeros"] = (
    archive(("w.npy", npy("(25000000,)", data=bytes(100_000_000))), method=zipfile.ZIP_DEFLATED),
    "zip bomb",
)


class Payload:
    """Unpickled without care, it would create the marker file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (Path(self.marker),))


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def claiming(size):
    """A torch file whose one tensor says it has `size` numbers while its storage has four."""
    with zipfile.ZipFile(io.BytesIO(saved({"w": torch.ones(4)}))) as source:
        members = [(name, source.read(name)) for name in source.namelist()]
    claim = b"J" + struct.pack("<i", size) + b"\x85"  # pickled (size,) for (4,)
    assert any(b"K\x04\x85" in data for _, data in members)
    return archive(*((name, data.replace(b"K\x04\x85", claim)) for name, data in members))


def claiming_legacy(size):
    data = saved({"w": torch.ones(4)}, _use_new_zipfile_serialization=False)
    return data.replace(b"K\x04\x85", b"J" + struct.pack("<i", size) + b"\x85")


TORCH = {
    "truncated": (saved({"w": torch.ones(100)})[:-200], "truncated or corrupt"),
    "truncated legacy": (
        saved({"w": torch.ones(100)}, _use_new_zipfile_serialization=False)[:-90],
        "truncated or corrupt",
    ),
    "half a legacy header": (
        saved({"w": torch.ones(9)}, _use_new_zipfile_serialization=False)[:20],
        "truncated or corrupt",
    ),
    "plain pickle": (pickle.dumps({"w": [1.0]}), "another kind of pickle"),
    "garbage pickle": (archive(("a/data.pkl", bytes(range(1, 65))), ("a/version", b"3")), "torch.save"),
    "compressed": (archive(("a/data.pkl", b"." * 9), method=zipfile.ZIP_DEFLATED), "uncompressed members"),
    "comment after directory": (saved({"w": torch.ones(4)}) + b"PK\x05\x06", "truncated or corrupt"),
    "claims more than its storage": (claiming(2_000_000_000), "torch.save wrote"),
    "claims more than its storage, legacy": (claiming_legacy(2_000_000_000), "torch.save wrote"),
    "one number, any shape": (saved({"w": torch.ones(1).expand(1 << 30)}), "within"),
    "millions of dicts": (
        archive(("a/data.pkl", b"\x80\x02" + b"}" * 5_000_000 + b".")),
        "a pickle that takes at most 73 MB",
    ),
    "millions of dicts, legacy": (
        saved({}, _use_new_zipfile_serialization=False)[:18] + b"\x80\x02" + b"}" * 5_000_000 + b".",
        "a pickle that takes at most 73 MB",
    ),
    "no tensors": (saved({"epoch": 3}), "at least one tensor"),
}
OTHER = {
    "empty": (b"", "0 bytes"),
    "text": (b"hello, these are not weights\n", "safetensors, torch, npz, npy, ONNX or GGUF"),
    "lfs pointer": (b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(40), "a file that begins with"),
}
CASES = [
    pytest.param(content, suffix, message, id=f"{family}: {name}")
    for family, suffix, group in (
        ("safetensors", ".safetensors", SAFETENSORS),
        ("numpy", ".npz", NUMPY),
        ("torch", ".pt", TORCH),
        ("other", ".bin", OTHER),
    )
    for name, (content, message) in group.items()
]


@pytest.mark.parametrize(("content", "suffix", "message"), CASES)
def test_one_clear_error_and_nothing_written(tmp_path, content, suffix, message):
    path = tmp_path / f"weights{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "expected" in str(caught.value)
    assert len(str(caught.value)) < 700 + len(str(path))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", range(1, len(GOOD)))
def test_every_truncation_of_safetensors_is_refused(tmp_path, size):
    (tmp_path / "w.safetensors").write_bytes(GOOD[:size])
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "w.safetensors")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"w": torch.ones(2), "x": p}], ids=["bare", "beside a tensor"])
def test_pickled_code_never_runs(tmp_path, zipped, wrap):
    marker = tmp_path / "ran"
    torch.save(wrap(Payload(str(marker))), tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="never run") as caught:
        open_checkpoint(tmp_path / "w.pt")
    assert "safetensors" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["w.pkl", "w.bin", "w.npz", "w.onnx", "w.safetensors"])
def test_plain_pickles_never_run_under_any_name(tmp_path, name):
    marker = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Payload(str(marker))))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / name)
    assert not marker.exists()


def test_pickled_modules_and_scripts_are_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(CheckpointError, match=r"state_dict\(\)"):
        open_checkpoint(tmp_path / "module.pt")
    members = (("m/data.pkl", b"."), ("m/constants.pkl", b"."), ("m/code/m.py", b"import os"))
    (tmp_path / "script.pt").write_bytes(archive(*members))
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(tmp_path / "script.pt")


def test_containers_inside_themselves_end(tmp_path):
    loop: dict[str, object] = {}
    loop["model"] = loop
    doubling: list[object] = [torch.ones(1)]
    for _ in range(200):
        doubling = [doubling, doubling]
    torch.save({"a": loop, "b": doubling}, tmp_path / "w.pt")
    assert len(open_checkpoint(tmp_path / "w.pt").tensors) == 1
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(CheckpointError, match="at least one tensor"):
        open_checkpoint(tmp_path / "loop.pt")


def test_damage_behind_a_sound_header_is_found_by_the_checksum(tmp_path):
    (tmp_path / "w.npz").write_bytes(corrupted_member())
    with pytest.raises(CheckpointError, match="intact data"):
        open_checkpoint(tmp_path / "w.npz").read("w")


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(CheckpointError, match="nothing at this path"):
        open_checkpoint(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="a folder with weights"):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    for path in (tmp_path / "pipe.safetensors", tmp_path, "/dev/zero"):
        with pytest.raises(CheckpointError, match="a regular file"):
            open_checkpoint(path)


MEASURE = """
import sys
from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # kB, of this program alone
before = peak()
for path in sys.argv[1:]:
    try:
        open_checkpoint(path)
    except CheckpointError:
        continue
    sys.exit(f"{path} was accepted")
print(peak() - before)
"""


def test_bombs_take_no_memory(tmp_path):
    """All bombs in one process: its peak grows by less than 200 MB, though they claim terabytes."""
    bombs = {
        **{f"{i}.safetensors": content for i, (content, _) in enumerate(SAFETENSORS.values())},
        **{f"{i}.npz": content for i, (content, _) in enumerate(NUMPY.values())},
        **{f"{i}.pt": content for i, (content, _) in enumerate(TORCH.values())},
        **{f"{i}.gguf": content for i, (content, _) in enumerate(hostile_gguf.HOSTILE.values())},
        **{f"{i}.onnx": content for i, (content, _) in enumerate(hostile_onnx.HOSTILE.values())},
        "brackets.safetensors": safetensors({}, header=b'{"a":[' + b"[]," * 8_000_000 + b"[]]}"),
    }
    for name, content in bombs.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "huge.safetensors").open("wb") as file:  # a header of 5 GB that is really there
        file.write((5 << 30).to_bytes(8, "little") + b"{")
        file.truncate(6 << 30)
    command = [sys.executable, "-c", MEASURE, *map(str, tmp_path.iterdir())]
    result = finished(command)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < 200_000
