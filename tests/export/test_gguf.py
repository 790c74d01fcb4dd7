"""Decoders as GGUF: what is in the file, read by our own reader, the gguf package and transformers."""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

import crystallite as cx
from crystallite.cli.main import main
from crystallite.export.decoder import read_decoder
from crystallite.weights.checkpoint import open_checkpoint
from tests.helpers import tiny_decoders as tiny

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
ROUNDING = {"f32": 0, "f16": 5e-4, "bf16": 4e-3, "q8_0": 8e-3, "q5_1": 0.05, "q5_0": 0.06, "q4_1": 0.09, "q4_0": 0.12}
TOKENS = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def fields(path):
    return {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_transformers_opens_it_again(kind, tied, tmp_path, tokenizer):
    """Layers of one size are a stock model."""
    sizes = {"head_dim": 128} if kind == "Qwen3ForCausalLM" else {}  # transformers takes no other from a file of Qwen3
    model = tiny.decoder(kind, tie_word_embeddings=tied, **sizes)
    done = cx.export(model, tmp_path / "a.gguf", type="f32", tokenizer=tokenizer)
    assert done.architecture == {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(kind, "llama")
    assert done.rounding == 0
    assert done.bytes == os.path.getsize(done.path)
    names = {tensor.name for tensor in gguf.GGUFReader(done.path).tensors}
    assert ("output.weight" in names) != tied
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("type", ROUNDING)
def test_types_round_as_they_say(type, tmp_path, tokenizer):
    model = tiny.decoder()
    done = cx.export(model, tmp_path / "a.gguf", type=type, tokenizer=tokenizer)
    assert done.type == type
    assert done.rounding <= ROUNDING[type]
    assert (done.rounding == 0) == (type == "f32")
    read = open_checkpoint(tmp_path / "a.gguf")
    stored = {name: info.dtype.lower() for name, info in read.tensors.items()}
    plain = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    assert stored["blk.0.ffn_up.weight"] == plain.get(type, type)
    assert stored["blk.0.ffn_norm.weight"] == "float32"
    assert stored["token_embd.weight"] == stored["output.weight"] == plain.get(type, "q8_0")
    wanted = model.model.layers[1].mlp.down_proj.weight.detach()
    found = torch.as_tensor(read.read("blk.1.ffn_down.weight")).float()
    assert (found - wanted).norm() <= max(ROUNDING[type], 1e-7) * wanted.norm()


def test_layers_that_differ_are_told_one_by_one(tmp_path, tokenizer):
    model = tiny.narrowed(tiny.decoder(rope_parameters=tiny.LLAMA3, attention_bias=True, mlp_bias=True))
    done = cx.export(model, tmp_path / "a.gguf", type="f32", tokenizer=tokenizer)
    said = fields(done.path)
    assert said["general.architecture"] == done.architecture == "deci"
    assert said["deci.feed_forward_length"] == [96, 50, 17]
    assert said["deci.attention.head_count"] == [4, 2, 2]
    assert said["deci.attention.head_count_kv"] == [2, 1, 2]
    assert said["deci.rope.freq_base"] == 500
    read = open_checkpoint(tmp_path / "a.gguf")
    keys = model.model.layers[2].self_attn.k_proj
    for stored, ours in (("weight", keys.weight), ("bias", keys.bias)):
        halves = ours.detach().reshape(2, 2, 8, -1)  # heads, halves that rotary positions turn together, pairs
        wanted = halves.transpose(1, 2).reshape(ours.shape)
        assert torch.equal(torch.as_tensor(read.read(f"blk.2.attn_k.{stored}")), wanted)
    rotary = model.model.rotary_emb
    wanted = 500.0 ** (-torch.arange(0, 16, 2) / 16) / rotary.inv_freq
    torch.testing.assert_close(torch.as_tensor(read.read("rope_freqs.weight")), wanted)


def test_neurons_of_zeros_make_whole_blocks(tmp_path, tokenizer):
    model = tiny.narrowed(tiny.decoder(mlp_bias=True))
    done = cx.export(model, tmp_path / "a.gguf", type="q8_0", tokenizer=tokenizer)
    assert fields(done.path)["deci.feed_forward_length"] == [96, 64, 32]
    assert "29 neurons of zeros" in str(done)
    read = open_checkpoint(tmp_path / "a.gguf")
    for name in ("ffn_gate", "ffn_up"):
        for part in ("weight", "bias"):
            assert not read.read(f"blk.2.{name}.{part}")[17:].any()
    assert not read.read("blk.2.ffn_down.weight")[:, 17:].any()
    assert read.tensors["blk.2.ffn_down.bias"].shape == (64,)


def test_rows_that_are_no_blocks_are_kept_in_half_precision(tmp_path, tokenizer):
    model = tiny.decoder(hidden_size=48, num_attention_heads=3, num_key_value_heads=1)
    done = cx.export(model, tmp_path / "a.gguf", type="q4_0", tokenizer=tokenizer)
    assert "in f16, as their rows are no multiples of 32: token_embd.weight" in str(done)
    stored = {name: info.dtype.lower() for name, info in open_checkpoint(tmp_path / "a.gguf").tensors.items()}
    assert stored["blk.0.attn_q.weight"] == "float16"
    assert stored["blk.0.ffn_down.weight"] == "q4_0"


def test_layers_without_neurons_keep_their_attention(tmp_path, tokenizer):
    """llama.cpp passes over the whole layer where the width is 0."""
    model = tiny.narrowed(tiny.decoder(), widths=(96, 0, 96))
    done = cx.export(model, tmp_path / "a.gguf", tokenizer=tokenizer)
    assert fields(done.path)["deci.feed_forward_length"] == [96, 1, 96]


def test_a_window_bounds_the_context(tmp_path, tokenizer):
    done = cx.export(tiny.decoder("MistralForCausalLM", sliding_window=40), tmp_path / "a.gguf", tokenizer=tokenizer)
    assert fields(done.path)["llama.context_length"] == 40
    assert "the context is 40 tokens" in str(done)


def low_rank(model):
    layer = model.model.layers[1].mlp
    layer.down_proj = cx.LowRankLinear.from_factors(torch.randn(64, 4), torch.randn(4, 96), None)


def other_heads(model):
    model.model.layers[2].self_attn.v_proj = nn.Linear(64, 24, bias=False)


def unequal_groups(model):
    model.model.layers[0].self_attn.q_proj = nn.Linear(64, 48, bias=False)
    model.model.layers[0].self_attn.o_proj = nn.Linear(48, 64, bias=False)


def one_more(model):
    model.model.layers[0].extra = nn.Linear(2, 2)


def infinite(model):
    model.lm_head.weight.data[0, 0] = float("inf")


def too_large(model):
    model.lm_head.weight.data[0, 0] = 1e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (low_rank, r'model.layers.1.mlp.down_proj: a LowRankLinear; .* form="dense" .* or form="uniform"'),
        (other_heads, r"model.layers.2.self_attn: expected heads of 16 .* got 64, 32 and 24 numbers .* form="),
        (unequal_groups, r"model.layers.0.self_attn: 3 heads of queries on 2 of keys"),
        (one_more, r"model.layers.0.extra.bias: llama.cpp has no place for it"),
        (infinite, r"lm_head.weight: expected finite numbers"),
        (too_large, r'output.weight: numbers too large for f16; pass type="f32"'),
    ],
)
def test_what_has_no_place_is_refused_by_name(change, message, tmp_path, tokenizer):
    model = tiny.decoder()
    change(model)
    with pytest.raises(cx.InvalidOption, match=message):
        cx.export(model, tmp_path / "a.gguf", tokenizer=tokenizer)
    assert os.listdir(tmp_path) == []


