"""Frozen dataclasses as JSON values and back, by their type hints: what comes from a file is believed in no field.

Integers in a `tuple[int, ...]` and in a tensor are one line of text: a list would be a line per neuron.
"""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

__all__ = ["from_plain", "to_plain"]


def to_plain(kind: Any, value: Any) -> Any:
    """The value, of a type that is a dataclass or made of JSON's own types, as JSON values.

    >>> to_plain(tuple[int, ...], (2, 0, 1)), to_plain(dict[str, float | None], {"a": None})
    ('2 0 1', {'a': None})
    """
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return {field.name: to_plain(hints[field.name], getattr(value, field.name)) for field in fields(kind)}
    if kind is Tensor or _is_index(kind):
        return " ".join(map(str, value.tolist() if kind is Tensor else value))
    if get_origin(kind) is tuple:
        return [to_plain(inner, item) for inner, item in zip(_members(kind, len(value)), value, strict=True)]
    if get_origin(kind) is dict:
        return {str(name): to_plain(get_args(kind)[1], item) for name, item in value.items()}
    if get_origin(kind) in (Union, UnionType):
        known = _dataclasses(kind)
        own = next((cls for cls in type(value).__mro__ if cls in known.values()), None)
        if own is None:
            pairs = next((member for member in get_args(kind) if get_origin(member) is tuple), None)
            return value if pairs is None or value is None else to_plain(pairs, value)
        return ({"type": own.__name__} if len(known) > 1 else {}) | to_plain(own, value)
    return kind(value) if kind in (int, float) else value  # NumPy's numbers too


def from_plain(kind: Any, plain: Any, name: str) -> Any:
    """The value that `to_plain` gave; TypeError or ValueError says what was expected of the field called `name`.

    >>> from_plain(tuple[int, ...], "2 0 1", "order")
    (2, 0, 1)
    >>> from_plain(float, "a", "error")
    Traceback (most recent call last):
    TypeError: error: expected float, got 'a'
    """
    if is_dataclass(kind):
        return _built(kind, plain, name)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _of_union(kind, plain, name)
    if kind is Tensor or _is_index(kind):
        numbers = [int(number) for number in from_plain(str, plain, name).split()]
        return torch.tensor(numbers, dtype=torch.int64) if kind is Tensor else tuple(numbers)
    if origin is tuple:
        items = _checked(list, plain, name)
        members = _members(kind, len(items))
        if len(members) != len(items):
            raise ValueError(f"{name}: expected {len(members)} values, got {len(items)}")
        return tuple(from_plain(inner, item, name) for inner, item in zip(members, items, strict=True))
    if origin is dict:
        inner = get_args(kind)[1]
        return {key: from_plain(inner, item, f"{name}.{key:.80}") for key, item in _checked(dict, plain, name).items()}
    if origin is Literal:
        if plain not in get_args(kind):
            raise ValueError(f"{name}: expected one of {', '.join(map(str, get_args(kind)))}, got {plain!r:.80}")
        return plain
    if kind is float and type(plain) is int:
        return float(plain)
    return _checked(kind, plain, name)


def _built(kind: Any, plain: Any, name: str) -> Any:
    given, hints = _checked(dict, plain, name), get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    if unknown := given.keys() - known.keys():
        raise ValueError(f"{name}: expected {', '.join(known)}, got {min(unknown)!r:.80}")
    for field in known.values():
        if field.name not in given and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"no {name}.{field.name}")
    return kind(**{field: from_plain(hints[field], value, f"{name}.{field}") for field, value in given.items()})


def _of_union(kind: Any, plain: Any, name: str) -> Any:
    classes = _dataclasses(kind)
    if isinstance(plain, dict) and classes:
        tag = plain.get("type") if len(classes) > 1 else next(iter(classes))
        if not isinstance(tag, str) or tag not in classes:
            raise ValueError(f"{name}: expected one of {', '.join(classes)}, got {tag!r:.80}")
        return _built(classes[tag], {key: item for key, item in plain.items() if key != "type"}, name)
    simple = [member for member in get_args(kind) if not is_dataclass(member)]
    for member in simple:
        if type(plain) is member or (member is float and type(plain) is int):
            return plain
        if get_origin(member) is tuple and isinstance(plain, list):
            return from_plain(member, plain, name)
    expected = ", ".join([*classes, *("None" if member is NoneType else str(member) for member in simple)])
    raise TypeError(f"{name}: expected one of {expected}, got {plain!r:.80}")


def _checked(kind: Any, plain: Any, name: str) -> Any:
    if type(plain) is not kind:  # true is no number
        raise TypeError(f"{name}: expected {kind.__name__}, got {plain!r:.80}")
    return plain


def _dataclasses(kind: Any) -> dict[str, Any]:
    members: list[Any] = [member for member in get_args(kind) if is_dataclass(member)]
    return {member.__name__: member for member in members}


def _is_index(kind: Any) -> bool:
    return bool(kind == tuple[int, ...])


def _members(kind: Any, count: int) -> tuple[Any, ...]:
    """The types of a tuple's items: each its own, or the same for all of them."""
    members = get_args(kind)
    return (members[0],) * count if len(members) == 2 and members[1] is Ellipsis else members
