"""GGUF files written by the gguf package come back row-major; hostile headers are refused before it sees them."""

import sys

import gguf
import numpy as np
import pytest
import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights import open_checkpoint, recognise
from tests.helpers.hostile_gguf import HOSTILE, header, tensor

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
    for stored in gguf.GGUFReader(model).tensors:
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        read = checkpoint.read(stored.name)
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
