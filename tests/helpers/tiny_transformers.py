"""Tiny models of transformers with random weights, by architecture, and batches that they take."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 96
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = TOKENS | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 80,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
SHORT = TOKENS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
BOTH = TOKENS | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "decoder_start_token_id": 2,
}  # fmt: skip
PICTURES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
SOUNDS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 32,
    "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DECODERS = {  # name: (class, configuration)
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", SHORT),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 16, "sliding_window": 6}),
    "gemma3": ("Gemma3ForCausalLM", GROUPED | {
        "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3ForCausalLM", GROUPED),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXForCausalLM", SIZES),
    "falcon": ("FalconForCausalLM", SIZES | {"ffn_hidden_size": 128}),
    "bloom": ("BloomForCausalLM", TOKENS | {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", SHORT | {"rotary_dim": 8}),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", SIZES | EXPERTS | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}),
}  # fmt: skip
STATES = {  # what they carry on is not keys and values
    "mamba": ("MambaForCausalLM", TOKENS | {"hidden_size": 64, "num_hidden_layers": 2}),
    "rwkv": ("RwkvForCausalLM", TOKENS | {"hidden_size": 64, "num_hidden_layers": 2, "attention_hidden_size": 64}),
}
ENCODERS = {
    "bert": ("BertModel", SIZES),
    "bert_classifier": ("BertForSequenceClassification", SIZES),
    "roberta": ("RobertaForMaskedLM", SIZES),
    "distilbert": ("DistilBertModel", TOKENS | {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}),
    "deberta_v2": ("DebertaV2Model", SIZES | {
        "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]}),
    "electra": ("ElectraModel", SIZES),
    "modernbert": ("ModernBertModel", SIZES | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "mpnet": ("MPNetModel", SIZES),
    "albert": ("AlbertModel", SIZES | {"embedding_size": 32}),
}  # fmt: skip
ENCODER_DECODERS = {
    "t5": ("T5ForConditionalGeneration", TOKENS | {
        "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}),
    "bart": ("BartForConditionalGeneration", BOTH),
    "marian": ("MarianMTModel", BOTH),
    "whisper": ("WhisperForConditionalGeneration", BOTH | {
        "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 40, "suppress_tokens": [],
        "begin_suppress_tokens": []}),
}  # fmt: skip
VISION = {
    "vit": ("ViTForImageClassification", PICTURES),
    "dinov2": ("Dinov2Model", {key: value for key, value in PICTURES.items() if key != "intermediate_size"}),
    "swin": ("SwinModel", {
        "image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}),
    "convnext": ("ConvNextModel", {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", {"image_size": 32, "depth_multiplier": 0.35}),
    "segformer": ("SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32}),
    "clip": ("CLIPModel", {"text_config": SIZES, "vision_config": PICTURES, "projection_dim": 32}),
}  # fmt: skip
AUDIO = {"wav2vec2": ("Wav2Vec2ForCTC", SOUNDS), "hubert": ("HubertModel", SOUNDS)}
FAMILIES = (DECODERS, STATES, ENCODERS, ENCODER_DECODERS, VISION, AUDIO)
MODELS = {name: spec for family in FAMILIES for name, spec in family.items()}


def build(name):
    """The model in evaluation mode, the same each time."""
    torch.manual_seed(0)
    kind = getattr(transformers, MODELS[name][0])
    return kind(kind.config_class(**MODELS[name][1])).eval()


def texts(count, length, padding=0, seed=0):
    """Tokens and their mask; the first text ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(count, length, dtype=torch.long)
    mask[0, length - padding :] = 0
    return {
        "input_ids": torch.randint(3, VOCABULARY, (count, length), generator=generator) * mask,
        "attention_mask": mask,
    }


def batches(name):
    """Two batches of different sizes."""
    sizes = ((3, 9), (2, 13))
    if name in VISION or name in AUDIO:
        shapes = [(count, 3, 32, 32) if name in VISION else (count, 90 * length) for count, length in sizes]
        key = "pixel_values" if name in VISION else "input_values"
        made = [{key: torch.randn(shape, generator=torch.Generator().manual_seed(1))} for shape in shapes]
        return made if name != "clip" else [texts(*size) | batch for size, batch in zip(sizes, made, strict=True)]
    made = [texts(count, length, padding) for (count, length), padding in zip(sizes, (2, 0), strict=True)]
    if name == "whisper":
        made = [{"input_features": torch.randn(count, 16, 40)} for count, _ in sizes]
    if name in ENCODER_DECODERS:
        answers = [texts(count, length, seed=1)["input_ids"] for count, length in ((3, 7), (2, 5))]
        made = [batch | {"decoder_input_ids": answer} for batch, answer in zip(made, answers, strict=True)]
    return made
