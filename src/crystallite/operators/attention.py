"""`ExpandedAttention`: `nn.MultiheadAttention` with its four projections as layers of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidMatrix, InvalidOption
from crystallite.operators.low_rank import linear_layer

__all__ = ["ExpandedAttention"]

_PROJECTIONS = ("q", "k", "v", "out")


class ExpandedAttention(nn.Module):
    """The drop-in for `nn.MultiheadAttention` whose projections `q`, `k`, `v` and `out` are layers that really run.

    Arguments, results and masks are those of the module replaced. Each projection is an `nn.Linear` or what takes its
    place; heads may hand on fewer numbers than they had, while scores are scaled as they were. PyTorch's code that asks
    for `in_proj_weight`, `out_proj` and the like finds them, put together when asked for.

    >>> dense = nn.MultiheadAttention(8, 2).eval()
    >>> attention = ExpandedAttention.from_dense(dense)
    >>> x = torch.randn(5, 1, 8)
    >>> torch.allclose(attention(x, x, x)[0], dense(x, x, x)[0], atol=1e-6)
    True
    >>> attention
    ExpandedAttention(
      heads=2, dropout=0.0, batch_first=False
      (q): Linear(in_features=8, out_features=8, bias=True)
      (k): Linear(in_features=8, out_features=8, bias=True)
      (v): Linear(in_features=8, out_features=8, bias=True)
      (out): Linear(in_features=8, out_features=8, bias=True)
    )
    """

    bias_k = bias_v = None  # PyTorch's code asks for them
    add_zero_attn = False

    def __init__(
        self, q: nn.Module, k: nn.Module, v: nn.Module, out: nn.Module, num_heads: int, head_dim: int,
        dropout: float = 0.0, batch_first: bool = False,
    ) -> None:  # fmt: skip
        """Args:
        q, k, v: the layers that read queries, keys and values.
        out: the layer that reads all heads.
        num_heads: into how many heads what q, k and v write is cut.
        head_dim: numbers of a head in the original, by which scores are scaled.
        dropout: probability with which a weight of attention is dropped in training.
        batch_first: inputs are (batch, positions, features), not (positions, batch, features).
        """
        super().__init__()
        self.q, self.k, self.v, self.out = q, k, v, out
        self.num_heads, self.head_dim, self.dropout, self.batch_first = num_heads, head_dim, dropout, batch_first
        written: list[Any] = [layer.out_features for layer in (q, k, v)]
        if written[0] != written[1] or written[2] != out.in_features or any(size % num_heads for size in written):
            pairs = zip(_PROJECTIONS, (q, k, v, out), strict=True)
            sizes = ", ".join(f"{name} {layer.in_features} → {layer.out_features}" for name, layer in pairs)
            raise InvalidMatrix(f"expected projections that fit each other and {num_heads} heads, got {sizes}")

    @staticmethod
    def obstacle(module: nn.MultiheadAttention) -> str:
        """Why a module cannot be expanded, in words; "" if it can."""
        if type(module) is not nn.MultiheadAttention:
            return f"{type(module).__name__} is a MultiheadAttention with code of its own"
        if module.bias_k is not None or module.bias_v is not None:
            return "it adds a key and a value of its own (add_bias_kv)"
        if module.add_zero_attn:
            return "it adds a key and a value of zeros (add_zero_attn)"
        own = {name for name, _ in module.named_parameters()}
        expected = {"in_proj_weight"} if module._qkv_same_embed_dim else {f"{i}_proj_weight" for i in "qkv"}
        if module.in_proj_bias is not None:
            expected |= {"in_proj_bias", "out_proj.bias"}
        if own != expected | {"out_proj.weight"} or not isinstance(module.out_proj, nn.Linear):
            return "its weights are computed from others"
        return ""

    @classmethod
    def from_dense(cls, module: nn.MultiheadAttention) -> ExpandedAttention:
        """The same attention, its weights copied."""
        if obstacle := cls.obstacle(module):
            raise InvalidOption(f"expected an nn.MultiheadAttention that can be expanded, got one of which: {obstacle}")
        packed = module.in_proj_weight is not None
        weights = [module.in_proj_weight] * 3 if packed else [getattr(module, f"{i}_proj_weight") for i in "qkv"]
        layers = []
        for part, weight in enumerate(weights):
            bias = module.in_proj_bias
            own = None if bias is None else bias.chunk(3)[part]
            layers.append(linear_layer(weight.chunk(3)[part] if packed else weight, own))
            _freeze_like_(layers[-1], weight, bias)
        layers.append(linear_layer(module.out_proj.weight, module.out_proj.bias))
        _freeze_like_(layers[-1], module.out_proj.weight, module.out_proj.bias)
        q, k, v, out = layers
        result = cls(q, k, v, out, module.num_heads, module.head_dim, module.dropout, module.batch_first)
        return result.train(module.training)

    def to_dense(self) -> nn.MultiheadAttention | None:
        """PyTorch's module with these weights; None where a projection is not an `nn.Linear` of the size it had."""
        layers: list[Any] = [self._modules[name] for name in _PROJECTIONS]
        width = self.num_heads * self.head_dim
        sizes = [(width, width), (width, self.kdim), (width, self.vdim), (width, width)]
        for layer, size in zip(layers, sizes, strict=True):
            if type(layer) is not nn.Linear or layer.weight.shape != size:
                return None
        if len({layer.bias is None for layer in layers}) > 1:
            return None
        like: Tensor = layers[0].weight
        dense = nn.MultiheadAttention(
            self.embed_dim, self.num_heads, self.dropout, self.out.bias is not None, kdim=self.kdim, vdim=self.vdim,
            batch_first=self.batch_first, device="meta", dtype=like.dtype,
        ).to_empty(device=like.device)  # fmt: skip
        for name, own in dense.named_parameters():
            found: Any = self
            for part in name.split("."):
                found = getattr(found, part)
            with torch.no_grad():
                own.copy_(found)
            own.requires_grad_(found.requires_grad)
        return dense.train(self.training)

    # what PyTorch's modules say of themselves

    @property
    def embed_dim(self) -> int:
        return int(self.q.in_features)  # type: ignore[arg-type]

    @property
    def kdim(self) -> int:
        return int(self.k.in_features)  # type: ignore[arg-type]

    @property
    def vdim(self) -> int:
        return int(self.v.in_features)  # type: ignore[arg-type]

    @property
    def _qkv_same_embed_dim(self) -> bool:
        return self.kdim == self.vdim == self.embed_dim

    @property
    def out_proj(self) -> nn.Module:
        return self.out

    @property
    def in_proj_weight(self) -> Tensor | None:
        """(3 · width, features), put together; None where queries, keys and values have other sizes."""
        return torch.cat([_weight(self, i) for i in "qkv"]) if self._qkv_same_embed_dim else None

    @property
    def q_proj_weight(self) -> Tensor | None:
        return None if self._qkv_same_embed_dim else _weight(self, "q")

    @property
    def k_proj_weight(self) -> Tensor | None:
        return None if self._qkv_same_embed_dim else _weight(self, "k")

    @property
    def v_proj_weight(self) -> Tensor | None:
        return None if self._qkv_same_embed_dim else _weight(self, "v")

    @property
    def in_proj_bias(self) -> Tensor | None:
        """(3 · width,), put together."""
        layers: list[Any] = [self.q, self.k, self.v]
        if all(layer.bias is None for layer in layers):
            return None
        like = next(layer.bias for layer in layers if layer.bias is not None)
        return torch.cat([like.new_zeros(x.out_features) if x.bias is None else x.bias for x in layers])

    @property
    def xavier_fans(self) -> dict[str, tuple[int, int]]:
        """Of projections that PyTorch draws by Xavier's rule: inputs and outputs of the matrix that it draws.

        >>> ExpandedAttention.from_dense(nn.MultiheadAttention(8, 2)).xavier_fans
        {'q': (8, 24), 'k': (8, 24), 'v': (8, 24)}
        """
        outputs = self.embed_dim * (3 if self._qkv_same_embed_dim else 1)
        return {"q": (self.embed_dim, outputs), "k": (self.kdim, outputs), "v": (self.vdim, outputs)}

    # what is stored of it

    def describe(self) -> dict[str, Any]:
        """Settings and projections, without weights."""
        settings = {name: getattr(self, name) for name in ("num_heads", "head_dim", "dropout", "batch_first")}
        return settings | {name: getattr(self, name) for name in _PROJECTIONS}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> ExpandedAttention:
        """An attention of these sizes, not filled."""
        settings = {name: value for name, value in description.items() if name not in _PROJECTIONS}
        fits = settings.keys() == {"num_heads", "head_dim", "dropout", "batch_first"}
        fits = fits and all(type(settings[name]) is int and settings[name] > 0 for name in ("num_heads", "head_dim"))
        fits = fits and type(settings["batch_first"]) is bool and type(settings["dropout"]) in (int, float)
        if not fits or not 0 <= settings["dropout"] <= 1:
            raise InvalidOption(f"expected num_heads, head_dim, dropout and batch_first, got {settings!r:.200}")
        layers = [description[name] for name in _PROJECTIONS]
        for name, layer in zip(_PROJECTIONS, layers, strict=True):
            sizes = [getattr(layer, side, None) for side in ("in_features", "out_features")]
            if not isinstance(layer, nn.Module) or not all(type(size) is int for size in sizes):
                raise InvalidOption(f"expected a linear layer as {name}, got {type(layer).__name__}")
        return cls(*layers, **settings)

    def index_limits(self) -> dict[str, int]:
        """Nothing: the projections know their own."""
        return {}

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"

    # what it does

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights or None) as `nn.MultiheadAttention` returns them."""
        if any(x.is_nested or x.ndim not in (2, 3) or x.ndim != query.ndim for x in (query, key, value)):
            shapes = ", ".join("nested" if x.is_nested else str(tuple(x.shape)) for x in (query, key, value))
            raise InvalidMatrix(f"expected query, key and value of 2 or 3 axes each, padded, got {shapes}")
        if is_causal and attn_mask is None:
            raise InvalidOption("is_causal=True says that attn_mask is the causal one: pass it too")
        q, k, v = (self._heads(layer(x)) for layer, x in ((self.q, query), (self.k, key), (self.v, value)))
        causal = is_causal and key_padding_mask is None and not need_weights  # then the mask need not be read
        mask = None if causal else self._mask(q, k, key_padding_mask, attn_mask)
        dropped, scale, weights = self.dropout if self.training else 0.0, self.head_dim**-0.5, None
        if need_weights:
            scores = (q * scale) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), dropped, dropped > 0)
            read = weights @ v
        else:
            read = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal, scale=scale)
        if query.ndim == 2:
            joined = read.squeeze(0).transpose(0, 1).flatten(-2)
        else:
            joined = (read.transpose(1, 2) if self.batch_first else read.permute(2, 0, 1, 3)).flatten(-2)
        output: Tensor = self.out(joined)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.squeeze(0) if query.ndim == 2 else weights
        return output, weights

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, heads, positions, numbers of a head) from what a projection wrote."""
        apart = x.unflatten(-1, (self.num_heads, -1))
        if apart.ndim == 3:
            return apart.transpose(0, 1).unsqueeze(0)
        return apart.transpose(1, 2) if self.batch_first else apart.permute(1, 2, 0, 3)

    def _mask(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """What is added to the scores, (batch or 1, heads or 1, queries or 1, keys)."""
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        found: Tensor | None = None
        if mask is not None:
            shapes = {2: (queries, keys), 3: (batch * self.num_heads, queries, keys)}
            if tuple(mask.shape) != shapes.get(mask.ndim):
                raise InvalidMatrix(f"attn_mask: expected shape {shapes[2]} or {shapes[3]}, got {tuple(mask.shape)}")
            found = _added(mask, q, "attn_mask")
            found = found if mask.ndim == 2 else found.unflatten(0, (batch, self.num_heads))
        if padding is not None:
            if padding.numel() != batch * keys:
                raise InvalidMatrix(f"key_padding_mask: expected shape {(batch, keys)}, got {tuple(padding.shape)}")
            own = _added(padding, q, "key_padding_mask").view(batch, 1, 1, keys)
            found = own if found is None else found + own
        return found


def _added(mask: Tensor, like: Tensor, name: str) -> Tensor:
    """What a mask adds to scores: where it is True, nothing may be looked at."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -torch.inf)
    if not mask.is_floating_point():
        raise InvalidMatrix(f"{name}: expected a mask of booleans or floating-point numbers, got {mask.dtype}")
    return mask.to(like.dtype)


def _weight(attention: ExpandedAttention, name: str) -> Tensor:
    weight: Any = attention.get_submodule(name).weight
    return weight


def _freeze_like_(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    layer.weight.requires_grad_(weight.requires_grad)
    if bias is not None:
        layer.bias.requires_grad_(bias.requires_grad)
