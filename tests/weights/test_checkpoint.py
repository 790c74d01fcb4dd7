"""Every format gives back the numbers that were put in, whatever the file is called."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import save_file
from torch import nn

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint

TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool),
    *(torch.complex64, torch.float8_e8m0fnu),
]
NUMPY_DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?", "c8", ">f4", "<U3"]


def same_bits(a, b):
    """Equal shape, dtype and bytes, for arrays and tensors alike."""
    a, b = (torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for x in (a, b))
    plain = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*plain)


def example(dtype, shape=(3, 5)):
    return torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else (torch.rand(shape) * 9).to(dtype)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_safetensors_round_trip(tmp_path, dtype):
    tensors = {"a": example(dtype), "empty": example(dtype, (0, 4)), "scalar": example(dtype, ()), "b": example(dtype)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt"})
    with open_checkpoint(tmp_path / "w.safetensors") as checkpoint:
        assert checkpoint.format == "safetensors"
        for name, tensor in tensors.items():
            info = checkpoint.tensors[name]
            assert (info.shape, info.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert info.nbytes == tensor.nbytes
            assert same_bits(checkpoint.read(name), tensor)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_torch_round_trip(tmp_path, dtype, zipped):
    if not zipped and str(dtype).startswith(("torch.float8", "torch.uint16", "torch.uint32")):
        pytest.skip("younger than the legacy format: torch cannot read it back either")
    tensors = {"a": example(dtype), "turned": example(dtype).T, "scalar": example(dtype, ())}
    torch.save(tensors, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    assert checkpoint.format == "torch"
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_npz_round_trip(tmp_path, dtype, save):
    plain = (np.random.default_rng(0).random((3, 5)) * 9).astype(dtype)
    arrays = {"a": plain, "turned": np.asfortranarray(plain), "scalar": plain[0, 0], "empty": plain[:0]}
    save(tmp_path / "w.npz", **arrays)
    checkpoint = open_checkpoint(tmp_path / "w.npz")
    assert checkpoint.format == "npz"
    for name, array in arrays.items():
        read = checkpoint.read(name)
        assert np.array_equal(read, array)
        assert read.dtype == np.asarray(array).dtype.newbyteorder("=")
        assert checkpoint.tensors[name].shape == array.shape


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("order", "CF")
def test_npy_round_trip(tmp_path, dtype, order):
    array = np.asarray((np.random.default_rng(0).random((3, 5)) * 9).astype(dtype), order=order)
    np.save(tmp_path / "w.npy", array)
    checkpoint = open_checkpoint(tmp_path / "w.npy")
    assert np.array_equal(checkpoint.read("w"), array)


@given(hnp.arrays(st.sampled_from(["f4", "f2", "i8"]), hnp.array_shapes(min_dims=0, max_dims=4, max_side=5)))
def test_any_shape_survives_safetensors_and_npz(tmp_path_factory, array):
    folder = tmp_path_factory.mktemp("any")
    save_file({"w": torch.from_numpy(np.array(array))}, folder / "w.safetensors")
    np.savez(folder / "w.npz", w=array)
    for name in ("w.safetensors", "w.npz"):
        assert same_bits(np.array(open_checkpoint(folder / name).read("w")), np.array(array))


def test_a_file_is_known_by_its_content(tmp_path):
    weight = torch.rand(2, 3)
    save_file({"w": weight}, tmp_path / "safetensors.bin")
    torch.save({"w": weight}, tmp_path / "torch.safetensors")
    np.savez(tmp_path / "arrays.npz", w=weight.numpy())
    (tmp_path / "arrays.npz").rename(tmp_path / "arrays.onnx")
    for name, fmt in (("safetensors.bin", "safetensors"), ("torch.safetensors", "torch"), ("arrays.onnx", "npz")):
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.format == fmt
        assert np.array_equal(checkpoint.read("w"), weight)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {0: torch.ones(2)}}},
        lambda state: {"model": state, "lr_schedulers": [torch.ones(1)]},
        lambda state: {"model": {"state_dict": state}},
    ],
)
def test_wrapped_state_dicts_are_looked_through(tmp_path, wrap):
    state = {"scaler.weight": torch.rand(2, 2), "scaler.bias": torch.rand(2)}
    torch.save(wrap(state), tmp_path / "last.ckpt")
    assert list(open_checkpoint(tmp_path / "last.ckpt").tensors) == list(state)
    assert list(open_checkpoint(wrap(state)).tensors) == list(state)


def test_torch_mappings_are_let_go_of_and_made_again(tmp_path, monkeypatch):
    tensors = {f"w{i}": torch.rand(8, 8) for i in range(4)}
    torch.save(tensors, tmp_path / "w.pt")
    monkeypatch.setattr("crystallite.weights.torch_file._RELOAD_BYTES", 300)
    checkpoint = open_checkpoint(tmp_path / "w.pt")
    read = {name: checkpoint.read(name) for name in (*tensors, *tensors)}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_nested_tensors_get_dotted_names(tmp_path):
    torch.save({"a": {"b": [torch.zeros(1), torch.ones(1)]}, "optimizer": {"m": torch.ones(9)}}, tmp_path / "w.pt")
    assert list(open_checkpoint(tmp_path / "w.pt").tensors) == ["a.b.0", "a.b.1"]


def test_module_and_state_dict():
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for source in (module, module.state_dict(), {k: v.numpy() for k, v in module.state_dict().items()}):
        checkpoint = open_checkpoint(source)
        assert list(checkpoint.tensors) == list(module.state_dict())
        assert np.array_equal(checkpoint.read("0.weight"), module[0].weight.detach())
        assert checkpoint.tensors["0.weight"].fingerprint == ""
    assert not open_checkpoint(module).read("0.weight").requires_grad


def test_tied_tensors_name_their_first(tmp_path):
    weight = torch.rand(4, 3)
    torch.save({"wte.weight": weight, "other": torch.rand(4, 3), "lm_head.weight": weight}, tmp_path / "w.bin")
    for source in (tmp_path / "w.bin", {"wte.weight": weight, "other": weight.clone(), "lm_head.weight": weight}):
        aliases = {name: info.alias_of for name, info in open_checkpoint(source).tensors.items()}
        assert aliases == {"wte.weight": None, "other": None, "lm_head.weight": "wte.weight"}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_torch_tensors_come_back_as_numbers():
    weight = torch.tensor([[0.5, -0.25]])
    state = {"w": torch.quantize_per_tensor(weight, 0.25, 0, torch.qint8)}
    assert torch.equal(open_checkpoint(state).read("w"), weight)


def sharded(folder: Path, names=("model-1.safetensors", "model-2.safetensors")) -> dict[str, torch.Tensor]:
    tensors = {f"layers.{i}.weight": torch.rand(3, 4).to(torch.bfloat16) for i in range(4)}
    weight_map = {}
    for shard, keys in zip(names, (list(tensors)[:2], list(tensors)[2:]), strict=True):
        chosen = {key: tensors[key] for key in keys}
        (torch.save if shard.endswith(".bin") else save_file)(chosen, folder / shard)
        weight_map |= dict.fromkeys(keys, shard)
    stem = "pytorch_model.bin" if names[0].endswith(".bin") else "model.safetensors"
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tensors


@pytest.mark.parametrize("names", [("model-1.safetensors", "model-2.safetensors"), ("model-1.bin", "model-2.bin")])
def test_sharded_folder(tmp_path, names):
    tensors = sharded(tmp_path, names)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert list(checkpoint.tensors) == list(tensors)
    assert all(same_bits(checkpoint.read(name), tensor) for name, tensor in tensors.items())
    index = next(tmp_path.glob("*.index.json"))
    assert list(open_checkpoint(index).tensors) == list(tensors)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "weights.npz", "only.pt"])
def test_folder_with_one_file(tmp_path, name):
    weight = torch.rand(2, 2)
    if name.endswith(".npz"):
        np.savez(tmp_path / name, w=weight.numpy())
    else:
        (save_file if name.endswith(".safetensors") else torch.save)({"w": weight}, tmp_path / name)
    (tmp_path / "README.md").write_text("not weights")
    checkpoint = open_checkpoint(str(tmp_path))
    assert np.array_equal(checkpoint.read("w"), weight)
    assert checkpoint.config == {}


def test_links_of_the_hugging_face_cache_are_followed(tmp_path):
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, repository / "blobs" / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert list(open_checkpoint(snapshot).tensors) == ["w"]
    (tmp_path / "mine").symlink_to(snapshot)  # the user's own link to the folder
    assert list(open_checkpoint(tmp_path / "mine").tensors) == ["w"]


def test_fingerprints_hold_until_the_file_changes(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.rand(4), "b": torch.rand(4)}, path)
    first, again = open_checkpoint(path), open_checkpoint(path)
    prints = [info.fingerprint for info in first.tensors.values()]
    assert prints == [info.fingerprint for info in again.tensors.values()]
    assert len(set(prints)) == 2
    os.utime(path, ns=(1, 1))
    assert prints[0] != open_checkpoint(path).tensors["a"].fingerprint
    with pytest.raises(CheckpointError, match=r"w\.safetensors: expected the file that was opened"):
        first.read("a")


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    save_file({"w": torch.ones(4), "h": torch.ones(4, dtype=torch.bfloat16)}, tmp_path / "w.safetensors")
    before = (tmp_path / "w.safetensors").read_bytes()
    checkpoint = open_checkpoint(tmp_path / "w.safetensors")
    for name in ("w", "h"):
        checkpoint.read(name)[:] = 7
        assert float(checkpoint.read(name).max()) == 1
    assert (tmp_path / "w.safetensors").read_bytes() == before


def test_misaligned_tensors_come_back_aligned(tmp_path):
    header = json.dumps({"w": {"dtype": "F64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-(len(header) + 1) % 8)  # data at an odd byte
    body = np.array([1.5, -2.5]).tobytes()
    (tmp_path / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    read = open_checkpoint(tmp_path / "w.safetensors").read("w")
    assert read.flags.aligned
    assert read.tolist() == [1.5, -2.5]


def test_closed_and_unknown_names_are_said():
    with (
        open_checkpoint({"w": np.ones(2)}) as checkpoint,
        pytest.raises(CheckpointError, match="no tensor 'v'; it has w"),
    ):
        checkpoint.read("v")
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint.read("w")
    assert repr(checkpoint) == "<Checkpoint state dict: state dict, 1 tensors, 0.0 MB>"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"w": np.array([object()])}, "an array of Python objects"),
        ({"w": torch.eye(2).to_sparse()}, "to_dense"),
        ({"w": torch.ones(2, device="meta")}, "meta device"),
        ({"epoch": 3}, "at least one tensor"),
        ({"a\x1b[31m": torch.ones(1)}, "printable"),
    ],
)
def test_state_dicts_that_hold_no_numbers(value, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(value)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused():
    with pytest.raises(CheckpointError, match="lazy parameter"):
        open_checkpoint(nn.LazyLinear(3))


STREAM = """
import sys, torch
from crystallite.weights import open_checkpoint
with open_checkpoint(sys.argv[1]) as checkpoint:
    peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # kB
    before = peak()
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        tensor.view(torch.int16).max()
    print(peak() - before)
"""


def test_streaming_keeps_one_tensor_resident(tmp_path):
    """40 bf16 tensors of 32 MB in a sparse file: reading all of them never holds more than a few."""
    count, nbytes = 40, 32 << 20
    entries = {
        f"w{i}": {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    with (tmp_path / "w.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + count * nbytes)
    command = [sys.executable, "-c", STREAM, str(tmp_path / "w.safetensors")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown * 1024 < 6 * nbytes
