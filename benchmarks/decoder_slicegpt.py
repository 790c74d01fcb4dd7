"""SliceGPT (Ashkboos et al. 2024) for Llama-like decoders: a narrower residual stream, in its principal directions.

Norms lose their weights to the matrices behind them, after which they do not notice a rotation. Every half of a layer
gets a rotation of its own, from the signals of the model as it is cut so far; what is left of one rotation times the
next stands in the shortcut, and is counted.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoder_peers import linear
from benchmarks.decoder_tasks import layer_weights


class PlainNorm(nn.Module):
    """Root-mean-square norm without weights; the mean is over the width before it was cut."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = width, eps

    def forward(self, x: Tensor) -> Tensor:
        square = x.float().square().sum(-1, keepdim=True) / self.width
        return (x * torch.rsqrt(square + self.eps)).to(x.dtype)


class SlicedLayer(nn.Module):
    """A decoder layer whose shortcuts turn from one basis to the next."""

    def __init__(self, layer: Any, norm: PlainNorm) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.norm = layer.self_attn, layer.mlp, norm
        width = layer.mlp.down_proj.out_features
        self.shortcuts = nn.ModuleList(linear(torch.eye(width)) for _ in range(2))

    def attend(self, x: Tensor, **rest: Any) -> Tensor:
        return self.shortcuts[0](x) + self.self_attn(hidden_states=self.norm(x), **rest)[0]

    def think(self, x: Tensor) -> Tensor:
        return self.shortcuts[1](x) + self.mlp(self.norm(x))

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        return self.think(self.attend(hidden_states, **rest))


def sliced_width(model: Any, share: float) -> int:
    """The width of the stream at which the layers, with their shortcuts, have this share of the weights."""
    layers = len(model.model.layers)
    per_width = layer_weights(model) / layers / model.config.hidden_size
    # per_width · n + 2 n² = share · per_width · width
    target = share * per_width * model.config.hidden_size
    return int((-per_width + (per_width**2 + 8 * target) ** 0.5) / 4)


@torch.no_grad()
def slicegpt(model: Any, windows: Tensor, share: float, width: int | None = None, batch: int = 4) -> nn.Module:
    """The sliced model. width: of the stream, instead of what the share gives."""
    small: Any = copy.deepcopy(model)
    kept = sliced_width(model, share) if width is None else width
    body = small.model
    norm = PlainNorm(model.config.hidden_size, model.config.rms_norm_eps)
    for layer in body.layers:
        for gain, readers in (
            (layer.input_layernorm.weight, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
            (layer.post_attention_layernorm.weight, (layer.mlp.gate_proj, layer.mlp.up_proj)),
        ):
            for reader in readers:
                reader.weight = nn.Parameter(reader.weight * gain)
    small.lm_head = linear(small.lm_head.weight * body.norm.weight)
    body.norm = norm
    body.layers = nn.ModuleList(SlicedLayer(layer, norm) for layer in body.layers)
    signals = [body.embed_tokens(some) for some in windows.split(batch)]
    places = torch.arange(windows.shape[1])[None]
    rest = {"position_embeddings": body.rotary_emb(signals[0], places), "attention_mask": None}
    turn = _principal(signals)[:, :kept]
    body.embed_tokens = nn.Embedding.from_pretrained(body.embed_tokens.weight @ turn)
    signals = [x @ turn for x in signals]
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        steps = (
            (0, (attention.q_proj, attention.k_proj, attention.v_proj), attention.o_proj, layer.attend, rest),
            (1, (mlp.gate_proj, mlp.up_proj), mlp.down_proj, layer.think, {}),
        )
        for number, readers, writer, run, given in steps:
            for reader in readers:
                _set_(reader, reader.weight @ turn)
            layer.shortcuts[number] = linear(turn)  # back to the basis that the writer still has
            signals = [run(x, **given) for x in signals]
            following = _principal(signals)[:, :kept]
            layer.shortcuts[number] = linear(following.T @ turn)
            _set_(writer, following.T @ writer.weight)
            signals, turn = [x @ following for x in signals], following
    small.lm_head = linear(small.lm_head.weight @ turn)
    small.config.tie_word_embeddings = False
    return small


def _set_(layer: nn.Linear, weight: Tensor) -> None:
    layer.weight = nn.Parameter(weight.contiguous())
    layer.out_features, layer.in_features = weight.shape


def _principal(signals: list[Tensor]) -> Tensor:
    """(width, width) eigenvectors of Σ xxᵀ, the largest first."""
    gram = sum((x.flatten(0, -2).T @ x.flatten(0, -2)).double() for x in signals)
    return torch.linalg.eigh(gram).eigenvectors.flip(1).float()
