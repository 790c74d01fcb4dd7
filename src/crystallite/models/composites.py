"""Modules that multiply several weights themselves, expanded into layers that can be taken apart, and collapsed again.

An expanded module has the interface of what it stands for, so that a model runs, is traced and is saved with it as with
any other. `find_units` sees the layers inside it. Its class has `from_dense` and `to_dense`, which gives None where one
of its layers is no longer what it was.
"""

from __future__ import annotations

import copy

from torch import nn

from crystallite.models.layers import find_units
from crystallite.models.record import find_record, set_record_
from crystallite.models.swap import put_everywhere_
from crystallite.operators.attention import ExpandedAttention

__all__ = ["collapse_", "expand_", "expanded"]

_EXPANDED = {"attention": ExpandedAttention}  # by the kind of a unit


def expand_(model: nn.Module) -> nn.Module:
    """The model, in place, with the projections of every attention that allows it as layers; others stay as they are.

    >>> [unit.name for unit in find_units(expand_(nn.TransformerEncoderLayer(4, 2, 8)), ["*"], [])]
    ['self_attn.q', 'self_attn.k', 'self_attn.v', 'self_attn.out', 'linear1', 'linear2']
    """
    for unit in find_units(model, ["*"], []):
        if unit.kind in _EXPANDED and not unit.reason:
            made = _EXPANDED[unit.kind].from_dense(unit.module)  # type: ignore[arg-type]
            model = put_everywhere_(model, unit.name, made)
    return model


def expanded(model: nn.Module) -> nn.Module:
    """The model itself if there is nothing to expand, an expanded copy otherwise."""
    if any(unit.kind in _EXPANDED and not unit.reason for unit in find_units(model, ["*"], [])):
        return expand_(copy.deepcopy(model))
    return model


def collapse_(model: nn.Module) -> nn.Module:
    """The model, in place, with PyTorch's own module wherever the layers of an expanded one are what they were.

    >>> type(collapse_(expand_(nn.MultiheadAttention(4, 2)))).__name__
    'MultiheadAttention'
    """
    for name, module in list(model.named_modules()):
        if type(module) in _EXPANDED.values():
            dense = module.to_dense()  # type: ignore[operator]
            if dense is not None:
                record = find_record(model)
                model = put_everywhere_(model, name, dense)
                if record is not None:
                    set_record_(model, record)
    return model
