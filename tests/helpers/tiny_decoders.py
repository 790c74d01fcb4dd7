"""Tiny decoders with tokenizers, as they are written for llama.cpp; and what compression leaves of them."""

import json

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

SIZES = {
    "vocab_size": 336, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "initializer_range": 0.1,  # so that attention attends to something
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
WIDTHS, HEADS = (96, 50, 17), ((2, 2), (1, 2), (2, 1))  # neurons; key–value heads, and queries on each
TEXT = (
    "It's 1234567 o'clock: WE'LL meet at 12:30,\tdon't we?\n\n  The weather in 1987 wasn't what they'd hoped for...\n"
    "def f(x):\n    return x**2 + 3.14  # naïve Straße, ÉCOLE, 你好，世界 🙂\r\n   spaces   and\n\n\n\nlines  "
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_WORDS = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES, WORDS = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex) for regex in (False, True))
WAYS = {  # llama.cpp's names for ways to split texts
    "gpt-2": [WORDS],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), WORDS],
    "qwen2": [pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated"), BYTES],
    "smaug-bpe": [pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated"), BYTES],
    "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(LLAMA3_WORDS), "isolated"), BYTES],
}


def tokenizer(way="gpt-2"):
    """Byte pairs learnt from a few lines; "pieces": as SentencePiece has them."""
    special, alphabet = ["<unk>", "<s>", "</s>"], []
    if way == "pieces":
        made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=way == "llama-bpe"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(WAYS[way]), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    if way == "pieces":  # bytes are tokens like others
        plain = json.loads(made.to_str())
        plain["added_tokens"] = plain["added_tokens"][:3]
        made = tokenizers.Tokenizer.from_str(json.dumps(plain))
    if way in ("llama-bpe", "pieces"):
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template="{{ messages }}", **named)


def decoder(kind="LlamaForCausalLM", **sizes):
    """A decoder in evaluation mode, the same each time; biases are not zero."""
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    model = cls(cls.config_class(**SIZES | sizes)).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.normal_(value.data, 1.0 if "norm" in name else 0.0, 0.1)
    return model


def narrowed(model, widths=WIDTHS, heads=HEADS):
    """The model with other numbers of neurons and heads in each layer, as compression in dense form leaves it."""
    size = model.model.layers[0].self_attn.head_dim
    for layer, width, (groups, queries) in zip(model.model.layers, widths, heads, strict=True):
        attention, neurons = layer.self_attn, layer.mlp
        rows = {(attention, "q_proj"): groups * queries * size}
        rows |= {(attention, name): groups * size for name in ("k_proj", "v_proj")}
        rows |= {(neurons, name): width for name in ("gate_proj", "up_proj")}
        columns = {(attention, "o_proj"): groups * queries * size, (neurons, "down_proj"): width}
        for (module, name), count in {**rows, **columns}.items():
            old = getattr(module, name)
            kept = old.weight.data[:count] if (module, name) in rows else old.weight.data[:, :count]
            new = nn.Linear(1, 1, old.bias is not None)
            new.out_features, new.in_features = kept.shape
            new.weight.data = kept.clone()
            if old.bias is not None:
                new.bias.data = old.bias.data[: kept.shape[0]].clone()
            setattr(module, name, new)
        attention.num_key_value_groups = queries
    return model
