"""Models of images and of sound."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo.encoders import FAIRSEQ
from tests.zoo.entry import HIDDEN, VOCABULARY, Entry, Pairs, images, plant_, sounds, texts

__all__ = ["AUDIO", "VISION"]

VIT = {
    "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": 5,
}  # fmt: skip
ROWS = {
    "feed_forward": (Pairs("fc1", "fc2"),),
    "value_output": (Pairs("v_proj", "o_proj"),),
    "query_key": (Pairs("q_proj", "k_proj"),),
}
WAV2VEC2 = {
    "vocab_size": 32, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 4 * HIDDEN, "conv_dim": (32, 32), "conv_stride": (8, 4), "conv_kernel": (16, 8),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0,
    "num_feat_extract_layers": 2,
}  # fmt: skip
SPEECH = FAIRSEQ | {"feed_forward": (Pairs("intermediate_dense", "output_dense"),)}


def entry(kind: str, name: str, model: str, config: str, sizes: dict[str, Any], batches: Any, **facts: Any) -> Entry:
    """An entry for a class of transformers."""

    def build() -> nn.Module:
        return plant_(getattr(transformers, model)(getattr(transformers, f"{config}Config")(**sizes)))

    return Entry(name, kind, kind, build, batches, model_class=model, **facts)


def vision(name: str, model: str, config: str, sizes: dict[str, Any], **facts: Any) -> Entry:
    return entry("vision", name, model, config, sizes, images(), **facts)


def audio(name: str, model: str, config: str, sizes: dict[str, Any], **facts: Any) -> Entry:
    return entry("audio", name, model, config, sizes, sounds(), **facts)


def captioned(seed: int, samples: int) -> list[dict[str, torch.Tensor]]:
    """Images and texts, one of each in a sample."""
    pairs = zip(images()(seed, samples), texts()(seed, samples), strict=True)
    return [picture | text for picture, text in pairs]


def spectrograms(seed: int, samples: int) -> list[dict[str, torch.Tensor]]:
    """Pictures of sound, without a channel."""
    return [{"input_values": batch["pixel_values"][:, 0]} for batch in images(channels=1)(seed, samples)]


def clip() -> nn.Module:
    text = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 2,
            "eos_token_id": 3, "projection_dim": 32}  # fmt: skip
    image = {name: value for name, value in VIT.items() if name != "num_labels"} | {"projection_dim": 32}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=32)
    return plant_(transformers.CLIPModel(config))


STAGES = {"hidden_sizes": [32, 64], "depths": [1, 2], "num_labels": 5}

VISION = [
    vision("vit", "ViTForImageClassification", "ViT", VIT, **ROWS),
    vision("deit", "DeiTForImageClassification", "DeiT", VIT, **ROWS),
    vision("dinov2", "Dinov2ForImageClassification", "Dinov2", VIT | {"mlp_ratio": 4}, **ROWS),
    vision("beit", "BeitForImageClassification", "Beit", VIT, **ROWS),
    vision("swin", "SwinForImageClassification", "Swin", {"image_size": 32, "patch_size": 4, "embed_dim": 32,
           "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 5}, **ROWS),
    vision("convnext", "ConvNextForImageClassification", "ConvNext", STAGES | {"num_stages": 2, "patch_size": 4},
           feed_forward=(Pairs("pwconv1", "pwconv2"),)),
    vision("resnet", "ResNetForImageClassification", "ResNet", STAGES | {"embedding_size": 32},
           feed_forward=(Pairs(r"layer\.1\.convolution", r"layer\.2\.convolution"),)),
    vision("mobilenet_v2", "MobileNetV2ForImageClassification", "MobileNetV2", {"depth_multiplier": 0.35,
           "image_size": 32, "num_labels": 5, "depth_divisible_by": 8, "min_depth": 8}, samples=1792,
           feed_forward=(Pairs(r"(conv_3x3|expand_1x1)\.convolution", r"reduce_1x1\.convolution"),)),
    vision("segformer", "SegformerForSemanticSegmentation", "Segformer", {"num_encoder_blocks": 2, "depths": [1, 1],
           "sr_ratios": [2, 1], "hidden_sizes": [32, 64], "patch_sizes": [7, 3], "strides": [4, 2],
           "num_attention_heads": [2, 4], "mlp_ratios": [4, 4], "decoder_hidden_size": 32, "num_labels": 5}, **ROWS),
    Entry("clip", "vision", "vision", clip, captioned, model_class="CLIPModel", **FAIRSEQ),
    vision("clip_vision", "CLIPVisionModelWithProjection", "CLIPVision", {
           name: value for name, value in VIT.items() if name != "num_labels"} | {"projection_dim": 32}, **FAIRSEQ),
    vision("regnet", "RegNetForImageClassification", "RegNet", STAGES | {"embedding_size": 32, "groups_width": 16,
           "layer_type": "x"}, note="grouped convolutions"),
]  # fmt: skip

AUDIO = [
    audio("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2", WAV2VEC2, **SPEECH),
    audio("hubert", "HubertForCTC", "Hubert", WAV2VEC2, **SPEECH),
    audio("wavlm", "WavLMForCTC", "WavLM", WAV2VEC2 | {"num_buckets": 16, "max_bucket_distance": 32}, **SPEECH),
    entry("audio", "audio_spectrogram", "ASTForAudioClassification", "AST", {
          name: value for name, value in VIT.items() if name != "image_size"} | {"num_mel_bins": 32, "max_length": 32,
          "frequency_stride": 8, "time_stride": 8}, spectrograms, **ROWS),
]  # fmt: skip
