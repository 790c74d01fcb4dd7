"""What the layers of a dense decoder read on the calibration text: one pass that all methods and shares use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PLACES = {  # the input of which layer
    "attention": "self_attn.q_proj",
    "heads": "self_attn.o_proj",
    "feed_forward": "mlp.gate_proj",
    "neurons": "mlp.down_proj",
}


@dataclass(eq=False)
class LayerStatistics:
    """Σ xxᵀ and Σ x of the inputs of one decoder layer's matrices, and how alike its own input and output are."""

    gram: dict[str, Tensor] = field(default_factory=dict)  # place → (inputs, inputs), float64
    total: dict[str, Tensor] = field(default_factory=dict)  # place → (inputs,)
    similarity: float = 0.0  # mean cosine of what comes in and what goes out
    tokens: int = 0

    def mean(self, place: str) -> Tensor:
        return self.total[place] / self.tokens

    def variance(self, place: str) -> Tensor:
        return self.gram[place].diagonal() / self.tokens - self.mean(place).square()


@torch.no_grad()
def observe(model: Any, windows: Tensor, batch: int = 4) -> list[LayerStatistics]:
    """The statistics of every decoder layer of a Llama-like model."""
    found = [LayerStatistics() for _ in model.model.layers]
    handles = []
    for layer, statistics in zip(model.model.layers, found, strict=True):
        for place, name in PLACES.items():
            handles.append(layer.get_submodule(name).register_forward_pre_hook(_adder(statistics, place)))
        handles.append(layer.register_forward_hook(_comparer(statistics)))
    try:
        for some in windows.split(batch):
            model.model(input_ids=some, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for statistics in found:
        statistics.similarity /= statistics.tokens
    return found


def _adder(statistics: LayerStatistics, place: str) -> Any:
    def hook(module: Any, inputs: Any) -> None:
        x = inputs[0].flatten(0, -2)
        gram, total = (x.T @ x).double(), x.double().sum(0)
        statistics.gram[place] = statistics.gram[place] + gram if place in statistics.gram else gram
        statistics.total[place] = statistics.total[place] + total if place in statistics.total else total

    return hook


def _comparer(statistics: LayerStatistics) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        before, after = (t.flatten(0, -2) for t in (inputs[0], output[0] if isinstance(output, tuple) else output))
        statistics.similarity += float(F.cosine_similarity(before, after, -1).sum())
        statistics.tokens += len(before)

    return hook