def test_norms_of_heads_need_layers_of_one_size(tmp_path, tokenizer):
    with pytest.raises(cx.InvalidOption, match=r'model.layers.1: .* as Qwen3ForCausalLM does; .* form="uniform"'):
        cx.export(tiny.narrowed(tiny.decoder("Qwen3ForCausalLM")), tmp_path / "a.gguf", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "gelu"}, "expected hidden_act silu, got 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type .* got 'yarn'"),
    ],
)
def test_other_computations_are_refused(options, message):
    with pytest.raises(cx.InvalidOption, match=message):
        read_decoder(tiny.decoder(**options))


def test_other_models_and_options_are_refused(tmp_path, tokenizer):
    model = tiny.decoder()
    for wrong, message in (
        ({"data": TOKENS}, "data= is for ONNX"),
        ({"past": True}, "past= is for ONNX"),
        ({"type": "q4_k"}, "type must be one of f32, f16.* got 'q4_k'"),
        ({"tokenizer": None}, "holds the vocabulary, and this model was opened from no folder; pass tokenizer="),
        ({"tokenizer": str(tmp_path)}, "has no tokenizer.json"),
        ({"tokenizer": str(tmp_path / "none")}, "no file or folder"),
    ):
        with pytest.raises(cx.InvalidOption, match=message):
            cx.export(model, tmp_path / "a.gguf", **{"tokenizer": tokenizer} | wrong)
    with pytest.raises(cx.InvalidOption, match="Sequential: GGUF files are written of LlamaForCausalLM, "):
        cx.export(nn.Sequential(nn.Linear(2, 2)), tmp_path / "a.gguf", tokenizer=tokenizer)
    small = tiny.decoder(vocab_size=300)
    with pytest.raises(cx.InvalidOption, match=r"at most the 300 tokens of the model .* got \d+"):
        cx.export(small, tmp_path / "a.gguf", tokenizer=tokenizer)
    with pytest.raises(cx.InvalidOption, match="tokenizer= is for GGUF"):
        cx.export(model, tmp_path / "a.onnx", TOKENS, tokenizer=tokenizer)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("way", tiny.WAYS)
