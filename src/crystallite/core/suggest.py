"""Errors that name the nearest: choices, patterns of layer names, and keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from functools import wraps
from typing import ParamSpec, TypeVar

from crystallite.core.errors import InvalidOption
from crystallite.core.option_types import check_types

__all__ = ["check_choice", "matching", "nearest", "suggest_keywords"]

P = ParamSpec("P")
R = TypeVar("R")


def nearest(word: object, known: Iterable[object]) -> str:
    """A question that names the known word which may have been meant; nothing if none is near.

    >>> nearest("neymann", ["both", "neyman"]), nearest("x", ["both", "neyman"])
    ("; did you mean 'neyman'?", '')
    """
    found = get_close_matches(str(word), [name for name in known if isinstance(name, str)], 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_choice(option: str, value: object, accepted: Sequence[object], or_else: str = "") -> None:
    """Refuse a value that is not among the accepted ones; `or_else` says what else could have been passed.

    >>> check_choice("rule", "neymann", ("both", "neyman"))
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: rule must be one of both, neyman, got 'neymann'; did you mean 'neyman'?
    """
    if not any(value is each or (isinstance(value, str) and value == each) for each in accepted):
        names = ", ".join(map(str, accepted)) + (f" or {or_else}" if or_else else "")
        raise InvalidOption(f"{option} must be one of {names}, got {value!r:.200}{nearest(value, accepted)}")


def matching(
    names: Iterable[str], targets: str | Sequence[str], ignore: str | Sequence[str], called: str = "targets"
) -> list[str]:
    """The names of layers that some pattern of `targets` and none of `ignore` matches.

    A pattern that matches no layer is refused: it would do nothing, silently. called: the option of the first patterns.

    >>> matching(["encoder.0", "encoder.1", "head"], "encoder.*", ["*.1"])
    ['encoder.0']
    >>> matching(["encoder.0", "encoder.1", "head"], ["*"], ignore="haed")
    Traceback (most recent call last):
    crystallite.core.errors.InvalidOption: ignore: no layer with weights matches 'haed'; the nearest is 'head'
    """
    known = list(names)
    taken, left = ([p] if isinstance(p, str) else list(p) for p in (targets, ignore))
    for option, patterns in ((called, taken), ("ignore", left)):
        for pattern in patterns:
            if known and not any(fnmatchcase(name, pattern) for name in known):
                near = max(known, key=lambda name: SequenceMatcher(None, pattern, name).ratio())
                there = f"the nearest is {near!r}" if near else "there is only the model itself, '', which '*' matches"
                raise InvalidOption(f"{option}: no layer with weights matches {pattern!r}; {there}")
    return [n for n in known if any(fnmatchcase(n, p) for p in taken) and not any(fnmatchcase(n, p) for p in left)]


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose error for a mistyped keyword names the nearest: Python does so only from 3.13 on.

    Arguments of another type than the signature says are refused, too.

    >>> @suggest_keywords
    ... def test(*, level=0.01): ...
    >>> test(levle=0.1)
    Traceback (most recent call last):
    TypeError: test() got an unexpected keyword argument 'levle'; did you mean 'level'?
    """
    signature = inspect.signature(function)
    known = signature.parameters

    @wraps(function)
    def checked(*arguments: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in known:
                wrong = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                raise TypeError(wrong + nearest(name, known))
        check_types(function, signature.bind(*arguments, **keywords).arguments)
        return function(*arguments, **keywords)

    return checked
