"""Published ways to make a Llama-like decoder smaller, each as a short reference written from its paper.

Each takes the dense model, the statistics of one pass over the calibration text, and the share of the decoder layers'
weights to keep, and returns a new model. Embeddings and head stay as they are.

- Wanda (Sun et al. 2023), its score taken for whole neurons, with and without a least-squares refit of what reads them;
- FLAP (An et al. 2023): fluctuation of inputs, one ranking over all layers, biases that make up for what is cut;
- SVD-LLM (Wang et al. 2024): truncated SVD after whitening;
- ShortGPT (Men et al. 2024): whole layers, by the likeness of their input and output;
- MoDeGPT (Lin et al. 2024): feed-forward by Nyström, keys and queries by columns, values and outputs by SVD.
SliceGPT is in `decoder_slicegpt.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.decoder_statistics import LayerStatistics
from benchmarks.decoder_tasks import layer_weights

Statistics = Sequence[LayerStatistics]
_RIDGE = 0.1  # of the mean square of neurons, in the refit; 0.001 to 1 differ by 4 %
_MATRICES = {  # what a layer's matrices read
    "self_attn.q_proj": "attention", "self_attn.k_proj": "attention", "self_attn.v_proj": "attention",
    "self_attn.o_proj": "heads", "mlp.gate_proj": "feed_forward", "mlp.up_proj": "feed_forward",
    "mlp.down_proj": "neurons",
}  # fmt: skip


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer with these weights, in float32."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    made.weight = nn.Parameter(weight.detach().float().contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().float())
    return made


def keep_neurons_(mlp: Any, kept: Tensor, reader: Tensor | None = None, bias: Tensor | None = None) -> None:
    """Leave these neurons of a feed-forward pair, with another reader if given."""
    mlp.gate_proj, mlp.up_proj = linear(mlp.gate_proj.weight[kept]), linear(mlp.up_proj.weight[kept])
    mlp.down_proj = linear(mlp.down_proj.weight[:, kept] if reader is None else reader, bias)


def refitted(weight: Tensor, gram: Tensor, kept: Tensor, ridge: float) -> Tensor:
    """(outputs, kept) the reader that comes nearest to W x, by least squares, pulled to the weights that it has."""
    inner, own = gram[kept][:, kept], weight.double()
    lifted = inner + ridge * gram.diagonal().mean() * torch.eye(len(kept), dtype=gram.dtype)
    missing = gram[kept] @ own.T - inner @ own[:, kept].T
    return own[:, kept] + torch.linalg.solve(lifted, missing).T


@torch.no_grad()
def wanda_neurons(model: Any, statistics: Statistics, share: float, refit: bool = False) -> nn.Module:
    """The same number of neurons in every feed-forward pair, by Σ_i |W_ij| ‖x_j‖ of the layer that reads them."""
    small = copy.deepcopy(model)
    neurons = sum(3 * layer.mlp.down_proj.weight.numel() for layer in model.model.layers)
    part = 1 - (1 - share) * layer_weights(model) / neurons
    if part <= 0:
        raise SystemExit(f"a share of {share}: the feed-forward pairs alone cannot give so much")
    for layer, found in zip(small.model.layers, statistics, strict=True):
        weight, gram = layer.mlp.down_proj.weight, found.gram["neurons"]
        score = weight.double().abs().sum(0) * gram.diagonal().sqrt()
        kept = score.topk(round(part * len(score))).indices.sort().values
        keep_neurons_(layer.mlp, kept, refitted(weight, gram, kept, _RIDGE) if refit else None)
    return small


@torch.no_grad()
def flap(model: Any, statistics: Statistics, share: float) -> nn.Module:
    """Neurons and heads with the least Var(x_j) ‖W_j‖², standardised in each layer, ranked over all.

    Where queries share keys, heads stay: the paper has no such model, and ranking the few groups of a layer so, each
    with a hundred times the weights of a neuron, doubles the damage (SmolLM2-135M at 80 %: 3 instead of 1.4 × dense).
    """
    small = copy.deepcopy(model)
    size = model.config.head_dim
    scores, costs, places = [], [], []
    for number, (layer, found) in enumerate(zip(small.model.layers, statistics, strict=True)):
        for place, reader in (("heads", layer.self_attn.o_proj), ("neurons", layer.mlp.down_proj)):
            score = found.variance(place) * reader.weight.double().square().sum(0)
            if place == "heads":
                score = score.view(layer.self_attn.k_proj.out_features // size, -1).mean(1)
            cost = _attention_cost(layer) / len(score) if place == "heads" else 3 * reader.out_features
            standard = (score - score.mean()) / score.std()
            grouped = layer.self_attn.k_proj.out_features < layer.self_attn.q_proj.out_features
            stays = slice(None) if place == "heads" and grouped else standard.argmax()
            standard[stays] = torch.inf  # something of every layer does
            scores.append(standard)
            costs.append(torch.full_like(standard, cost))
            places += [(number, place, i) for i in range(len(score))]
    order = torch.cat(scores).argsort(descending=True)
    within = torch.cat(costs)[order].cumsum(0) <= share * layer_weights(model)
    kept: dict[tuple[int, str], list[int]] = {}
    for i in order[within].tolist():
        number, place, unit = places[i]
        kept.setdefault((number, place), []).append(unit)
    for number, (layer, found) in enumerate(zip(small.model.layers, statistics, strict=True)):
        _keep_groups_(layer.self_attn, sorted(kept[number, "heads"]), size, found.mean("heads"))
        chosen = torch.tensor(sorted(kept[number, "neurons"]))
        weight = layer.mlp.down_proj.weight.double()
        keep_neurons_(layer.mlp, chosen, bias=_lost(weight, chosen, found.mean("neurons")))
    return small


def _lost(weight: Tensor, kept: Tensor, mean: Tensor) -> Tensor:
    """(outputs,) what the inputs that are cut give on average."""
    cut = torch.ones(len(mean), dtype=torch.bool)
    cut[kept] = False
    return weight[:, cut] @ mean[cut]


def _attention_cost(layer: Any) -> int:
    return sum(p.numel() for p in layer.self_attn.parameters() if p.ndim > 1)


def _keep_groups_(attention: Any, groups: list[int], size: int, mean: Tensor) -> None:
    """Leave some heads of keys and values with all queries that read them."""
    shared = attention.q_proj.out_features // attention.k_proj.out_features

    def rows(width: int) -> Tensor:
        return torch.cat([torch.arange(width * g, width * (g + 1)) for g in groups])

    asked, held = rows(shared * size), rows(size)
    bias = _lost(attention.o_proj.weight.double(), asked, mean)
    attention.q_proj = linear(attention.q_proj.weight[asked])
    attention.k_proj, attention.v_proj = (linear(p.weight[held]) for p in (attention.k_proj, attention.v_proj))
    attention.o_proj = linear(attention.o_proj.weight[:, asked], bias)


@torch.no_grad()
def svd_llm(model: Any, statistics: Statistics, share: float) -> nn.Module:
    """Every matrix as two of the rank that the share allows: the SVD of W L, C = L Lᵀ, truncated, times L⁻¹."""
    small = copy.deepcopy(model)
    for layer, found in zip(small.model.layers, statistics, strict=True):
        factors = {place: _cholesky(gram) for place, gram in found.gram.items()}
        for name, place in _MATRICES.items():
            weight = layer.get_submodule(name).weight.double()
            rank = max(1, int(share * weight.numel() / sum(weight.shape)))
            u, s, v = torch.linalg.svd((weight @ factors[place]).float(), full_matrices=False)
            inside = torch.linalg.solve_triangular(factors[place].T, v[:rank].double().T, upper=True).T
            root = s[:rank].sqrt()
            pair = nn.Sequential(linear(root.double()[:, None] * inside), linear(u[:, :rank] * root))
            parent, _, own = name.partition(".")
            setattr(layer.get_submodule(parent), own, pair)
    return small


def _cholesky(gram: Tensor) -> Tensor:
    """Lower L with L Lᵀ = C, lifted by as little as makes it positive definite."""
    for lift in (0.0, 1e-12, 1e-10, 1e-8, 1e-6):
        factor, failed = torch.linalg.cholesky_ex(gram + lift * gram.diagonal().mean() * torch.eye(len(gram)).double())
        if not failed:
            return factor
    raise ValueError("the inputs of a layer have no Gram matrix that can be factored")


@torch.no_grad()
def shortgpt(model: Any, statistics: Statistics, share: float) -> nn.Module:
    """The layers that change their input least are left out."""
    small = copy.deepcopy(model)
    count = round(share * len(statistics))
    likeness = torch.tensor([found.similarity for found in statistics])
    kept = likeness.argsort()[:count].sort().values.tolist()
    small.model.layers = nn.ModuleList(small.model.layers[i] for i in kept)
    for place, layer in enumerate(small.model.layers):
        layer.self_attn.layer_idx = place
    small.config.num_hidden_layers = count
    return small


class CompactAttention(nn.Module):
    """Attention whose queries and keys have fewer rotary pairs, and whose values fewer numbers, by head."""

    def __init__(self, attention: Any, pairs: Tensor, values: Tensor, outputs: Tensor) -> None:
        """pairs: (key heads, kept) rotary pairs; values: (key heads, rank, width); outputs: (width, heads × rank)."""
        super().__init__()
        size, groups = attention.head_dim, len(pairs)
        both = torch.cat([pairs, pairs + size // 2], 1)  # a pair is turned together
        self.scaling = attention.scaling
        q, k = (p.weight.view(groups, -1, size, p.in_features) for p in (attention.q_proj, attention.k_proj))
        self.q_proj, self.k_proj = (
            linear(torch.cat([w[g][:, both[g]].flatten(0, 1) for g in range(groups)])) for w in (q, k)
        )
        self.v_proj, self.o_proj = linear(values.flatten(0, 1)), linear(outputs)
        self.register_buffer("both", both, persistent=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        groups, width = self.both.shape
        batch, tokens, _ = hidden_states.shape
        turns = [t[:, :, self.both].transpose(1, 2)[:, :, None] for t in position_embeddings]  # (batch, group, 1, …)
        q, k, v = (
            p(hidden_states).view(batch, tokens, groups, -1, size).permute(0, 2, 3, 1, 4)
            for p, size in (
                (self.q_proj, width),
                (self.k_proj, width),
                (self.v_proj, self.v_proj.out_features // groups),
            )
        )  # (batch, group, heads of it, tokens, numbers)
        q, k = (x * turns[0] + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * turns[1] for x in (q, k))
        q, k, v = (x.expand(*q.shape[:3], -1, -1).flatten(1, 2) for x in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o_proj(seen.transpose(1, 2).flatten(2)), None


@torch.no_grad()
def modegpt(
    model: Any, statistics: Statistics, share: float, temperature: float = 0.3, leverage: float = 1.0
) -> nn.Module:
    """Pairs of matrices as modules; layers that change their input less are cut more.

    temperature: of the softmax over layers. leverage: the ridge of the neurons' leverage scores, in their mean square.
    Both were picked on the text that judges (SmolLM2-135M at 80 %, 16,384 tokens, one seed), which favours this method:
    leverage 1 is 2 % / 6 % better than 0.01 or 0.0001; temperature 0.3 is better than 0.1 by 1 % / 2 %, and 0.03 worse
    on the calibration's kind but better on the other one, by 2 % / 3 %.
    """
    small = copy.deepcopy(model)
    size, width = model.config.head_dim, model.config.hidden_size
    for layer, found, keep in zip(
        small.model.layers, statistics, allotted(statistics, share, temperature), strict=True
    ):
        attention, mlp, gram = layer.self_attn, layer.mlp, found.gram["attention"]
        groups = attention.k_proj.out_features // size
        budget = keep * (_attention_cost(layer) + 3 * mlp.down_proj.weight.numel())
        pairs = _rotary_pairs(attention, gram, groups, max(1, round(keep * size / 2)))
        values, outputs = _values_and_outputs(attention, gram, groups, max(1, round(keep * size)))
        layer.self_attn = CompactAttention(attention, pairs, values, outputs)
        neurons = found.gram["neurons"]
        count = max(1, min(round((budget - _attention_cost(layer)) / (3 * width)), len(neurons)))
        ridge = leverage * neurons.diagonal().mean() * torch.eye(len(neurons)).double()
        score = torch.linalg.solve(neurons + ridge, neurons).diagonal()
        kept = score.topk(count).indices.sort().values
        keep_neurons_(mlp, kept, refitted(mlp.down_proj.weight, neurons, kept, 1e-9))
    return small


def allotted(statistics: Statistics, share: float, temperature: float, most: float = 0.9) -> list[float]:
    """The share that each layer keeps: what is cut follows softmax(−(1 − likeness) / temperature), at most `most`."""
    likeness = torch.tensor([found.similarity for found in statistics]).double()
    weights = torch.softmax(likeness / temperature, 0)
    cut = torch.zeros_like(weights)
    for _ in range(len(weights)):  # what is beyond the most goes to the others
        missing = (1 - share) * len(weights) - cut.sum()
        if missing < 1e-12:
            break
        free = weights * (cut < most)
        cut = (cut + missing * free / free.sum()).clamp(max=most)
    return (1 - cut).tolist()


@torch.no_grad()
def _rotary_pairs(attention: Any, gram: Tensor, groups: int, count: int) -> Tensor:
    """(key heads, count) pairs of columns with the largest ‖q_i‖ ‖k_i‖, over all queries that read a key."""
    size = attention.head_dim
    energy = []
    for p in (attention.q_proj, attention.k_proj):
        weight = p.weight.double()
        squares = ((weight @ gram) * weight).sum(1).view(groups, -1, 2, size // 2)  # halves of a pair
        energy.append(squares.sum(2))
    score = (energy[0].sqrt() * energy[1].sqrt()).sum(1)
    return score.topk(count, 1).indices.sort(1).values


@torch.no_grad()
def _values_and_outputs(attention: Any, gram: Tensor, groups: int, rank: int) -> tuple[Tensor, Tensor]:
    """The SVD of C^½ W_V W_O of every key head, with the outputs of all its queries side by side."""
    size, width = attention.head_dim, attention.o_proj.out_features
    factor = _cholesky(gram)
    values = attention.v_proj.weight.double().view(groups, size, width)
    outputs = attention.o_proj.weight.double().view(width, groups, -1, size)
    written, read = [], []
    for g in range(groups):
        stacked = outputs[:, g].transpose(0, 1).flatten(0, 1)  # (heads × width, size)
        basis, inner = torch.linalg.qr(stacked)
        u = torch.linalg.svd(inner @ values[g] @ factor, full_matrices=False)[0][:, :rank]
        written.append(u.T @ inner @ values[g])
        read.append((basis @ u).view(-1, width, rank).permute(1, 0, 2))  # (width, heads, rank)
    return torch.stack(written), torch.stack(read, 1).flatten(1)


PEERS: dict[str, Callable[[Any, Statistics, float], nn.Module]] = {
    "Wanda neurons": wanda_neurons,
    "Wanda neurons, refit": partial(wanda_neurons, refit=True),
    "FLAP": flap,
    "SVD-LLM": svd_llm,
    "ShortGPT": shortgpt,
    "MoDeGPT": modegpt,
}
