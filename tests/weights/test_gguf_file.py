"""GGUF files written by the gguf package come back row-major; hostile headers are refused before it sees them."""

import struct
import sys

import gguf
import numpy as np
import pytest
import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint, recognise

WEIGHT = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    writer.add_tensor("token_embd.weight", WEIGHT)
    writer.add_tensor("blk.0.attn_norm.weight", WEIGHT[0])
    writer.add_tensor("blk.0.attn_q.weight", WEIGHT.astype(np.float16))
    bf16 = torch.from_numpy(WEIGHT).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint8)
    writer.add_tensor("blk.0.attn_k.weight", bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name, kind in (("ffn_up", "Q8_0"), ("ffn_down", "Q4_0")):
        quantisation = gguf.GGMLQuantizationType[kind]
        packed = gguf.quants.quantize(WEIGHT, quantisation)
        writer.add_tensor(f"blk.0.{name}.weight", packed, raw_dtype=quantisation)
    experts = np.stack([WEIGHT, WEIGHT + 1, WEIGHT + 2])
    writer.add_tensor("blk.0.ffn_gate_exps.weight", experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_round_trip(model):
    checkpoint = open_checkpoint(model)
    assert checkpoint.format == "gguf"
    assert checkpoint.config["general.architecture"] == "llama"
    assert checkpoint.config["llama.attention.head_count"] == 4
    dtypes = {name.split(".")[-2]: info.dtype for name, info in checkpoint.tensors.items()}
    assert dtypes["attn_q"] == "float16"
    assert (dtypes["attn_k"], dtypes["ffn_up"], dtypes["ffn_down"]) == ("bfloat16", "Q8_0", "Q4_0")
    assert np.array_equal(checkpoint.read("token_embd.weight"), WEIGHT)
    assert np.array_equal(checkpoint.read("blk.0.attn_q.weight"), WEIGHT.astype(np.float16))
    assert torch.equal(checkpoint.read("blk.0.attn_k.weight"), torch.from_numpy(WEIGHT).to(torch.bfloat16))
    for name, tolerance in (("ffn_up", 0.02), ("ffn_down", 0.4)):
        read = checkpoint.read(f"blk.0.{name}.weight")
        assert read.shape == checkpoint.tensors[f"blk.0.{name}.weight"].shape == WEIGHT.shape
        assert np.abs(read - WEIGHT).max() < tolerance


def test_the_package_reads_the_same(model):
    checkpoint = open_checkpoint(model)
    for tensor in gguf.GGUFReader(model).tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        read = checkpoint.read(tensor.name)
        values = read.float().numpy() if isinstance(read, torch.Tensor) else read
        assert np.array_equal(values, expected.reshape(values.shape))


def test_recognised(model):
    checkpoint = open_checkpoint(model)
    layers = {layer.name: layer for layer in recognise(checkpoint)}
    assert layers["token_embd"].kind == "embedding"
    assert layers["blk.0.attn_norm.weight"].reason == "norm"
    assert (layers["blk.0.ffn_up"].kind, layers["blk.0.ffn_up"].rows, layers["blk.0.ffn_up"].cols) == ("linear", 6, 64)
    experts = [layers[f"blk.0.ffn_gate_exps[{i}]"].matrices(checkpoint) for i in range(3)]
    assert np.array_equal(experts[2][0][1], WEIGHT + 2)


def test_without_the_package_only_plain_types_are_read(model, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"pip install 'crystallite\[gguf\]'"):
        open_checkpoint(model)
    (tmp_path / "plain.gguf").write_bytes(header(tensors=[tensor()], data=bytes(32)))
    assert open_checkpoint(tmp_path / "plain.gguf").read("w").shape == (2, 4)


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


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(tmp_path, case):
    content, message = HOSTILE[case]
    (tmp_path / "w.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "w.gguf")
    assert "w.gguf: expected" in str(caught.value)


def test_every_truncation_is_refused(model):
    content = model.read_bytes()
    for size in (*range(1, 600, 7), len(content) // 2, len(content) - 3000):
        model.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(model)
