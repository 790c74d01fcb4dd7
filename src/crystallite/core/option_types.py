"""Arguments compared with the types that a function's signature names, so that a wrong one is an error of ours."""

from __future__ import annotations

import numbers
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from crystallite.core.errors import InvalidOption

__all__ = ["check_types"]

_WORDS = {
    "Module": "an nn.Module", "int": "an integer", "float": "a number", "str": "a string", "bool": "True or False",
    "dict": "a dict", "Mapping": "a mapping",
}  # fmt: skip
_NUMBERS: dict[type, type] = {int: numbers.Integral, float: numbers.Real}  # NumPy's too


def check_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments of another type than the signature says; types that only their function knows pass.

    >>> def halve(count: int, *, targets: str | Sequence[str] = "*") -> None: ...
    >>> check_types(halve, {"count": 2, "targets": ["a"]})
    >>> check_types(halve, {"count": 2.5})
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: count: expected an integer, got 2.5
    >>> check_types(halve, {"count": 2, "targets": 3})
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: targets: expected a string or a sequence of strings, got 3
    """
    hints = _hints(function)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise InvalidOption(f"{name}: expected {_named(hints[name])}, got {_shown(value)}")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's arguments, by name; none where they are known to type checkers only."""
    known: dict[str, Any] | None = getattr(function, "_argument_types", None)
    if known is None:
        try:
            known = typing.get_type_hints(function)
        except NameError:
            known = {}
        function._argument_types = known  # type: ignore[attr-defined]
    return known


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(kind))
    if origin is Literal:
        return isinstance(value, str)  # which of them is checked by name
    if origin in (Sequence, Iterable) or kind in (Sequence, Iterable):
        inner = get_args(kind)[:1]
        if not isinstance(value, Iterable) or (isinstance(value, (str, bytes, Mapping)) and inner != (Any,)):
            return False
        return not isinstance(value, Sized) or all(_fits(item, each) for item in value for each in inner)
    if kind in (None, NoneType):
        return value is None
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"  # NumPy's
    if kind in _NUMBERS:
        too_large = isinstance(value, numbers.Integral) and abs(int(value)) >= 2**63  # for PyTorch and NumPy
        return isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool) and not too_large
    base = origin or kind
    if base is Any or not isinstance(base, type) or getattr(base, "_is_protocol", False):
        return True
    return isinstance(value, base)


def _named(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_named(member) for member in get_args(kind)))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if origin in (Sequence, Iterable):
        return f"a sequence of {_named(get_args(kind)[0]).removeprefix('a ').removeprefix('an ')}s"
    if origin is os.PathLike or kind is os.PathLike:
        return "a path"
    name = "None" if kind in (None, NoneType) else getattr(kind, "__name__", str(kind))
    return _WORDS.get(name, name)


def _shown(value: Any) -> str:
    """Short values as they are, others by their type."""
    text = repr(value) if isinstance(value, (bool, int, float, str, list, tuple, dict, NoneType)) else ""
    return text if 0 < len(text) <= 80 else f"a {type(value).__name__}"
