"""`CutExperts`: what takes the place of a mixture whose experts run elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crystallite.operators.experts import Experts
from crystallite.serving.cuts.calls import call_pieces
from crystallite.serving.cuts.site import Cost, Named, Site, nbytes
from crystallite.serving.interface import TakesNames, only
from crystallite.serving.signature import INPUT, OUTPUT, Tensors

__all__ = ["CutExperts", "expert_site"]


def expert_site(experts: Experts) -> Site:
    """The experts, each of which is a block."""

    def cost(expert: nn.Module) -> Cost:
        return Cost(sum(p.numel() for p in expert.parameters() if p.ndim > 1), nbytes(expert))

    def part(numbers: Sequence[int]) -> nn.Module:
        return _SomeExperts([copy.deepcopy(experts.experts[number]) for number in numbers])

    return Site("", tuple(map(cost, experts.experts)), part)


class CutExperts(nn.Module):
    """Experts without weights: tokens are sent to the pieces that hold theirs, answers weighed and added up.

    A piece none of whose experts is asked is not called.
    """

    def __init__(self, experts: Experts, named: Named) -> None:
        super().__init__()
        self.pieces, self.members, self.count = tuple(named), list(named.values()), len(experts.experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, features) from what each token is, which experts it is sent to, and what each of them counts."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        tokens, weights = order // top_k_index.shape[-1], top_k_weights.reshape(-1)[order]
        counts = torch.bincount(chosen, minlength=self.count)[: self.count]  # more: tokens that are sent nowhere
        stops = counts.cumsum(0)
        sent, requests = list[Tensor](), []
        for piece, experts in zip(self.pieces, self.members, strict=True):
            asked = [torch.arange(int(stops[e] - counts[e]), int(stops[e])) for e in experts]
            places = torch.cat(asked)
            if len(places):
                sent.append(places)
                requests.append((piece, {INPUT: x[tokens[places]], "counts": counts[list(experts)]}))
        result = torch.zeros_like(x)
        for places, written in zip(sent, map(only, call_pieces(requests)), strict=True):
            result.index_add_(0, tokens[places], (written * weights[places, None]).to(result.dtype))
        return result.view_as(hidden_states)

    def extra_repr(self) -> str:
        return f"{self.count} experts, pieces {', '.join(self.pieces)}"


class _SomeExperts(TakesNames):
    """Experts that each take their tokens, which come one expert's after the other's."""

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, given: Tensors) -> Tensors:
        rows = given[INPUT].split(given["counts"].tolist())
        made = [expert(own) for expert, own in zip(self.experts, rows, strict=True) if len(own)]
        return {OUTPUT: torch.cat(made)}

    def example(self) -> Tensors:
        """A token for each expert."""
        like, first, count = next(self.parameters()), self.experts[0], len(self.experts)
        x = torch.zeros(count, int(first.in_features), dtype=like.dtype)  # type: ignore[arg-type]
        return {INPUT: x, "counts": torch.ones(count, dtype=torch.int64)}
