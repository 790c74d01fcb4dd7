"""Tiny transformers models that are difficult to follow: grouped queries, layers dropped at random, caches."""

import pytest
import torch

from crystallite.data.batch import Batch

transformers = pytest.importorskip("transformers")

SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def tokens(length=6, count=2):
    return torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(0))


def llama(intermediate_size=64):
    """4 heads of queries, 2 of keys and values."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=intermediate_size, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), Batch(0, 2, (), {"input_ids": tokens()})


def t5():
    """Its decoder has a configuration of its own, which asks for a cache."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    sides = {"encoder": 1, "decoder": 2}
    layers = [f"{side}.block.{i}.layer.{last}.DenseReluDense." for side, last in sides.items() for i in range(2)]
    return (
        transformers.T5ForConditionalGeneration(config).eval(),
        both(),
        {(layer + "wi", layer + "wo") for layer in layers},
    )


def bart():
    """Drops layers at random while it trains."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=50, encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=32,
        encoder_layerdrop=0.5, decoder_layerdrop=0.5, **SIZES,
    )  # fmt: skip
    pairs = {(f"{side}.layers.{i}.fc1", f"{side}.layers.{i}.fc2") for side in ("encoder", "decoder") for i in range(2)}
    return transformers.BartModel(config).eval(), both(), pairs


def wav2vec2():
    """Drops layers at random while it trains; reads sound."""
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, conv_dim=(8, 8),
        conv_stride=(4, 2), conv_kernel=(4, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        layerdrop=0.5, mask_time_prob=0.0,
    )  # fmt: skip
    sound = torch.randn(2, 200, generator=torch.Generator().manual_seed(0))
    layers = [f"encoder.layers.{i}.feed_forward." for i in range(2)]
    pairs = {(layer + "intermediate_dense", layer + "output_dense") for layer in layers}
    return transformers.Wav2Vec2Model(config).eval(), Batch(0, 2, (), {"input_values": sound}), pairs


def encoder_decoder():
    """Two models with configurations inside that of the whole."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 32, "max_position_embeddings": 32,
    }  # fmt: skip
    encoder = transformers.BertModel(transformers.BertConfig(**sizes))
    decoder = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True, add_cross_attention=True))
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    layers = ("encoder.encoder.layer.0.", "decoder.bert.encoder.layer.0.")
    return model, both(), {(layer + "intermediate.dense", layer + "output.dense") for layer in layers}


def both():
    return Batch(0, 2, (), {"input_ids": tokens(), "decoder_input_ids": tokens(5)})


CASES = {"t5": t5, "bart": bart, "wav2vec2": wav2vec2, "encoder_decoder": encoder_decoder}
