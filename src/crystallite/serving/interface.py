"""`NamedModel`: a model as a function of named tensors, and any piece of one called in that way."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.data.outputs import tensors
from crystallite.serving.signature import OUTPUT, Tensors

__all__ = ["NamedModel", "TakesNames", "computed", "only"]

# what a model of transformers returns beside its answer: caches, and what its layers saw
_INSIDE = re.compile(
    r"loss$|past_|.*hidden_states|.*attentions|.*router_|cache|state$|mems|rnn_state|aux_loss|encoder_last|.*[.\[]"
)


class TakesNames(nn.Module):
    """A module that is called with named tensors and returns such; any other takes one tensor and returns one."""


class NamedModel(TakesNames):
    """A model called with named tensors, some of them by position, that returns its outputs by name.

    >>> model = NamedModel(nn.Bilinear(2, 3, 1), positional=("input1", "input2"))
    >>> {name: list(y.shape) for name, y in model({"input1": torch.ones(4, 2), "input2": torch.ones(4, 3)}).items()}
    {'output': [4, 1]}
    """

    def __init__(self, model: nn.Module, positional: tuple[str, ...] = (), outputs: tuple[str, ...] = ()) -> None:
        """outputs: names of those that are returned; none: all but caches and what layers saw."""
        super().__init__()
        self.model, self.positional, self.outputs = model, positional, outputs
        known = inspect.signature(model.forward).parameters
        self._fixed: dict[str, Any] = {name: value for name, value in _FIXED.items() if name in known}

    def forward(self, given: Tensors) -> dict[str, Tensor]:
        named = dict(given)
        first = [named.pop(name) for name in self.positional if name in named]
        output = self.model(*first, **named, **self._fixed)
        if isinstance(output, Tensor):
            return {OUTPUT: output}
        found = {path.removeprefix(f"{OUTPUT}."): value for path, value in tensors(output).items()}
        if self.outputs:
            if missing := [name for name in self.outputs if name not in found]:
                raise InvalidOption(f"outputs: expected some of {', '.join(found)}, got {missing[0]!r:.80}")
            return {name: found[name] for name in self.outputs}
        if isinstance(output, (tuple, list)):
            return found
        return {name: value for name, value in found.items() if not _INSIDE.match(name)} or found


_FIXED = {"use_cache": False, "return_dict": True}  # a request is answered once: nothing is kept for the next token


def computed(module: nn.Module, given: Tensors) -> Tensors:
    """What a piece makes of named tensors; one inside a model takes a single tensor, whatever its name."""
    with torch.no_grad():
        if isinstance(module, TakesNames):
            found: dict[str, Tensor] = module(given)
            return found
        return {OUTPUT: module(only(given))}


def only(given: Tensors) -> Tensor:
    """The one tensor that there is."""
    (x,) = given.values()
    return x
