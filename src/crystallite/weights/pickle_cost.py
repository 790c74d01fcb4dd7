"""What a pickle would take if it were followed, reckoned from its instructions without following one.

A byte of pickle can ask for an object of 200, and a string or list that is there once can be copied as often as
somebody asks. torch's unpickler runs nothing but what makes tensors, and has no bound for either.
"""

from __future__ import annotations

import pickletools
from typing import IO

__all__ = ["pickle_cost"]

_COSTS = {
    **{"REDUCE": 800, "NEWOBJ": 800, "BUILD": 500, "BINPERSID": 200, "EMPTY_SET": 250, "EMPTY_DICT": 250},
    **{"EMPTY_LIST": 100, "MARK": 80, "LONG_BINPUT": 60, "MEMOIZE": 60, "EMPTY_TUPLE": 16, "BINGET": 16},
    **{"BININT1": 16, "NONE": 16, "NEWTRUE": 16, "NEWFALSE": 16},
}
_OTHER = 48  # a number or a short text, and its place on the stack
_PUT, _GET = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), ("GET", "BINGET", "LONG_BINGET")
_INTO = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS")
_CALLS = ("REDUCE", "NEWOBJ", "BUILD")
_OF_ANY_SIZE = ("builtins bytearray",)  # by a number alone, and filled with zeros
_ITEM = 24  # bytes of an entry of a list, tuple or dict

# What is known of an object: the bytes of a shallow copy, and those of such copies of what it holds.
_Object = list[int]


def pickle_cost(stream: IO[bytes], most: int) -> int:
    """Bytes that one pickle would take, roughly; counted no further than beyond `most`.

    Time follows from it as well: nothing that an instruction does takes longer than writing so many bytes.

    Raises:
        ValueError: it is no pickle; LookupError: it takes what is not there.

    >>> import io
    >>> pickle_cost(io.BytesIO(b"]."), 10**6), pickle_cost(io.BytesIO(b"]" * 10**6 + b"."), 10**6)
    (148, 1000100)
    """
    cost = 0
    stack: list[_Object] = []
    marks: list[int] = []
    memo: dict[int, _Object] = {}
    for operation, argument, _ in pickletools.genops(stream):
        name = operation.name
        cost += most + 1 if argument in _OF_ANY_SIZE else _COSTS.get(name, _OTHER)
        if cost > most:
            break
        if name == "MARK":
            marks.append(len(stack))
        elif name in _PUT:
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name in _GET:
            stack.append(memo[int(argument or 0)])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            takes = operation.stack_before
            start = marks.pop() if pickletools.markobject in takes else len(stack) - len(takes) + (name in _INTO)
            if start < 0:
                raise IndexError("an empty stack")
            items = stack[start:]
            del stack[start:]
            inside = sum(item[0] for item in items)
            if name in _INTO:
                stack[-1][0] += _ITEM * len(items)
                stack[-1][1] += inside
            elif name in _CALLS:  # may copy each of its arguments, but not what these hold
                copied = items[-1][0] + items[-1][1]
                cost += copied
                stack.append([copied, copied])
            elif operation.stack_after:
                text = len(argument) if isinstance(argument, (str, bytes)) else 0
                stack.append([text + _ITEM * len(items), inside])
    return cost
