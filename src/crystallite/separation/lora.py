"""LoRA of the PEFT library on layers of blocks: an adapter that stays inside the blocks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CrystalliteError, InvalidOption
from crystallite.operators.linear import BlockLinear

__all__ = ["lora_for_blocks"]


def lora_for_blocks(config: Any) -> Any:
    """The same `peft.LoraConfig`, which from now on knows what to do with layers of blocks among its targets.

    An adapter of rank r adds B_i A_i of rank r to every block i and nothing between blocks, so that blocks stay
    independent, and merging gives blocks again. The two layers of a `LowRankLinear`
    are PEFT's own. PEFT does not save this knowledge:
    give it to a config that was loaded too. Variants of LoRA (DoRA and others) are for dense layers.

    ```python
    adapted = peft.get_peft_model(small, lora_for_blocks(peft.LoraConfig(r=8, target_modules=["0"])))
    small = adapted.merge_and_unload()  # after training
    ```
    """
    config._register_custom_module({BlockLinear: _layer_class()})
    return config


def _cells(layer: BlockLinear) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Where the layer has weights: stacks (count, height, width), their rows (count, height), columns (count, width).

    The stacks are the layer's own memory, so what is added to them is added to the layer.
    """
    places = torch.arange(max(layer.out_features, layer.in_features), device=layer.empty.device)
    rows = places if layer.outputs is None else torch.argsort(layer.outputs)  # dormant ones last
    columns = places if layer.columns is None else layer.columns
    row = column = 0
    for stack in layer.weights:
        count, height, width = stack.shape
        own = rows[row : row + count * height], columns[column : column + count * width]
        yield stack.data, own[0].view(count, height), own[1].view(count, width)
        row, column = row + count * height, column + count * width


@cache
def _layer_class() -> type[nn.Module]:
    try:
        dense: Any = importlib.import_module("peft.tuners.lora.layer")
    except ImportError:
        raise CrystalliteError("LoRA needs the PEFT library: pip install peft") from None

    class LoraBlockLinear(dense.Linear):  # type: ignore[misc]
        """A layer of blocks with adapters."""

        def __init__(self, base_layer: BlockLinear, adapter_name: str, **options: Any) -> None:
            super().__init__(base_layer, adapter_name, **options)
            if self.lora_variant or self.lora_bias[adapter_name]:
                raise InvalidOption("LoRA on blocks: expected plain LoRA without a bias, got a variant of it")

        def _get_in_out_features(self, module: BlockLinear) -> tuple[int, int]:
            return module.in_features, module.out_features  # PEFT warns of layers that it does not know

        def forward(self, x: Tensor) -> Tensor:
            if self.disable_adapters and self.merged:
                self.unmerge()
            result: Tensor = self.base_layer(x)
            if self.disable_adapters or self.merged:
                return result
            for name in self.active_adapters:
                if name in self.lora_A:
                    a, b = self.lora_A[name].weight, self.lora_B[name].weight  # (r, inputs), (outputs, r)
                    given = self.lora_dropout[name](x.to(a.dtype))
                    for _, rows, columns in _cells(self.get_base_layer()):
                        inner = torch.einsum("...kc,rkc->...kr", given[..., columns], a[:, columns])
                        added = torch.einsum("...kr,khr->...kh", inner, b[rows]) * self.scaling[name]
                        result = result.index_add(-1, rows.flatten(), added.flatten(-2).to(result.dtype))
            return result

        @torch.no_grad()
        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """Add adapters to the blocks."""
            for name in dense.check_adapters_to_merge(self, adapter_names):
                if name in self.lora_A:
                    self._add_(name, 1.0, safe_merge)
                    self.merged_adapters.append(name)

        @torch.no_grad()
        def unmerge(self) -> None:
            """Take merged adapters out of the blocks again."""
            while self.merged_adapters:
                self._add_(self.merged_adapters.pop(), -1.0, False)

        def _add_(self, name: str, sign: float, safe: bool) -> None:
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            if safe and not bool(a.isfinite().all() and b.isfinite().all()):
                raise ValueError(f"the adapter {name} has weights that are not finite")
            for stack, rows, columns in _cells(self.get_base_layer()):
                stack += (sign * self.scaling[name] * (b[rows] @ a[:, columns].transpose(0, 1))).to(stack.dtype)

    return LoraBlockLinear
