"""Files that ask for far more than they hold: refused, or opened within three times their size in memory."""

import zipfile

import numpy as np
import pytest
import torch
from benchmarks.attacks.large_files import FILES, SLACK_BYTES, TIMES_THE_FILE, opened

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint
from crystallite.weights.names import Tensors, role_from_name
from crystallite.weights.stored import TensorInfo

REFUSED = {
    "60,000 members.npz": "at most 19393 tensors in 13897802 bytes, got 60000",
    "names of 60,000 characters.npz": "names of at most 1024 characters, got 60004",
    "lists nested 10⁶ deep.pt": "a pickle that takes at most 67 MB",
    "tuples nested 10⁶ deep.pt": "names of at most 1024 characters",
    "dicts nested 10⁶ deep.pt": "a pickle that takes at most 79 MB",
    "a key of a megabyte, 2,000 deep.pt": "names of at most 1024 characters, got 1048576",
    "a key of a megabyte over 3,000 tensors.pt": "names of at most 1024 characters, got 1048576",
    "a million sets.pt": "a pickle that takes at most",
    "a bytearray of 2 GB.pt": "a pickle that takes at most",
    "3,000 encoded copies of a megabyte.pt": "a pickle that takes at most",
    "3,000 counts of a megabyte.pt": "a pickle that takes at most",
    "14 nested graphs with long names.onnx": "names of at most 4096 characters",
    "100,000 tensors.gguf": "at most 17708 tensors",
    "99,000 keys.gguf": "as many keys as",
}
OPENED = {"16,000 members.npz": 16_000, "16,000 keys.safetensors": 16_000, "14 nested graphs.onnx": 2}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_cost_more_than_it_holds_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        open_checkpoint(path)


@pytest.mark.parametrize("name", OPENED)
def test_many_tensors_are_no_attack(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(FILES[name]())
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.tensors) == OPENED[name]
        assert checkpoint.read(next(iter(checkpoint.tensors))).size in (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_memory_of_every_such_file(tmp_path, name):
    path, warm = tmp_path / name, tmp_path / "warm.pt"
    torch.save({"w": torch.ones(1)}, warm)
    path.write_bytes(FILES[name]())
    _, peak, _ = opened(path, warm)
    assert peak <= TIMES_THE_FILE * path.stat().st_size + SLACK_BYTES


def test_a_name_costs_no_more_than_its_length():
    """Counted, not timed: conventions are looked for in short parts alone, and siblings once for all tensors."""
    long = TensorInfo(f"{'norm' * 200}!.weight", (4, 4), "float32", 64)
    assert role_from_name(long, Tensors()).kind == "linear"
    looked_up = []

    class Counting(Tensors):
        def items(self):
            looked_up.append(1)
            return super().items()

    infos = {f"h.{i}.c_attn.weight": TensorInfo(f"h.{i}.c_attn.weight", (4, 4), "float32", 64) for i in range(50)}
    tensors = Counting(infos)
    assert {role_from_name(info, tensors).layout for info in infos.values()} == {"out-in"}
    assert len(looked_up) == 1


def test_tensors_that_share_storage_are_bounded_together(tmp_path):
    """Each would be read alone: a thousand views of one storage are a thousand times the file."""
    storage = torch.ones(50_000)
    torch.save({f"{i}": storage[i:] for i in range(300)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="share storage"):
        open_checkpoint(tmp_path / "w.pt")
    torch.save({f"{i}": storage[i:] for i in range(5)}, tmp_path / "w.pt")
    assert open_checkpoint(tmp_path / "w.pt").read("4").shape == (49_996,)


def test_deflated_members_are_read_without_their_archive(tmp_path):
    """As they were, and no more of them than the directory says."""
    values = {"a": np.arange(300_000, dtype=np.float32).reshape(600, 500).T, "b": np.zeros((2000, 500))}
    np.savez_compressed(tmp_path / "w.npz", **values)
    with open_checkpoint(tmp_path / "w.npz") as checkpoint:
        for name, value in values.items():
            assert np.array_equal(checkpoint.read(name), value)
    damaged = bytearray((tmp_path / "w.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "w.npz") as archive:
        entry = archive.getinfo("a.npy")
    damaged[entry.header_offset + entry.compress_size // 2] ^= 1
    (tmp_path / "w.npz").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"intact data|bytes of data"):
        open_checkpoint(tmp_path / "w.npz").read("a")
