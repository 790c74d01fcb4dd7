"""A table of tokens and a head of low rank: two small tables in the place of one, which both may share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crystallite.core.errors import InvalidMatrix

__all__ = ["LowRankEmbedding", "LowRankHead"]


class _Table(nn.Module):
    """Rows of `rank` numbers for each token, under the name that tied tables have: `weight`."""

    def __init__(self, tokens: int, features: int, rank: int) -> None:
        super().__init__()
        if not 0 < rank <= features or tokens < 1:
            raise InvalidMatrix(f"expected a rank of 1 to {features} and tokens, got {rank} and {tokens}")
        self.rank, self._features = rank, features
        self.weight = nn.Parameter(torch.empty(tokens, rank))

    def index_limits(self) -> dict[str, int]:
        """Nothing: there are no index tables."""
        return {}


class LowRankEmbedding(_Table):
    """y = expand · weight[token]: a look-up of few numbers, and a product that makes a state of them.

    >>> table = LowRankEmbedding(9, 4, 2)
    >>> with torch.no_grad():
    ...     _ = table.weight.fill_(1), table.expand.fill_(3)
    >>> table, table(torch.tensor([1, 2]))[1].tolist()
    (LowRankEmbedding(9, 4, rank=2), [6.0, 6.0, 6.0, 6.0])
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, rank: int, padding_idx: int | None = None) -> None:
        """Tables of these sizes, not filled."""
        super().__init__(num_embeddings, embedding_dim, rank)
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise InvalidMatrix(f"expected a token below {num_embeddings} for padding, got {padding_idx}")
        self.padding_idx = padding_idx
        self.expand = nn.Parameter(torch.empty(embedding_dim, rank))

    def describe(self) -> dict[str, Any]:
        """The sizes."""
        sizes = {"num_embeddings": self.num_embeddings, "embedding_dim": self.embedding_dim, "rank": self.rank}
        return {**sizes, "padding_idx": self.padding_idx}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> LowRankEmbedding:
        """Tables of these sizes, not filled."""
        return cls(**description)

    @property
    def num_embeddings(self) -> int:
        return len(self.weight)

    @property
    def embedding_dim(self) -> int:
        return self._features

    @property
    def macs(self) -> int:
        """Multiply-adds for a token; looking up needs none."""
        return self.expand.numel()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(F.embedding(tokens, self.weight, self.padding_idx), self.expand)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, rank={self.rank}"


class LowRankHead(_Table):
    """y = weight · (project · x) + bias: logits by way of few numbers.

    >>> LowRankHead(4, 9, 2, bias=False)
    LowRankHead(in_features=4, out_features=9, bias=False, rank=2)
    """

    def __init__(self, in_features: int, out_features: int, rank: int, bias: bool) -> None:
        """Tables of these sizes, not filled."""
        super().__init__(out_features, in_features, rank)
        self.project = nn.Parameter(torch.empty(rank, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def describe(self) -> dict[str, Any]:
        """The sizes."""
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "rank": self.rank}
        return {**sizes, "bias": self.bias is not None}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> LowRankHead:
        """Tables of these sizes, not filled."""
        return cls(**description)

    @property
    def in_features(self) -> int:
        return self._features

    @property
    def out_features(self) -> int:
        return len(self.weight)

    @property
    def macs(self) -> int:
        """Multiply-adds for a position."""
        return self.project.numel() + self.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.project), self.weight, self.bias)

    def extra_repr(self) -> str:
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{size}, rank={self.rank}"
