"""Multiply-adds of a model as PyTorch executes them: an oracle that knows nothing of our operators and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry

from crystallite.data.batch import Batch

__all__ = ["Count", "count"]

aten = torch.ops.aten
_WITH_WEIGHTS = (aten.mm, aten.addmm, aten.convolution, aten._convolution, aten.mkldnn_rnn_layer)
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # PyTorch's counter does not know it


@dataclass(frozen=True)
class Count:
    """Multiply-adds of one batch."""

    weights: int  # products of activations with weights
    others: int  # products of activations with each other: attention
    rebuilt: int  # products of weights with each other, to have a whole weight: once in a call, not for each position

    def share_of(self, dense: Count) -> float:
        """Of what the dense model needs, as far as weights are used."""
        return self.weights / max(dense.weights, 1)

    @property
    def total(self) -> int:
        return self.weights + self.others + self.rebuilt


class _Counter(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.held = {_memory(p) for p in model.parameters() if p.ndim > 1} - {0}
        self.weights = self.others = self.rebuilt = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        macs = _macs(func._overloadpacket, args, kwargs, out)
        if macs and not self.paused:
            operands = [t for t in tree_leaves(args) if isinstance(t, Tensor) and t.ndim > 1]
            held = [t for t in operands if _memory(t) in self.held]
            if len(held) > 1 and len(held) == len(operands):
                self.rebuilt += macs
            elif held or func._overloadpacket in _WITH_WEIGHTS:
                self.weights += macs
            else:
                self.others += macs
        return out


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # quantised tensors wrap others
        return 0


def _macs(packet: Any, args: tuple, kwargs: dict, out: Any) -> int:
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=out) // 2
    if packet is aten._convolution:
        return conv_flop_count(args[0].shape, args[1].shape, out.shape, transposed=args[6]) // 2
    if packet is aten.mkldnn_rnn_layer:  # one direction of one layer of an LSTM: input (steps, batch, features)
        return args[0].shape[0] * args[0].shape[1] * (args[1].numel() + args[2].numel())
    if packet is aten._grouped_mm:  # (rows of all experts, features) × (experts, features, outputs)
        return args[0].shape[0] * args[0].shape[1] * args[1].shape[-1]
    if packet is _ATTENTION:
        (batch, heads, queries, width), keys = args[0].shape, args[1].shape[2]
        return 2 * batch * heads * queries * keys * width
    return 0


def count(model: nn.Module, batch: Batch) -> Count:
    """Multiply-adds that a model needs for a batch, counted where they happen.

    Where somebody counts, operators of ours leave their compiled kernels for PyTorch's operations. Recurrent layers of
    low rank then multiply by the product of their factors, which they do not otherwise, so those are counted by the
    factors that they hold. PyTorch's own fast path of attention, one operation for all, is switched off.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    counter, handles = _Counter(model), []

    def enter(module: nn.Module, inputs: Any) -> None:
        counter.paused = True

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        counter.paused = False
        steps = output[0].shape[0] * output[0].shape[1]
        counter.weights += steps * sum(p.numel() for p in module.parameters() if p.ndim > 1)

    for module in model.modules():
        if type(module).__name__ == "LowRankRecurrent":
            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        with counter:
            batch.run(model)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for handle in handles:
            handle.remove()
    return Count(counter.weights, counter.others, counter.rebuilt)