def test_ways_to_split_have_names(way, tmp_path):
    tokenizer = tiny.tokenizer(way)
    said = fields(cx.export(tiny.decoder(), tmp_path / "a.gguf", tokenizer=tokenizer).path)
    assert said["tokenizer.ggml.model"] == "gpt2"
    assert said["tokenizer.ggml.pre"] == way
    tokens = said["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[len(tokenizer) :] == [f"[PAD{i}]" for i in range(len(tokenizer), 336)]
    kinds = said["tokenizer.ggml.token_type"]
    assert kinds[:3] == [gguf.TokenType.CONTROL] * 3
    assert set(kinds[3 : len(tokenizer)]) == {gguf.TokenType.NORMAL}
    assert set(kinds[len(tokenizer) :]) == {gguf.TokenType.UNUSED}
    assert said["tokenizer.ggml.eos_token_id"] == 2
    assert said["tokenizer.ggml.add_bos_token"] == (way == "llama-bpe")
    assert said["tokenizer.chat_template"] == "{{ messages }}"


def test_pieces_have_scores_in_the_order_of_their_merges(tmp_path):
    tokenizer = tiny.tokenizer("pieces")
    said = fields(cx.export(tiny.decoder(), tmp_path / "a.gguf", tokenizer=tokenizer).path)
    assert said["tokenizer.ggml.model"] == "llama"
    assert said["tokenizer.ggml.add_space_prefix"]
    kinds, tokens = said["tokenizer.ggml.token_type"], said["tokenizer.ggml.tokens"]
    assert kinds[0] == gguf.TokenType.UNKNOWN
    assert [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.BYTE] == [
        f"<0x{byte:02X}>" for byte in range(256)
    ]
    scores = dict(zip(tokens, said["tokenizer.ggml.scores"], strict=True))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert [scores["".join(pair)] for pair in merges] == [-i for i in range(len(merges))]


def test_an_unknown_way_to_split_is_refused(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = tiny.pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(cx.InvalidOption, match=r"splits texts in a way that .* known are those of gpt-2, smollm"):
        cx.export(tiny.decoder(), tmp_path / "a.gguf", tokenizer=tokenizer)


@pytest.mark.parametrize("type", ["f32", "q8_0"])
def test_what_transformers_opened_is_written_again(type, tmp_path, tokenizer):
    """It unpacks the weights of a GGUF file: the model is one like any other."""
    first = cx.export(tiny.decoder(), tmp_path / "a.gguf", type=type, tokenizer=tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf")
    second = cx.export(model, tmp_path / "b" / "a.gguf", type=type, tokenizer=first.path)
    assert second.rounding < 1e-3  # of blocks that were made of these numbers
    first, second = (gguf.GGUFReader(done.path).tensors for done in (first, second))
    for one, other in zip(first, second, strict=True):
        assert one.name == other.name
        values = [gguf.quants.dequantize(each.data, each.tensor_type) for each in (one, other)]
        np.testing.assert_allclose(*values, rtol=1e-2, atol=1e-4)


def test_the_vocabulary_of_another_file_is_taken_as_it_is(tmp_path):
    model = tiny.decoder()
    first = cx.export(model, tmp_path / "a.gguf", tokenizer=tiny.tokenizer("smollm"))
    second = cx.export(model, tmp_path / "b.gguf", type="q8_0", tokenizer=first.path)
    mine, other = (
        {key: value for key, value in fields(done.path).items() if key.startswith("tokenizer.")}
        for done in (first, second)
    )
    assert mine == other
    with pytest.raises(cx.InvalidOption, match=r"expected the 350 tokens of the model in .*a.gguf, got 336"):
        cx.export(tiny.decoder(vocab_size=350), tmp_path / "c.gguf", tokenizer=first.path)
    np.savez(tmp_path / "d.npz", a=np.ones(2))
    with pytest.raises(cx.InvalidOption, match="expected a GGUF file"):
        cx.export(model, tmp_path / "c.gguf", tokenizer=tmp_path / "d.npz")


def test_the_command_writes_what_a_folder_holds(tmp_path, capsys, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    model = tiny.decoder()
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    capsys.readouterr()
    assert main(["export", "model", "a.gguf"]) == 0
    assert "a.gguf: " in (said := capsys.readouterr().out)
    assert "bytes of GGUF, f16, architecture llama; " in said
    assert main(["export", "model", "b.gguf", "--type", "q4_0", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["type"] == "q4_0"
    assert done["bytes"] == os.path.getsize("b.gguf") < os.path.getsize("a.gguf")
    assert main(["export", "model", "c.onnx"]) == 2
    assert "c.onnx: --data is missing" in capsys.readouterr().err
    os.remove("model/tokenizer.json")
    assert main(["export", "model", "c.gguf"]) == 2
    assert "--tokenizer" in (said := capsys.readouterr().err)
    assert "no tokenizer.json" in said
    assert main(["export", "model", "c.gguf", "--tokenizer", "a.gguf"]) == 0
    assert sorted(os.listdir()) == ["a.gguf", "b.gguf", "c.gguf", "model"]
