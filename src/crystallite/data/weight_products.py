"""How often a model's code multiplies weights itself, without a call of the layers that hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crystallite.data.batch import Batch

__all__ = ["multiplied_rows"]

_aten: Any = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)  # all others are made of them; the factors come last


def multiplied_rows(model: nn.Module, names: Iterable[str], batch: Batch) -> dict[str, int]:
    """How many rows the weight of each of some layers is multiplied with on a batch, whoever does it.

    WavLM hands the weights of its projections to PyTorch's attention, so that no hook of a layer sees them run.

    >>> class Own(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.held, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)
    ...     def forward(self, x):
    ...         return nn.functional.linear(x, self.held.weight)
    >>> multiplied_rows(Own(), ["held", "idle"], Batch(0, 5, (torch.zeros(5, 4, 3),)))
    {'held': 20, 'idle': 0}
    """
    weights = {name: getattr(model.get_submodule(name), "weight", None) for name in names}
    held = {_memory(weight): name for name, weight in weights.items() if isinstance(weight, nn.Parameter)}
    if not held:
        return dict.fromkeys(weights, 0)
    with _Products(held) as products:
        batch.run(model)
    return {name: products.rows[name] for name in weights}


class _Products(TorchDispatchMode):
    def __init__(self, held: Mapping[int, str]) -> None:
        super().__init__()
        self.held, self.rows = held, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in _PRODUCTS:
            first, second = args[-2:]
            for weight, other in ((first, second), (second, first)):
                if name := self.held.get(_memory(weight)):
                    self.rows[name] += other.numel() // max(1, first.shape[-1])
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
