"""Folders with tiny language models and tokenizers of whole words, and text for them."""

import random

import pytest
import torch

transformers = pytest.importorskip("transformers")

WORDS = [f"w{i}" for i in range(40)]
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip


def prose(words, seed=0, line=9):
    """So many words by chance, in lines."""
    rng = random.Random(seed)
    chosen = rng.choices(WORDS, k=words)
    return "\n".join(" ".join(chosen[i : i + line]) for i in range(0, words, line)) + "\n"


def word_tokenizer(beginning=False):
    """Every word is a token; with a token of its own at the beginning if asked."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    known = ["[pad]", "[unk]", "[bos]", *WORDS]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(known)}, unk_token="[unk]"))
    made.pre_tokenizer = Whitespace()
    if beginning:
        made.post_processor = TemplateProcessing(single="[bos] $A", special_tokens=[("[bos]", 2)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[pad]", unk_token="[unk]", bos_token="[bos]"
    )


def language_model(folder, name="LlamaForCausalLM", beginning=False):
    """A folder with a tiny model of random weights and its tokenizer; returns the model."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(vocab_size=43, initializer_range=0.2, **SIZES)).eval()
    model.save_pretrained(folder)
    word_tokenizer(beginning).save_pretrained(folder)
    return model
