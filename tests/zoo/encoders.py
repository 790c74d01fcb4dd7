"""Encoders of texts with the heads that users have, and encoder–decoders."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.zoo.decoders import TOKENS, WIDE
from tests.zoo.entry import BATCH, HIDDEN, Batches, Entry, Pairs, plant_, texts, token_ids

__all__ = ["ENCODERS", "ENCODER_DECODERS"]

BERT = {
    "feed_forward": (Pairs(r"intermediate\.dense", r"layer\.\d+\.output\.dense"),),
    "value_output": (Pairs(r"self\.value", r"attention\.output\.dense"),),
    "query_key": (Pairs(r"self\.query", r"self\.key"),),
}
FAIRSEQ = {
    "feed_forward": (Pairs("fc1", "fc2"),),
    "value_output": (Pairs("v_proj", "out_proj"),),
    "query_key": (Pairs("q_proj", "k_proj"),),
}
T5_ATTENTION = {
    "value_output": (Pairs(r"\w+Attention\.v", r"\w+Attention\.o"),),
    "query_key": (Pairs(r"\w+Attention\.q", r"\w+Attention\.k"),),
}
FUSED = {
    "feed_forward": (Pairs(r"mlp\.Wi", r"mlp\.Wo"),),
    "value_output": (Pairs("Wqkv", r"attn\.Wo"),),
    "query_key": (Pairs("Wqkv", "Wqkv"),),
}
LABELS = {"num_labels": 5}
MODERN = WIDE | {
    "intermediate_size": 2 * HIDDEN, "global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 2,
    "sep_token_id": 3,
}  # fmt: skip
BART = TOKENS | {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 4 * HIDDEN,
    "decoder_ffn_dim": 4 * HIDDEN, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = TOKENS | {
    "d_model": HIDDEN, "d_kv": 16, "d_ff": 4 * HIDDEN, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2,
}  # fmt: skip


def encoder(name: str, model: str, config: str, sizes: dict[str, Any], **facts: Any) -> Entry:
    """An entry for an encoder class of transformers."""

    def build() -> nn.Module:
        return plant_(getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes)))

    return Entry(name, "encoder", "encoder", build, texts(), model_class=model, **facts)


def encoder_decoder(
    name: str, model: str, config: str, sizes: dict[str, Any], batches: Batches | None = None, **facts: Any
) -> Entry:
    """An entry for a class that reads with one half and writes with the other."""

    def build() -> nn.Module:
        return plant_(getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes)))

    both = batches or texts(decoder_input_ids=token_ids(12))
    return Entry(name, "encoder–decoder", "seq2seq", build, both, generates=True, model_class=model, **facts)


def spectra(seed: int, samples: int) -> list[dict[str, Tensor]]:
    """Mel spectra and the tokens written so far."""
    rng = torch.Generator().manual_seed(seed)
    smooth = nn.functional.interpolate(torch.randn(samples, 16, 9, generator=rng), 40, mode="linear")
    features = smooth + 0.2 * torch.randn(samples, 16, 40, generator=rng)
    tokens = token_ids(12)(seed, samples)
    pairs = zip(features.split(BATCH), tokens.split(BATCH), strict=True)
    return [{"input_features": heard, "decoder_input_ids": written} for heard, written in pairs]


ENCODERS = [
    encoder("bert", "BertModel", "Bert", WIDE, **BERT),
    encoder("bert_classifier", "BertForSequenceClassification", "Bert", WIDE | LABELS, **BERT),
    encoder("bert_masked", "BertForMaskedLM", "Bert", WIDE, **BERT),
    encoder("roberta", "RobertaForSequenceClassification", "Roberta", WIDE | LABELS, **BERT),
    encoder("xlm_roberta", "XLMRobertaForTokenClassification", "XLMRoberta", WIDE | LABELS, **BERT),
    encoder("distilbert", "DistilBertForSequenceClassification", "DistilBert", TOKENS | LABELS | {"dim": HIDDEN,
            "hidden_dim": 4 * HIDDEN, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64},
            feed_forward=(Pairs(r"ffn\.lin1", r"ffn\.lin2"),), value_output=(Pairs("v_lin", "out_lin"),),
            query_key=(Pairs("q_lin", "k_lin"),)),
    encoder("deberta_v2", "DebertaV2ForSequenceClassification", "DebertaV2", WIDE | LABELS | {
            "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "position_buckets": 16,
            "norm_rel_ebd": "layer_norm", "position_biased_input": False, "max_relative_positions": -1,
            "pooler_hidden_size": HIDDEN},
            **BERT | {"value_output": (Pairs("value_proj", r"attention\.output\.dense"),),
                      "query_key": (Pairs("query_proj", "key_proj", "scores are a sum of three products"),)}),
    encoder("electra", "ElectraForSequenceClassification", "Electra", WIDE | LABELS | {"embedding_size": 32}, **BERT),
    encoder("modernbert", "ModernBertModel", "ModernBert", MODERN, **FUSED),
    encoder("modernbert_classifier", "ModernBertForSequenceClassification", "ModernBert", MODERN | LABELS, **FUSED),
    encoder("mpnet", "MPNetForSequenceClassification", "MPNet", WIDE | LABELS,
            **BERT | {"value_output": (Pairs(r"attn\.v", r"attn\.o"),), "query_key": (Pairs(r"attn\.q", r"attn\.k"),)}),
    encoder("albert", "AlbertForSequenceClassification", "Albert", WIDE | LABELS | {"embedding_size": 32},
            feed_forward=(Pairs("ffn", "ffn_output"),),
            value_output=(Pairs(r"attention\.value", r"attention\.dense"),),
            query_key=(Pairs(r"attention\.query", r"attention\.key"),)),
    encoder("camembert", "CamembertForSequenceClassification", "Camembert", WIDE | LABELS, **BERT),
    encoder("nomic_bert", "NomicBertModel", "NomicBert", WIDE | {"intermediate_size": 2 * HIDDEN},
            feed_forward=(Pairs(r"mlp\.up_proj", r"mlp\.down_proj"),), value_output=(Pairs("v_proj", "o_proj"),),
            query_key=(Pairs("q_proj", "k_proj"),)),
    encoder("roformer", "RoFormerForSequenceClassification", "RoFormer", WIDE | LABELS | {"embedding_size": HIDDEN},
            **BERT),
    encoder("fnet", "FNetForSequenceClassification", "FNet", WIDE | LABELS, feed_forward=BERT["feed_forward"]),
]  # fmt: skip

ENCODER_DECODERS = [
    encoder_decoder("t5", "T5ForConditionalGeneration", "T5", T5, **T5_ATTENTION,
                    feed_forward=(Pairs(r"DenseReluDense\.wi", r"DenseReluDense\.wo"),)),
    encoder_decoder("flan_t5", "T5ForConditionalGeneration", "T5", T5 | {"feed_forward_proj": "gated-gelu",
                    "d_ff": 2 * HIDDEN, "tie_word_embeddings": False}, note="gated, as Flan-T5", **T5_ATTENTION,
                    feed_forward=(Pairs(r"DenseReluDense\.wi_1", r"DenseReluDense\.wo"),)),
    encoder_decoder("bart", "BartForConditionalGeneration", "Bart", BART, **FAIRSEQ),
    encoder_decoder("mbart", "MBartForConditionalGeneration", "MBart", BART, **FAIRSEQ),
    encoder_decoder("marian", "MarianMTModel", "Marian", BART, **FAIRSEQ),
    encoder_decoder("pegasus", "PegasusForConditionalGeneration", "Pegasus", BART, **FAIRSEQ),
    encoder_decoder("m2m_100", "M2M100ForConditionalGeneration", "M2M100", BART, **FAIRSEQ),
    encoder_decoder("whisper", "WhisperForConditionalGeneration", "Whisper", BART | {"num_mel_bins": 16,
                    "max_source_positions": 20, "max_target_positions": 64, "suppress_tokens": None,
                    "begin_suppress_tokens": None}, spectra, **FAIRSEQ),
]  # fmt: skip
