"""GGUF files run by llama.cpp: it computes what our models do, and reads texts as their tokenizers do."""

import numpy as np
import pytest
import torch

import crystallite as cx
from crystallite.export.decoder import read_decoder
from crystallite.weights.checkpoint import open_checkpoint
from tests.helpers import tiny_decoders as tiny

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-all builds it")
pytest.importorskip("gguf")
pytestmark = pytest.mark.slow

TOKENS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(0))
BLOCKS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def runs(path):
    """(tokens, vocabulary) logits of llama.cpp, with keys and values in float32."""
    runtime = llama_cpp.Llama(
        str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False, type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    try:
        runtime.eval(TOKENS.tolist())
        return torch.from_numpy(np.array(runtime.scores[: len(TOKENS)]))
    finally:
        runtime.close()


def apart(found, model):
    with torch.no_grad():
        wanted = model(TOKENS[None]).logits[0]
    return float((found - wanted).norm() / wanted.norm())


MODELS = {
    "llama": lambda: tiny.decoder(),
    "tied, with biases": lambda: tiny.decoder(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama 3": lambda: tiny.decoder(rope_parameters=tiny.LLAMA3),
    "linear": lambda: tiny.decoder(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "mistral": lambda: tiny.decoder("MistralForCausalLM"),
    "qwen2": lambda: tiny.decoder("Qwen2ForCausalLM"),
    "qwen3": lambda: tiny.decoder("Qwen3ForCausalLM", head_dim=32),
    "fewer heads": lambda: tiny.narrowed(tiny.decoder(), (40,) * 3, ((1, 2),) * 3),
    "deci": lambda: tiny.narrowed(tiny.decoder()),
    "deci, with biases": lambda: tiny.narrowed(
        tiny.decoder(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=tiny.LLAMA3)
    ),
    "deci of qwen2": lambda: tiny.narrowed(tiny.decoder("Qwen2ForCausalLM")),
    "deci, a layer without neurons": lambda: tiny.narrowed(tiny.decoder(), (96, 0, 17)),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same(name, tmp_path, tokenizer):
    model = MODELS[name]()
    done = cx.export(model, tmp_path / "a.gguf", type="f32", tokenizer=tokenizer)
    assert (done.architecture == "deci") == name.startswith("deci")
    assert apart(runs(done.path), model) < 1e-5


@pytest.mark.parametrize("type", ["f16", "bf16", *BLOCKS])
@pytest.mark.parametrize("architecture", ["llama", "deci"])
def test_types_lose_what_their_weights_do(architecture, type, tmp_path, tokenizer):
    """Beside our model with the weights of the file, what is left is what llama.cpp rounds activations to."""
    model = MODELS[architecture]()
    done = cx.export(model, tmp_path / "a.gguf", type=type, tokenizer=tokenizer)
    found = runs(done.path)
    assert apart(found, model) < 20 * done.rounding
    rounded = open_checkpoint(tmp_path / "a.gguf")
    with torch.no_grad():
        for each in read_decoder(model).tensors:
            stored = torch.as_tensor(rounded.read(each.name)).float()
            for axis, size in enumerate(each.shape):
                stored = stored.narrow(axis, 0, size)
            if each.turned_heads:
                stored = stored.reshape(each.turned_heads, -1, 2, *each.shape[1:]).transpose(1, 2)
            each.tensor.copy_(stored.reshape(each.shape))
    assert apart(found, model) < {"f16": 2e-3, "bf16": 2e-2}.get(type, 5e-2)


@pytest.mark.parametrize("way", [*tiny.WAYS, "pieces"])
def test_texts_are_read_as_the_tokenizer_does(way, tmp_path):
    tokenizer = tiny.tokenizer(way)
    done = cx.export(tiny.decoder(), tmp_path / "a.gguf", tokenizer=tokenizer)
    runtime = llama_cpp.Llama(done.path, vocab_only=True, verbose=False)
    try:
        for text in (tiny.TEXT, "What's new in 2024?", " leading spaces and\ttabs\n", "</s> is written as text"):
            found = runtime.tokenize(text.encode(), add_bos=True, special=True)
            assert found == tokenizer.encode(text), text
            if "</s>" not in text:  # after such a token, SentencePiece's way begins a text anew
                assert runtime.detokenize(found, special=True).decode().removeprefix("<s>").strip() == text.strip()
    finally:
        runtime.close()
