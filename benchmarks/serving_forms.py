"""Small models in which each form of the paper is planted, to be cut and served: see `ray_scenarios` and `serving_ray`.

A model that is not made of PyTorch's usual modules is served with an instance of it: `into`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import crystallite as cx
from crystallite.models.manifest import attach_verdict

__all__ = ["FORMS", "Form", "save_form"]


@dataclass(frozen=True)
class Form:
    """A model, what it is called with, and how many services it is cut into where a hop costs nothing."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]  # so many samples
    pieces: int
    own_code: bool = True
    feed_forward: str | None = None


def labels(size: int, groups: int, seed: int) -> Tensor:
    return torch.arange(size)[torch.randperm(size, generator=torch.Generator().manual_seed(seed))] % groups


@torch.no_grad()
def plant_(weight: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Keep of a weight what joins a row and a column of one label."""
    kept = rows[:, None] == columns
    weight *= kept.view(*kept.shape, *[1] * (weight.ndim - 2))


def chain() -> nn.Module:
    """Two layers, each of blocks of its own, so that R stands between them."""
    torch.manual_seed(0)
    first, second = nn.Linear(24, 36), nn.Linear(36, 18)
    plant_(first.weight, labels(36, 3, 1), labels(24, 3, 2))
    plant_(second.weight, labels(18, 2, 3), labels(36, 2, 4))
    return nn.Sequential(first, nn.GELU(), second).eval()


def channels() -> nn.Module:
    """A feed-forward pair with blocks in each of its two channels only."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 32), nn.Linear(32, 16)
    for q in range(2):
        mine = slice(16 * q, 16 * q + 16)
        plant_(first.weight[mine], labels(16, 2, 10 + q), labels(16, 2, 20 + q))
        plant_(second.weight[:, mine], labels(16, 2, 30 + q), labels(16, 2, 40 + q))
    return nn.Sequential(first, nn.GELU(), second).eval()


class Encoder(nn.Module):
    """A transformer whose feed-forward layers fall into four blocks."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
        hidden, outer = labels(32, 4, 1), labels(16, 4, 2)
        plant_(layer.linear1.weight, hidden, outer)
        plant_(layer.linear2.weight, outer, hidden)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return y


class Recurrent(nn.Module):
    """A GRU of three weak components; whoever streams a sequence keeps the state and sends it with the next part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(12, 99, batch_first=True)
        units = labels(99, 3, 1)
        plant_(self.gru.weight_hh_l0, units.repeat(3), units)
        plant_(self.gru.weight_ih_l0, units.repeat(3), labels(12, 3, 2))

    def forward(self, steps: Tensor, state: Tensor) -> dict[str, Tensor]:
        output, last = self.gru(steps, state[None])
        return {"output": output, "last": last[0]}


class Convolutional(nn.Module):
    """A convolution of three blocks of channels, and a head that joins them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(6, 12, 3, padding=1), nn.Linear(12, 5)
        plant_(self.conv.weight, labels(12, 3, 1), labels(6, 3, 2))

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.conv(image)).mean((-2, -1)))
        return y


def mixture() -> nn.Module:
    """A tiny Mixtral of four experts, in whose layers blocks are planted."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    experts = model.model.layers[0].mlp.experts
    hidden, outer = labels(64, 2, 1), labels(32, 2, 2)
    for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        plant_(gate_up, torch.cat([hidden, hidden]), outer)
        plant_(down, outer, hidden)
    return model


def bert() -> nn.Module:
    """A tiny BERT whose feed-forward layers fall into four blocks."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = BertModel(config).eval()
    hidden, outer = labels(64, 4, 1), labels(32, 4, 2)
    plant_(model.encoder.layer[0].intermediate.dense.weight, hidden, outer)
    plant_(model.encoder.layer[0].output.dense.weight, outer, hidden)
    return model


def _numbers(name: str, *shape: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: {name: torch.randn(samples, *shape)}


def _tokens(name: str, length: int = 7) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: {name: torch.randint(3, 50, (samples, length))}


FORMS = {
    "chain with R": Form(chain, _numbers("input", 24), 3 + 2, own_code=False),
    "channels": Form(channels, _numbers("input", 16), 4 + 4, own_code=False, feed_forward="channels"),
    "encoder": Form(lambda: Encoder().eval(), _tokens("tokens"), 4 + 4),
    "GRU": Form(lambda: Recurrent().eval(), lambda n: {"steps": torch.randn(n, 5, 12), "state": torch.randn(n, 99)}, 3),
    "convolution": Form(lambda: Convolutional().eval(), _numbers("image", 6, 8, 8), 3),
    "BERT": Form(bert, _tokens("input_ids"), 4 + 4, own_code=False),
    "Mixtral": Form(mixture, _tokens("input_ids"), 4, own_code=False),
}


def save_form(name: str, path: Path) -> Path:
    """The model, reorganized and saved with a verdict."""
    form = FORMS[name]
    small = cx.reorganize(
        form.build(),
        level=None,
        only_if_faster=False,
        fold=False,
        feed_forward=form.feed_forward,  # type: ignore
    )
    cx.save(small, path, example=form.inputs(2) if form.own_code else None)
    attach_verdict(path, {"passed": True, "reasons": ["planted"]})
    return path
