"""Modules that multiply several weights themselves, expanded into layers that can be taken apart, and collapsed again.

An expanded module has the interface of what it stands for, so that a model runs, is traced and is saved with it as with
any other, and `find_units` sees the layers inside it. Where none of them has changed, it is collapsed in the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from crystallite.models.experts import collapse_experts, expand_experts
from crystallite.models.layers import find_units
from crystallite.models.record import find_record, set_record_
from crystallite.models.swap import put_everywhere_
from crystallite.operators.attention import ExpandedAttention
from crystallite.operators.experts import holds_stacks

__all__ = ["collapse_", "expand_", "expanded"]


@dataclass(frozen=True)
class _Composite:
    """A kind of such modules; all three take a model, the last two change it in place and return it."""

    is_held: Callable[[nn.Module], bool]
    expand: Callable[[nn.Module], nn.Module]
    collapse: Callable[[nn.Module], nn.Module]


def expand_(model: nn.Module) -> nn.Module:
    """The model, in place, with layers wherever a module multiplies several weights itself and allows it.

    >>> [unit.name for unit in find_units(expand_(nn.TransformerEncoderLayer(4, 2, 8)), ["*"], [])]
    ['self_attn.q', 'self_attn.k', 'self_attn.v', 'self_attn.out', 'linear1', 'linear2']
    """
    return _with_its_record(model, [composite.expand for composite in _COMPOSITES])


def expanded(model: nn.Module) -> nn.Module:
    """The model itself if it holds no such module, an expanded copy otherwise."""
    return expand_(copy.deepcopy(model)) if any(each.is_held(model) for each in _COMPOSITES) else model


def collapse_(model: nn.Module) -> nn.Module:
    """The model, in place, with the modules that it had wherever the layers of an expanded one are what they were.

    >>> type(collapse_(expand_(nn.MultiheadAttention(4, 2)))).__name__
    'MultiheadAttention'
    """
    return _with_its_record(model, [composite.collapse for composite in _COMPOSITES])


def _with_its_record(model: nn.Module, changes: Iterable[Callable[[nn.Module], nn.Module]]) -> nn.Module:
    """The model after some changes; as a whole it may be another module then."""
    record = find_record(model)
    for change in changes:
        model = change(model)
    if record is not None:
        set_record_(model, record)
    return model


def _holds_attention(model: nn.Module) -> bool:
    return any(isinstance(module, nn.MultiheadAttention) for module in model.modules())


def _expand_attention(model: nn.Module) -> nn.Module:
    for unit in find_units(model, ["*"], []) if _holds_attention(model) else ():
        if isinstance(unit.module, nn.MultiheadAttention) and not unit.reason:
            model = put_everywhere_(model, unit.name, ExpandedAttention.from_dense(unit.module))
    return model


def _collapse_attention(model: nn.Module) -> nn.Module:
    for name, module in list(model.named_modules()):
        dense = module.to_dense() if isinstance(module, ExpandedAttention) else None
        if dense is not None:
            model = put_everywhere_(model, name, dense)
    return model


def _holds_experts(model: nn.Module) -> bool:
    return any(map(holds_stacks, model.modules()))


_COMPOSITES = (
    _Composite(_holds_attention, _expand_attention, _collapse_attention),
    _Composite(_holds_experts, expand_experts, collapse_experts),
)
