"""Layers of low rank: two small products in the place of one, with the attributes of the layer they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidMatrix

__all__ = ["LowRankConv", "LowRankLinear", "linear_layer"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LowRankLinear(nn.Module):
    """y = up(down(x)): a linear layer whose weight is a product of two.

    Code that asks a layer for `weight`, `bias`, `in_features` or `out_features` finds them; the weight is multiplied
    out when asked for.

    >>> layer = LowRankLinear.from_factors(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 0.0, 3.0]]), None)
    >>> layer
    LowRankLinear(in_features=3, out_features=2, bias=False, rank=1, 5 of 6 multiply-adds)
    >>> layer.weight.tolist(), layer(torch.ones(3)).tolist()
    ([[1.0, 0.0, 3.0], [2.0, 0.0, 6.0]], [4.0, 8.0])
    """

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        """Args:
        down: the layer that reads, to `rank` numbers, without a bias.
        up: the layer that writes, with the bias.
        """
        super().__init__()
        self.down, self.up = down, up

    @classmethod
    def from_factors(cls, up: Tensor, down: Tensor, bias: Tensor | None) -> LowRankLinear:
        """Args:
        up: (out_features, rank)
        down: (rank, in_features)
        bias: (out_features,), or None
        """
        if up.ndim != 2 or down.ndim != 2 or up.shape[1] != len(down):
            raise InvalidMatrix(
                f"expected factors (outputs, rank) and (rank, inputs), got {tuple(up.shape)} and {tuple(down.shape)}"
            )
        return cls(linear_layer(down, None), linear_layer(up, bias))

    def describe(self) -> dict[str, Any]:
        """The two layers."""
        return {"down": self.down, "up": self.up}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> LowRankLinear:
        """Layers of these sizes, not filled."""
        down, up = description["down"], description["up"]
        if down.out_features != up.in_features:
            raise InvalidMatrix(f"expected factors of one rank, got {down.out_features} and {up.in_features}")
        return cls(down, up)

    def index_limits(self) -> dict[str, int]:
        """Nothing: the two layers know their own."""
        return {}

    @property
    def in_features(self) -> int:
        return int(self.down.in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        return int(self.up.out_features)  # type: ignore[arg-type]

    @property
    def rank(self) -> int:
        return int(self.up.in_features)  # type: ignore[arg-type]

    @property
    def bias(self) -> nn.Parameter | None:
        found: Any = self.up.bias
        return found

    @property
    def weight(self) -> Tensor:
        """(out_features, in_features) the product; gradients flow back to the factors."""
        up: Any = self.up.weight
        down: Any = self.down.weight
        return up @ down

    @property
    def macs(self) -> int:
        """Multiply-accumulates per input vector."""
        return sum(int(getattr(part, "macs", 0)) or _numel(part.weight) for part in (self.down, self.up))

    def to_dense(self) -> nn.Linear:
        """The layer as one `nn.Linear`."""
        return linear_layer(self.weight.detach(), None if self.bias is None else self.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.down(x))
        return y

    def __repr__(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        cost = f"{self.macs} of {self.in_features * self.out_features} multiply-adds"
        return f"LowRankLinear({size}, rank={self.rank}, {cost})"


class LowRankConv(nn.Module):
    """y = up(down(x)): a convolution to `rank` channels, and one of single places to all channels.

    >>> layer = LowRankConv(nn.Conv1d(3, 2, 5, stride=2, padding=1, bias=False), nn.Conv1d(2, 8, 1))
    >>> layer
    LowRankConv(3, 8, kernel_size=(5,), stride=(2,), padding=(1,), rank=2, 46 of 120 multiply-adds)
    >>> tuple(layer.weight.shape), layer.out_channels
    ((8, 3, 5), 8)
    """

    groups = 1

    def __init__(self, down: Convolution, up: Convolution) -> None:
        """Args:
        down: the convolution to `rank` channels, without a bias.
        up: a convolution with a kernel of 1, with the bias.
        """
        super().__init__()
        self.down, self.up = down, up

    def describe(self) -> dict[str, Any]:
        """The two convolutions."""
        return {"down": self.down, "up": self.up}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> LowRankConv:
        """Convolutions of these sizes, not filled."""
        down, up = description["down"], description["up"]
        if not isinstance(down, _CONVOLUTIONS) or type(up) is not type(down) or down.out_channels != up.in_channels:
            raise InvalidMatrix("expected two convolutions of one kind and rank")
        return cls(down, up)

    def index_limits(self) -> dict[str, int]:
        """Nothing: there are no index tables."""
        return {}

    def __getattr__(self, name: str) -> Any:
        """What a convolution says of itself, `down` says but for the channels that come out."""
        if name in _SETTINGS:
            return getattr(self.down, name)
        return super().__getattr__(name)

    @property
    def out_channels(self) -> int:
        return self.up.out_channels

    @property
    def rank(self) -> int:
        return self.up.in_channels

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias

    @property
    def weight(self) -> Tensor:
        """(out_channels, in_channels, kernel…) the product; gradients flow back to the factors."""
        return torch.einsum("or,ri...->oi...", self.up.weight.flatten(1), self.down.weight)

    @property
    def macs(self) -> int:
        """Multiply-accumulates per output position."""
        return self.down.weight.numel() + self.up.weight.numel()

    def to_dense(self) -> nn.Module:
        """The layer as one convolution."""
        down = self.down
        dense = type(down)(
            down.in_channels, self.out_channels, down.kernel_size, down.stride, down.padding, down.dilation,  # type: ignore[arg-type]
            1, self.bias is not None, down.padding_mode, down.weight.device, down.weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            dense.weight.copy_(self.weight)
            if dense.bias is not None and self.bias is not None:
                dense.bias.copy_(self.bias)
        return dense

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(self.down(x))
        return y

    def __repr__(self) -> str:
        size = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        cost = f"{self.macs} of {self.out_channels * _numel(self.down.weight[0])} multiply-adds"
        return f"LowRankConv({size}, padding={self.padding}, rank={self.rank}, {cost})"


_SETTINGS = frozenset(
    ("in_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode", "transposed", "output_padding")
)


def _numel(value: Any) -> int:
    return int(value.numel())


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An `nn.Linear` with a copy of these numbers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer
