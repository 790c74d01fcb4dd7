"""The table of tokens and the head of a decoder with a low rank, the best one where it counts.

Rows count as often as the model expects their tokens, columns as Fisher's metric says: an error of the table changes
what the first layer reads, an error of the head what the softmax makes of a state. Tied tables stay tied: both read the
same rows, so the best rank is that of the sum of both metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.compression.decoders.stack import Stack
from crystallite.core.errors import InvalidOption
from crystallite.models.layers import Unit, change
from crystallite.models.record import LayerChange, OperatorRecord
from crystallite.models.swap import put_
from crystallite.operators.low_rank_table import LowRankEmbedding, LowRankHead

__all__ = ["HeadSums", "Tables", "fit_tables", "head_sums", "put_tables_", "with_tables"]

_POSITIONS = 128  # at once, where logits are computed
_ROWS = 4096  # of a table at once
_EVEN = 0.5  # of the weight of rows is the same for all tokens: calibration shows few of them
_ROOT = 1e-3  # of a metric's mean, added in all directions
_STEP = 8  # ranks are multiples of it, where they can be


@dataclass(frozen=True)
class Tables:
    """The tables of a decoder, and the rank that they shall have."""

    table: str  # names
    head: str
    rank: int
    tied: bool
    vocabulary: int
    features: int

    @classmethod
    def of(cls, model: Any, share: float, asked: set[str]) -> Tables:
        """Tables that keep this share of their numbers; refuses, by name, those that are none.

        asked: layers that may change.
        """
        names = {id(module): name for name, module in model.named_modules()}
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
        for module, kind in ((table, nn.Embedding), (head, nn.Linear)):
            name = names.get(id(module), "")
            if type(module) is not kind or not name:
                raise InvalidOption(
                    f"embeddings: {name or 'the model'}: expected PyTorch's {kind.__name__}, got a "
                    f"{type(module).__name__}"
                )
            if name not in asked:
                raise InvalidOption(f"embeddings: {name} may not change: targets= and ignore= leave it out")
        if table.max_norm is not None or head.weight.shape != table.weight.shape:
            raise InvalidOption(
                f"embeddings: expected a table and a head of one shape, got {tuple(table.weight.shape)} and "
                f"{tuple(head.weight.shape)}"
            )
        vocabulary, features = table.weight.shape
        tied = head.weight is table.weight
        shared = vocabulary + features * (2 if tied else 1)
        rank = int(share * vocabulary * features / shared)
        rank = rank // _STEP * _STEP or rank
        if rank < 1 or rank >= features:
            raise InvalidOption(
                f"embeddings: a share of {share:g} of {vocabulary} × {features} numbers would be a rank of {rank}"
            )
        return cls(names[id(table)], names[id(head)], rank, tied, vocabulary, features)

    @property
    def saved(self) -> int:
        """Numbers that go from the model."""
        one = self.vocabulary * self.features - self.rank * (self.vocabulary + self.features)
        return one - self.rank * self.features if self.tied else 2 * one

    @property
    def saved_macs(self) -> int:
        """Multiply-adds that go: those of the head, less what the table costs now."""
        return self.vocabulary * self.features - self.rank * (self.vocabulary + 2 * self.features)

    def change_of(self, unit: Unit) -> LayerChange | None:
        """What one of both becomes; None for other layers."""
        if unit.name not in (self.table, self.head):
            return None
        is_table = unit.name == self.table
        inner = self.rank * self.features
        rows = 0 if self.tied and not is_table else self.rank * self.vocabulary
        biases = 0 if is_table or unit.bias is None else len(unit.bias)
        macs = inner if is_table else inner + self.rank * self.vocabulary
        became = OperatorRecord("low rank", rank=self.rank)
        return change(unit, became, macs=macs, parameters=rows + inner + biases, share=self.rank / self.features)


@dataclass
class HeadSums:
    """Sums over positions: of the probabilities of all tokens, and Σ hhᵀ of what the head reads."""

    positions: int
    tokens: Tensor
    squares: Tensor

    @classmethod
    def total(cls, parts: Sequence[HeadSums]) -> HeadSums:
        """Of all positions together."""
        first, *others = parts
        for part in others:
            first = cls(first.positions + part.positions, first.tokens + part.tokens, first.squares + part.squares)
        return first


def head_sums(stack: Stack, ends: Sequence[Tensor]) -> HeadSums:
    """The sums for what the last layer writes: (positions, features) each."""
    head: Any = stack.model.get_output_embeddings()  # type: ignore[operator]
    vocabulary, features = head.weight.shape
    found = HeadSums(0, torch.zeros(vocabulary, dtype=torch.float64), torch.zeros(features, features).double())
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        for part in (part for end in ends for part in end.split(_POSITIONS)):
            logits = stack.end(part[:, None])[:, 0]
            read = seen.pop().reshape(-1, features)[-len(part) :].float()
            found.positions += len(part)
            found.tokens += logits.float().softmax(-1).sum(0)
            found.squares += read.T @ read
    finally:
        handle.remove()
    return found


@torch.no_grad()
def fit_tables(model: Any, tables: Tables, head: HeadSums, squares: Tensor, positions: int) -> dict[str, Tensor]:
    """The factors, by what they are.

    squares: Σ ggᵀ of gradients at what the first layer reads.
    """
    stored = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    rows = head.tokens / head.tokens.sum() * (1 - _EVEN) + _EVEN / len(head.tokens)
    metrics = _smooth(squares / positions), _smooth(head.squares / head.positions)
    if tables.tied:
        up, down = _factors(stored[0], rows, metrics[0] + metrics[1], tables.rank)
        return {"weight": up, "expand": down.T.contiguous(), "project": down}
    (up, down), (head_up, head_down) = (_factors(w, rows, m, tables.rank) for w, m in zip(stored, metrics, strict=True))
    return {"weight": up, "expand": down.T.contiguous(), "head": head_up, "project": head_down}


def _smooth(metric: Tensor) -> Tensor:
    return metric + _ROOT * metric.diagonal().mean() * torch.eye(len(metric)).to(metric)


def _factors(weight: Tensor, rows: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """(tokens, rank) and (rank, features) whose product errs least, rows and columns weighed."""
    square = torch.zeros_like(metric)
    for some, each in zip(weight.split(_ROWS), rows.split(_ROWS), strict=True):
        some = some.double()
        square += (some * each[:, None]).T @ some
    values, vectors = torch.linalg.eigh(metric)
    root, back = ((vectors * power) @ vectors.T for power in (values.sqrt(), values.rsqrt()))
    main = torch.linalg.eigh(root @ square @ root).eigenvectors[:, -rank:]
    into, out = root @ main, (main.T @ back).to(weight.dtype).contiguous()
    return torch.cat([(some.double() @ into).to(weight.dtype) for some in weight.split(_ROWS)]), out


def _modules(model: Any, tables: Tables, factors: Mapping[str, Tensor]) -> dict[str, nn.Module]:
    """What stands in the places of both."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    one = LowRankEmbedding(tables.vocabulary, tables.features, tables.rank, table.padding_idx)
    other = LowRankHead(tables.features, tables.vocabulary, tables.rank, head.bias is not None)
    trained = table.weight.requires_grad
    one.weight = nn.Parameter(factors["weight"].clone(), trained)
    one.expand = nn.Parameter(factors["expand"].clone(), trained)
    other.weight = one.weight if tables.tied else nn.Parameter(factors["head"].clone(), trained)
    other.project = nn.Parameter(factors["project"].clone(), trained)
    if head.bias is not None:
        other.bias = head.bias
    return {tables.table: one.train(table.training), tables.head: other.train(head.training)}


def put_tables_(model: nn.Module, tables: Tables, factors: Mapping[str, Tensor]) -> None:
    """Put both into a model."""
    for name, module in _modules(model, tables, factors).items():
        put_(model, name, module)


def with_tables(stack: Stack, tables: Tables, factors: Mapping[str, Tensor]) -> Stack:
    """The stack with both, all else shared."""
    for name, module in _modules(stack.model, tables, factors).items():
        stack = stack.with_module(name, module)
    return stack
