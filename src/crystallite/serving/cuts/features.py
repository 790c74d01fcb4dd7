"""`CutFeatures`: what takes the place of an operator whose blocks read and write features, or channels."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from crystallite.operators.runtime.engine import in_order
from crystallite.serving.cuts.calls import Request, call_pieces
from crystallite.serving.cuts.site import FeatureSite, Named
from crystallite.serving.interface import only
from crystallite.serving.signature import INPUT, Tensors

__all__ = ["CutFeatures", "Ends"]


@dataclass(frozen=True)
class Ends:
    """What an operator does to its vectors before the first site and after the last."""

    inputs: int
    outputs: Tensor | None  # the line that each output is; None: in order
    channels: int = 1  # of as many outputs each, to be summed
    bias: Tensor | None = None  # added to that sum
    axes: int = 0  # after that of the features: those of a convolution's positions


class CutFeatures(nn.Module):
    """An operator without its blocks: deals features out to pieces, joins what they return, and does so site by site.

    Between two sites stands one index table: R = Q₂P₁⁻¹ of the paper. What the pieces of a site return, one after the
    other, and the constants of dormant neurons behind them, is what it counts. Without weights: tables, and constants
    of O(neurons).
    """

    weight: Tensor  # of no size: modules are asked for the dtype of their weight
    outputs: Tensor | None
    bias: Tensor | None

    def __init__(self, sites: Sequence[tuple[FeatureSite, Named]], ends: Ends) -> None:
        """Args:
        sites: one after the other, each with its pieces.
        ends: what lies before and after them.
        """
        super().__init__()
        self.axis, self.channels = -1 - ends.axes, ends.channels
        self.pieces: list[tuple[str, ...]] = []
        self.widths: list[list[int]] = []
        place = np.arange(ends.inputs)
        for number, (site, named) in enumerate(sites):
            groups = list(named.values())
            reads, writes = (
                [np.concatenate([side[block] for block in group]) for group in groups]
                for side in (site.reads, site.writes)
            )
            self.pieces.append(tuple(named))
            self.widths.append([len(group) for group in reads])
            self._hold(f"reads_{number}", place[np.concatenate(reads)], len(place))
            written = np.concatenate(writes)
            idle = np.setdiff1d(np.arange(len(site.idle)), written)
            self.register_buffer(f"idle_{number}", site.idle[torch.from_numpy(idle)].clone(), persistent=False)
            place = np.argsort(np.concatenate([written, idle]))
        last = place if ends.outputs is None else place[ends.outputs.numpy()]
        self._hold("outputs", last, len(place))
        self.register_buffer("bias", None if ends.bias is None else ends.bias.detach().clone(), persistent=False)
        self.register_buffer("weight", sites[0][0].idle.new_empty(0), persistent=False)
        self.in_features, self.out_features = ends.inputs, len(last) // ends.channels

    def _hold(self, name: str, table: np.ndarray, among: int) -> None:
        """Keep a table; none where nothing is moved."""
        moved = None if len(table) == among and in_order(table) else torch.from_numpy(table)
        self.register_buffer(name, moved, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        work = self.requests(x)
        requests = next(work)
        while True:
            try:
                requests = work.send(call_pieces(requests))
            except StopIteration as end:
                found: Tensor = end.value
                return found

    def requests(self, x: Tensor) -> Generator[list[Request], list[Tensors], Tensor]:
        """The calls of one site after the other, answered by what the pieces returned; the end returns the output."""
        for number, pieces in enumerate(self.pieces):
            parts = self._moved(x, f"reads_{number}").split(self.widths[number], self.axis)
            made = yield [(piece, {INPUT: part}) for piece, part in zip(pieces, parts, strict=True)]
            results = [only(result) for result in made]
            if len(idle := self.get_buffer(f"idle_{number}")):
                shape = [*results[0].shape]
                shape[self.axis] = len(idle)
                results.append(idle.to(results[0].dtype).view(-1, *[1] * (-1 - self.axis)).expand(shape))
            x = torch.cat(results, self.axis)
        y = self._moved(x, "outputs")
        if self.channels > 1:
            y = y.unflatten(-1, (self.channels, self.out_features)).sum(-2)  # Σ_q W₂^q V^q
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _moved(self, x: Tensor, name: str) -> Tensor:
        table = self._buffers[name]
        return x if table is None else x.index_select(self.axis, table)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, pieces {' → '.join(', '.join(p) for p in self.pieces)}"
