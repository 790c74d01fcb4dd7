"""Causal language models of transformers: dense, mixtures of experts, latent attention, state spaces."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from tests.zoo.entry import HIDDEN, VOCABULARY, Entry, Pairs, plant_, texts

__all__ = ["DECODERS"]

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
LLAMA = TOKENS | {
    "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = EXPERTS | {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip

GATED = Pairs(r"mlp\.up_proj", r"mlp\.down_proj")
STACKED = Pairs(r"experts\.\d+\.up", r"experts\.\d+\.down", stack=r"experts\.down_proj")
VALUE = Pairs("v_proj", "o_proj")
RESCALED = Pairs(r"feed_forward\.key", r"feed_forward\.value", "the model rescales its weights as it runs")
KEY = Pairs("q_proj", "k_proj")
JOINED = Pairs("q_b_proj", "kv_b_proj", "keys are joined with rotary ones that all heads share")
NORMED = Pairs("q_proj", "k_proj", "queries and keys are normalised over each head")
ROTARY = {"feed_forward": (GATED,), "value_output": (VALUE,), "query_key": (KEY,)}
MIXED = ROTARY | {"feed_forward": (STACKED,)}


def decoder(name: str, prefix: str, sizes: dict[str, Any], family: str = "dense", padded: bool = True, **facts: Any):
    """An entry for `<prefix>ForCausalLM` with a `<prefix>Config` of these sizes."""

    config = {"Gemma3": "Gemma3TextConfig", "GPT2LMHead": "GPT2Config"}.get(prefix, f"{prefix}Config")
    model = f"{prefix}Model" if prefix.endswith("LMHead") else f"{prefix}ForCausalLM"

    def build() -> nn.Module:
        return plant_(getattr(transformers, model)(getattr(transformers, config)(**sizes)))

    return Entry(name, family, "decoder", build, texts(padded), generates=True, model_class=model, **facts)


def fused(qkv: str, output: str, first: str, second: str) -> dict[str, Any]:
    """Queries, keys and values in one layer."""
    attention = {"value_output": (Pairs(qkv, output),), "query_key": (Pairs(qkv, qkv),)}
    return attention | {"feed_forward": (Pairs(first, second),)}


GPT2 = TOKENS | {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64}
WIDE = TOKENS | {
    "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NEOX = fused("query_key_value", r"(self_)?attention\.dense", "dense_h_to_4h", "dense_4h_to_h")

DECODERS = [
    decoder("gpt2", "GPT2LMHead", GPT2, **fused(r"attn\.c_attn", r"attn\.c_proj", r"mlp\.c_fc", r"mlp\.c_proj")),
    decoder("llama", "Llama", LLAMA, **ROTARY),
    decoder("llama_tied", "Llama", LLAMA | {"tie_word_embeddings": True}, note="tied head", **ROTARY),
    decoder("mistral", "Mistral", LLAMA | {"sliding_window": 16}, **ROTARY),
    decoder("qwen2", "Qwen2", LLAMA, **ROTARY),
    decoder("qwen3", "Qwen3", LLAMA | HEADS, **ROTARY | {"query_key": (NORMED,)}),
    decoder("gemma", "Gemma", LLAMA | HEADS, **ROTARY),
    decoder("gemma2", "Gemma2", LLAMA | HEADS | {"query_pre_attn_scalar": 16}, **ROTARY),
    decoder("gemma3", "Gemma3", LLAMA | HEADS | {"query_pre_attn_scalar": 16}, **ROTARY | {"query_key": (NORMED,)}),
    decoder("phi", "Phi", LLAMA | {"num_key_value_heads": 4},
            feed_forward=(Pairs("fc1", "fc2"),), value_output=(Pairs("v_proj", r"self_attn\.dense"),),
            query_key=(KEY,)),
    decoder("phi3", "Phi3", LLAMA, **fused("qkv_proj", "o_proj", "gate_up_proj", r"mlp\.down_proj")),
    decoder("opt", "OPT", TOKENS | {"hidden_size": HIDDEN, "word_embed_proj_dim": HIDDEN, "ffn_dim": 4 * HIDDEN,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
            feed_forward=(Pairs("fc1", "fc2"),), value_output=(Pairs("v_proj", "out_proj"),), query_key=(KEY,)),
    decoder("gpt_neox", "GPTNeoX", WIDE, **NEOX),
    decoder("gpt_neo", "GPTNeo", TOKENS | {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4,
            "attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 64},
            feed_forward=(Pairs(r"mlp\.c_fc", r"mlp\.c_proj"),), value_output=(Pairs("v_proj", "out_proj"),),
            query_key=(KEY,)),
    decoder("falcon", "Falcon", TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64}, **NEOX),
    decoder("bloom", "Bloom", TOKENS | {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4}, **NEOX),
    decoder("gptj", "GPTJ", GPT2 | {"rotary_dim": 8}, feed_forward=(Pairs("fc_in", "fc_out"),),
            value_output=(Pairs("v_proj", "out_proj"),), query_key=(KEY,)),
    decoder("codegen", "CodeGen", GPT2 | {"rotary_dim": 8},
            **fused("qkv_proj", "out_proj", r"mlp\.fc_in", r"mlp\.fc_out")),
    decoder("gpt_bigcode", "GPTBigCode", GPT2,
            **fused(r"attn\.c_attn", r"attn\.c_proj", r"mlp\.c_fc", r"mlp\.c_proj")),
    decoder("mpt", "Mpt", TOKENS | {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            **fused(r"attn\.Wqkv", r"attn\.out_proj", r"ffn\.up_proj", r"ffn\.down_proj")),
    decoder("stablelm", "StableLm", LLAMA, **ROTARY),
    decoder("starcoder2", "Starcoder2", LLAMA, **ROTARY | {"feed_forward": (Pairs(r"mlp\.c_fc", r"mlp\.c_proj"),)}),
    decoder("cohere", "Cohere", LLAMA, **ROTARY),
    decoder("glm", "Glm", LLAMA | HEADS, **ROTARY | {"feed_forward": (Pairs("gate_up_proj", r"mlp\.down_proj"),)}),
    decoder("granite", "Granite", LLAMA, **ROTARY),
    decoder("olmo2", "Olmo2", LLAMA, **ROTARY | {"query_key": (NORMED,)}),
    decoder("nemotron", "Nemotron", LLAMA, **ROTARY),
    decoder("mixtral", "Mixtral", LLAMA | LOCAL, "experts", **MIXED),
    decoder("qwen2_moe", "Qwen2Moe", LLAMA | EXPERTS | {"shared_expert_intermediate_size": 2 * HIDDEN}, "experts",
            **MIXED | {"feed_forward": (STACKED, Pairs(r"shared_expert\.up_proj", r"shared_expert\.down_proj"))}),
    decoder("qwen3_moe", "Qwen3Moe", LLAMA | EXPERTS | HEADS, "experts", **MIXED | {"query_key": (NORMED,)}),
    decoder("olmoe", "Olmoe", LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}, "experts",
            **MIXED | {"query_key": (NORMED,)}),
    decoder("gpt_oss", "GptOss", LLAMA | HEADS | LOCAL, "experts", **MIXED),
    decoder("granitemoe", "GraniteMoe", LLAMA | LOCAL, "experts", **MIXED),
    decoder("deepseek_v2", "DeepseekV2", LLAMA | LATENT | {"topk_method": "greedy"}, "latent attention",
            feed_forward=(GATED, STACKED), value_output=(Pairs("kv_b_proj", "o_proj"),),
            query_key=(JOINED,)),
    decoder("deepseek_v3", "DeepseekV3", LLAMA | LATENT | {"n_group": 2, "topk_group": 1}, "latent attention",
            feed_forward=(GATED, STACKED), value_output=(Pairs("kv_b_proj", "o_proj"),),
            query_key=(JOINED,)),
    decoder("mamba", "Mamba", TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8}, "state space",
            padded=False),
    decoder("mamba2", "Mamba2", TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 16,
            "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}, "state space", padded=False),
    decoder("falcon_mamba", "FalconMamba", TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8},
            "state space", padded=False),
    decoder("rwkv", "Rwkv", TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "context_length": 64},
            "state space", padded=False, feed_forward=(RESCALED,)),
    decoder("jamba", "Jamba", LLAMA | {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
            "use_mamba_kernels": False, "mamba_d_state": 8}, "state space", padded=False,
            feed_forward=(Pairs(r"feed_forward\.up_proj", r"feed_forward\.down_proj"), STACKED),
            value_output=(VALUE,), query_key=(KEY,)),
    decoder("recurrent_gemma", "RecurrentGemma", LLAMA | {"num_hidden_layers": 3, "lru_width": HIDDEN,
            "attention_window_size": 32}, "state space", padded=False,
            **ROTARY | {"feed_forward": (Pairs("up_proj", "down_proj"),)}),
]  # fmt: skip
