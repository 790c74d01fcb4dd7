"""Models in plain PyTorch, and models as other tools leave them: pruned, wrapped, compiled, adapted, quantised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo.decoders import LLAMA, ROTARY
from tests.zoo.entry import HIDDEN, VOCABULARY, Entry, Pairs, images, numbers, plant_, texts

__all__ = ["PLAIN"]

LINEARS = {
    "feed_forward": (Pairs("linear1", "linear2"),),
    "value_output": (Pairs(r"\w+_attn\.v", r"\w+_attn\.out(_proj)?"),),
    "query_key": (Pairs(r"\w+_attn\.q", r"\w+_attn\.(k|in_proj_weight)"),),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16))


HIDDEN_LAYERS = (Pairs("0", "2"), Pairs("2", "4"))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        layer = nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(HIDDEN, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids)))


class Attention(nn.Module):
    """`nn.MultiheadAttention` with a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 128), nn.Linear(128, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x, x, x, need_weights=False)[0]
        return x + self.linear2(torch.relu(self.linear1(x)))


class UNet(nn.Module):
    """Two scales with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = self.block(3, 32), self.block(32, 64)
        self.up, self.join = nn.ConvTranspose2d(64, 32, 2, 2), self.block(64, 32)
        self.head = nn.Conv2d(32, 4, 1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(nn.functional.max_pool2d(first, 2))
        return self.head(self.join(torch.cat([first, self.up(second)], 1)))


class Mixer(nn.Module):
    """Feed-forward pairs over tokens and over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2))
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 128), nn.GELU(), nn.Linear(128, HIDDEN)) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor) -> Tensor:
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


class Tagger(nn.Module):
    """A bidirectional LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0])


class Tied(nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head(x + self.linear2(torch.relu(self.linear1(x)))) / 8


class Shared(nn.Module):
    """One feed-forward pair that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.layer_norm(x + self.linear2(torch.relu(self.linear1(x))), (HIDDEN,))
        return self.head(x)


class AllStates(nn.Module):
    """A head that reads what every layer said, kept in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 128), nn.GELU(), nn.Linear(128, HIDDEN)) for _ in range(3)
        )
        self.head = nn.Linear(3 * HIDDEN, 16)

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for layer in self.layers:
            x = x + layer(x)
            states.append(x)
        return self.head(torch.cat(states, -1))


class AllStatesNamed(AllStates):
    """The same, written with attributes."""

    def forward(self, x: Tensor) -> Tensor:
        self.one = x + self.layers[0](x)
        self.two = self.one + self.layers[1](self.one)
        self.three = self.two + self.layers[2](self.two)
        return self.head(torch.cat([self.one, self.two, self.three], -1))


def weight_norm() -> nn.Module:
    model = plant_(mlp())
    parametrizations.weight_norm(model[0])
    parametrizations.weight_norm(model[2])
    return model


def spectral_norm() -> nn.Module:
    model = plant_(mlp())
    parametrizations.spectral_norm(model[0])
    return model


class Symmetric(nn.Module):
    """A parametrization of the user's."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def parametrized() -> nn.Module:
    model = plant_(mlp())
    parametrize.register_parametrization(model[2], "weight", Symmetric())
    return model


def pruned() -> nn.Module:
    model = plant_(mlp())
    for i in (0, 2):
        prune.l1_unstructured(model[i], "weight", amount=0.3)
    return model


def compiled() -> nn.Module:
    return torch.compile(plant_(mlp()), backend="eager")  # type: ignore[return-value]


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(plant_(mlp()).eval())


def parallel() -> nn.Module:
    return nn.DataParallel(plant_(mlp()))


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    """As `from_pretrained(dtype=…)` makes it: buffers of positions stay in float32."""
    return plant_(transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**LLAMA), dtype=dtype))


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # 0 at first, which would be no adapter
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=rng))
    return model


def quantised() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = plant_(mlp())
    quantize_(model, Int8WeightOnlyConfig())
    return model


def plain(name: str, build: Callable[[], nn.Module], batches: Any, planted: bool = True, **facts: Any) -> Entry:
    """planted: the weights still have to be."""
    return Entry(name, "PyTorch", "plain", (lambda: plant_(build())) if planted else build, batches, **facts)


def llama_as(name: str, build: Callable[[], nn.Module], note: str) -> Entry:
    """A Llama in another form."""
    known = {"model_class": "LlamaForCausalLM", "note": note, "generates": True}
    return Entry(name, "dense", "decoder", build, texts(), **known, **ROTARY)


def words(seed: int, samples: int) -> list[Tensor]:
    """Token numbers as a positional argument."""
    return [batch["input_ids"] for batch in texts(padded=False)(seed, samples)]


def pictures(seed: int, samples: int) -> list[Tensor]:
    """Images as a positional argument."""
    return [batch["pixel_values"] for batch in images()(seed, samples)]


VECTORS, SEQUENCES = numbers(HIDDEN), numbers(16, HIDDEN)

PLAIN = [
    plain("mlp", mlp, VECTORS, feed_forward=HIDDEN_LAYERS),
    plain("nn_transformer_encoder", Encoder, words, own_code=True, **LINEARS),
    plain(
        "nn_transformer",
        lambda: nn.Transformer(HIDDEN, 4, 2, 2, 4 * HIDDEN, batch_first=True),
        numbers(12, HIDDEN, parts=2),
        own_code=True,
        **LINEARS,
    ),
    plain("nn_multihead_attention", Attention, SEQUENCES, own_code=True, **LINEARS),
    plain(
        "unet", UNet, pictures, own_code=True, feed_forward=(Pairs(r"(down1|down2|join)\.0", r"(down1|down2|join)\.3"),)
    ),
    plain("mixer", Mixer, SEQUENCES, own_code=True, feed_forward=(Pairs(r"\d+\.0", r"\d+\.2"),)),
    plain("bidirectional_lstm", Tagger, words, own_code=True),
    plain("tied_head", Tied, words, own_code=True, feed_forward=LINEARS["feed_forward"]),
    plain("shared_layers", Shared, SEQUENCES, own_code=True, feed_forward=LINEARS["feed_forward"]),
    plain("all_states", AllStates, SEQUENCES, own_code=True, feed_forward=(Pairs(r"\d+\.0", r"\d+\.2"),)),
    plain("all_states_named", AllStatesNamed, SEQUENCES, own_code=True, feed_forward=(Pairs(r"\d+\.0", r"\d+\.2"),)),
    plain("weight_norm", weight_norm, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    plain("spectral_norm", spectral_norm, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    plain("parametrized", parametrized, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    plain("torch_prune", pruned, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    plain("torch_compile", compiled, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    plain("torchscript", scripted, VECTORS, planted=False, feed_forward=HIDDEN_LAYERS),
    plain("data_parallel", parallel, VECTORS, planted=False, own_code=True, feed_forward=HIDDEN_LAYERS),
    llama_as("llama_bf16", lambda: llama(torch.bfloat16), "bfloat16"),
    llama_as("llama_f16", lambda: llama(torch.float16), "float16"),
    llama_as("llama_lora", adapted, "with a LoRA adapter of peft"),
    plain("torchao_int8", quantised, VECTORS, planted=False, needs="torchao", feed_forward=HIDDEN_LAYERS),
]
