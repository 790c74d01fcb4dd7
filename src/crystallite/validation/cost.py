"""What a model costs on real inputs: parameters, multiply-adds, time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from crystallite.data.batch import Batch
from crystallite.data.weight_products import multiplied_rows
from crystallite.operators.experts import active_experts

__all__ = ["Latency", "count_macs", "count_parameters", "macs_by_module", "measure_latency"]

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SECONDS = 0.5  # for the timing of both models on one batch
_RUNS = (3, 30)  # of each model, at least and at most


@dataclass(frozen=True)
class Latency:
    """Seconds for one batch of both systems, the best of several runs that took turns."""

    batch: int
    original: float
    reorganized: float

    @property
    def speedup(self) -> float:
        return self.original / self.reorganized


def count_parameters(model: nn.Module) -> int:
    """Numbers that are stored as parameters; shared ones count once."""
    return sum(p.numel() for p in model.parameters())


def count_macs(model: nn.Module, batch: Batch) -> int:
    """Multiply-adds of inputs with weights for one batch, counted where they happen: with real shapes.

    Linear layers, convolutions, recurrent networks, attention's projections, and block operators by what their blocks
    hold, and linear layers whose weights the model's code multiplies itself. Products of activations with each other
    (attention scores) are the same in both systems and not counted.

    >>> count_macs(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), Batch(0, 5, (torch.zeros(5, 4),)))
    90
    """
    return sum(macs_by_module(model, batch).values())


def macs_by_module(model: nn.Module, batch: Batch) -> dict[str, int]:
    """The same by the name of the module that multiplies."""
    counted: dict[str, int] = {}
    idle: dict[nn.Linear, str] = {}  # that were not called
    handles = []
    inside: list[str] = []  # names of modules that are counted as wholes
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        if hasattr(module, "macs") or isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            inside.append(name)
        elif isinstance(module, nn.Linear):
            idle[module] = name

        def hook(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            counted[name] = counted.get(name, 0) + _macs(module, inputs, output)
            if isinstance(module, nn.Linear):
                idle.pop(module, None)

        handles.append(module.register_forward_hook(hook))
    try:
        batch.run(model)
    finally:
        for handle in handles:
            handle.remove()
    rows = multiplied_rows(model, idle.values(), batch)
    return counted | {name: rows[name] * module.weight.numel() for module, name in idle.items()}


def _macs(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    """Multiply-adds of one call of one module; 0 for modules that multiply nothing with weights."""
    blocks = getattr(module, "macs", None)
    if isinstance(module, nn.MultiheadAttention):
        queries = output[0].numel() // module.embed_dim
        keys = inputs[1].numel() // module.kdim if len(inputs) > 1 else queries
        width = module.embed_dim
        return queries * 2 * width**2 + keys * width * (module.kdim + module.vdim)
    if not inputs or not isinstance(inputs[0], (Tensor, PackedSequence)):
        return 0
    first = inputs[0].data if isinstance(inputs[0], PackedSequence) else inputs[0]
    if isinstance(module, nn.RNNBase) or (blocks is not None and hasattr(module, "hidden_size")):
        steps = first.numel() // module.input_size  # time steps of all sequences
        weights = blocks if blocks is not None else sum(p.numel() for p in module.parameters() if p.ndim > 1)
        return steps * weights
    share = active_experts(module, inputs)
    if share is not None:
        stacks = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim == 3)
        return round(first.numel() // max(1, first.shape[-1]) * share * stacks)
    if isinstance(module, _TRANSPOSED):
        return first.numel() // module.in_channels * module.weight.numel()
    if isinstance(module, _CONVOLUTIONS) or (blocks is not None and hasattr(module, "out_channels")):
        return output.numel() // module.out_channels * (module.weight.numel() if blocks is None else blocks)
    if isinstance(module, nn.Linear) or (blocks is not None and hasattr(module, "in_features")):
        return first.numel() // max(1, module.in_features) * (module.weight.numel() if blocks is None else blocks)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer of GPT-2
        return output.numel() * math.prod(module.weight.shape) // module.nf
    return 0


def measure_latency(original: nn.Module, reorganized: nn.Module, batches: Sequence[Batch]) -> tuple[Latency, ...]:
    """The time of both models on each batch; their runs alternate, so that a busy machine slows both."""
    found = []
    for batch in batches:
        best = [math.inf, math.inf]
        least, most = _RUNS
        started = time.perf_counter()
        with torch.inference_mode():
            for turn in range(most):
                for side, model in enumerate((original, reorganized)):
                    begun = time.perf_counter()
                    batch.run(model)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
                    best[side] = min(best[side], time.perf_counter() - begun)
                if turn + 1 >= least and time.perf_counter() - started > _SECONDS:
                    break
        found.append(Latency(batch.size, *best))
    return tuple(found)
