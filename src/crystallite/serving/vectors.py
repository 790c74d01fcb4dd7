"""How many vectors of a sample reach the blocks of each operator, counted in one run: what its services compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from crystallite.operators.conv import BlockConv
from crystallite.operators.experts import Experts
from crystallite.serving.cuts.operators import CUTTABLE
from crystallite.serving.example import Example
from crystallite.serving.interface import NamedModel

__all__ = ["count_vectors"]


def count_vectors(model: nn.Module, examples: Iterable[Example], outputs: tuple[str, ...] = ()) -> dict[str, int]:
    """By the name of an operator that can be cut, the vectors, positions or time steps that a call of it brings.

    That is of one sample, of the size that the first example has which the model takes. Of experts it is the share that
    each gets if all get the same. Nothing is known of a model that takes none of the examples.
    """
    operators = {name: module for name, module in model.named_modules() if isinstance(module, CUTTABLE)}
    for example in examples if operators else ():
        found: dict[str, int] = {}

        def count(name: str, module: nn.Module, args: Any, given: Any, output: Any, found: Any = found) -> None:
            found[name] = max(found.get(name, 1), _vectors(module, [*args, *given.values()], output))

        hooks = [
            module.register_forward_hook(_named(count, name), with_kwargs=True) for name, module in operators.items()
        ]
        try:
            with torch.no_grad():
                NamedModel(model, example.positional, outputs)(example.made(1))
            return found
        except Exception:  # whatever the model's own code raises: whoever serves it will say so
            continue
        finally:
            for hook in hooks:
                hook.remove()
    return {}


def _named(count: Any, name: str) -> Any:
    def hook(module: nn.Module, args: Any, given: Any, output: Any) -> None:
        count(name, module, args, given, output)

    return hook


def _vectors(module: nn.Module, given: list[Any], output: Any) -> int:
    """Of one call."""
    first = given[0]
    if isinstance(module, BlockConv):
        return math.prod(output.shape[-len(module.kernel_size) :])
    if isinstance(module, Experts):
        index: Tensor = given[1]
        return math.ceil(index.numel() / len(module.experts))
    if isinstance(first, PackedSequence):
        return len(first.data)
    return math.prod(first.shape[:-1])
