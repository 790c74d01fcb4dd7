"""ONNX with weights of 8 and 4 bits, and with weights in a file of their own."""

import importlib
import os

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from tests.helpers import tiny_transformers as tiny

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")
NEAR = {"q8_0": 0.02, "q4_1": 0.2, "q4_0": 0.2}


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def bits(path):
    """The bits of every product with weights, in the order of the graph."""
    nodes = [node for node in onnx.load(path).graph.node if node.op_type == "MatMulNBits"]
    return [onnx.helper.get_node_attr_value(node, "bits") for node in nodes]


def ran(path, **inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, inputs), strict=True))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 5)).eval()


@pytest.mark.parametrize("type", NEAR)
def test_layers_with_biases_are_rounded_too(type, tmp_path):
    model, x = mlp(), torch.randn(50, 70)
    plain = cx.export(model, tmp_path / "a.onnx", x)
    done = cx.export(model, tmp_path / "b.onnx", x, type=type)
    assert done.type == type
    assert plain.type == "f32"
    assert f"with weights in {type}" in str(done)
    assert 0 < done.deviation < NEAR[type]
    assert done.bytes < 0.5 * plain.bytes
    assert bits(done.path) == ([8, 8, 8] if type == "q8_0" else [4, 4, 8])  # what writes the output keeps more
    assert not {"Gemm", "MatMul"} & set(kinds(done.path))


def rounded(weight, top):
    """(out, in) A weight of an nn.Linear in blocks of 32 inputs, whose largest is the lowest integer."""
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % 32))).reshape(len(weight), -1, 32)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(-1)[..., None], -1)
    scale = np.where(largest == 0, 1, largest / -top)
    return (np.clip(np.rint(padded / scale), -top, top - 1) * scale).reshape(len(weight), -1)[:, : weight.shape[1]]


@pytest.mark.parametrize(("type", "top"), [("q8_0", 128), ("q4_0", 8)])
def test_the_file_computes_with_rounded_weights(type, top, tmp_path):
    model, x = mlp(), torch.randn(50, 70)
    path = cx.export(model, tmp_path / "a.onnx", x, type=type).path
    with torch.no_grad():
        for i, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
            layer.weight.copy_(torch.from_numpy(rounded(layer.weight.numpy(), 128 if i == 2 else top)))
        wanted = model(x)
    found = torch.from_numpy(ran(path, input=x.numpy())["output"])
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_steps_of_generation_go_with_few_bits(name, tmp_path):
    """Step by step with past keys and values, the file says what it says of the whole text."""
    model, data = tiny.build(name), tiny.batches(name)
    whole = cx.export(model, tmp_path / "whole.onnx", data, type="q4_0")
    done = cx.export(model, tmp_path / "step.onnx", data, type="q4_0", past=True)
    assert done.deviation < NEAR["q4_0"]
    assert bits(done.path)[-1] == 8
    assert set(bits(done.path)[:-1]) == {4}
    text = tiny.texts(2, 6, seed=5)
    ids, mask = text["input_ids"].numpy(), text["attention_mask"].numpy()
    wanted = ran(whole.path, input_ids=ids, attention_mask=mask)["logits"]
    past = {n: np.zeros((2, s[1], 0, s[3]), np.float32) for n, s in done.inputs.items() if n.startswith("past")}
    for position in range(6):
        step = {"input_ids": ids[:, position : position + 1], "attention_mask": mask[:, : position + 1]}
        if "position_ids" in done.inputs:
            step["position_ids"] = np.full((2, 1), position)
        found = ran(done.path, **step, **past)
        past = {n: found[n.replace("past_key_values", "present")] for n in past}
        np.testing.assert_allclose(found["logits"][:, 0], wanted[:, position], atol=1e-4)


def test_a_head_that_is_the_table_is_rounded_too(tmp_path):
    """Large ones are not turned before the graph is written."""
    torch.manual_seed(0)
    kind = tiny.transformers.LlamaForCausalLM
    sizes = {"vocab_size": 9000, "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = kind(kind.config_class(**tiny.GROUPED | sizes)).eval()
    done = cx.export(model, tmp_path / "a.onnx", tiny.batches("llama"), type="q4_0", max_deviation=1)
    assert bits(done.path) == [4] * 7 + [8]
    tables = 9000 * 64  # numbers
    assert done.bytes < 3 * tables


@pytest.mark.parametrize("past", [False, True])
def test_blocks_of_decoders_are_rounded_too(past, tmp_path):
    model = tiny.build("llama")
    halves = [(np.arange(rows, rows + 64), np.arange(rows // 2, rows // 2 + 32)) for rows in (0, 64)]
    gate = model.model.layers[0].mlp.gate_proj
    model.model.layers[0].mlp.gate_proj = cx.BlockLinear.from_blocks(gate.weight.detach(), None, halves)
    done = cx.export(model, tmp_path / "a.onnx", tiny.batches("llama"), type="q8_0", past=past)
    assert done.deviation < NEAR["q8_0"]
    assert bits(done.path) == [8] * 16  # seven products in each of two layers, one of them in halves, and the head
    assert "present.1.value" in done.outputs or not past


def test_a_file_that_is_too_far_away_says_what_to_do(tmp_path):
    model, data = tiny.build("llama"), tiny.batches("llama")
    with pytest.raises(cx.InvalidOption, match=r"deviate by .*; raise max_deviation=, or take a type= of more bits"):
        cx.export(model, tmp_path / "a.onnx", data, type="q4_0", max_deviation=1e-6)
    with pytest.raises(cx.InvalidOption, match=r'perplexity 40 → 66\); type="q8_0" and type="q4_0" round the weights'):
        cx.export(model, tmp_path / "a.onnx", data, int8=True, max_deviation=1e-6)
    with pytest.raises(cx.InvalidOption, match="int8=True and type=q4_0 do not go together"):
        cx.export(model, tmp_path / "a.onnx", data, int8=True, type="q4_0")
    with pytest.raises(cx.InvalidOption, match="type must be one of f32, q8_0, q4_1, q4_0, got 'f16'"):
        cx.export(model, tmp_path / "a.onnx", data, type="f16")
    assert os.listdir(tmp_path) == []


def test_large_weights_stand_in_a_file_of_their_own(tmp_path, monkeypatch):
    """As beyond 2 GB; here beyond 10 kB."""
    model, x = mlp(), torch.randn(50, 70)
    small = cx.export(model, tmp_path / "whole.onnx", x, type="q4_0")
    monkeypatch.setattr(importlib.import_module("crystallite.export.onnx"), "_LARGEST", 10_000)
    for name, options in {"f32": {}, "q8_0": {"type": "q8_0"}, "int8": {"int8": True}}.items():
        path = tmp_path / name / "a.onnx"
        done = cx.export(model, path, x, **options)
        assert sorted(os.listdir(path.parent)) == ["a.onnx", "a.onnx.data"]
        assert done.bytes == sum(each.stat().st_size for each in path.parent.iterdir())
        assert len({each.stat().st_mode for each in path.parent.iterdir()}) == 1
        found = torch.from_numpy(ran(done.path, input=x.numpy())["output"])
        assert (found - model(x)).norm() < 0.1 * model(x).norm()
    path = tmp_path / "f32" / "a.onnx"
    with pytest.raises(cx.InvalidOption, match="not written"):
        cx.export(model, path, x, type="q4_0", max_deviation=1e-9)
    assert ran(str(path), input=x.numpy())  # what was there is there
    done = cx.export(model, path, x, type="q4_0")  # below 10 kB
    assert os.listdir(path.parent) == ["a.onnx"]
    assert done.bytes == small.bytes
