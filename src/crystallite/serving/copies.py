"""Copies of a module that share its weights, so that several batches run its code at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["Copies", "can_be_copied", "copy_sharing_weights"]


def copy_sharing_weights(module: nn.Module) -> nn.Module:
    """A copy of a module with the same parameters and with buffers and attributes of its own."""
    return copy.deepcopy(module, {id(weight): weight for weight in module.parameters()})


def can_be_copied(module: nn.Module) -> bool:
    """Whether `copy_sharing_weights` works; code of somebody's own may hold what cannot be copied, such as a lock."""
    try:
        copy_sharing_weights(module)
    except Exception:  # whatever the code raises
        return False
    return True


class Copies:
    """A copy of a module for every call that is under way.

    Whatever a model's code keeps while it runs, no other call sees. The module itself is not run: copies of it are made
    while others run. One that cannot be copied is lent to one call after the other.

    >>> copies = Copies(nn.Linear(1, 1))
    >>> with copies.lent() as one, copies.lent() as other:
    ...     one is other, one.weight is other.weight
    (False, True)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self.are_possible = module, can_be_copied(module)
        self._idle = [] if self.are_possible else [module]
        self._returned = threading.Condition()

    @contextmanager
    def lent(self) -> Iterator[nn.Module]:
        """A module that no other thread runs meanwhile."""
        with self._returned:
            if not self.are_possible:
                self._returned.wait_for(lambda: self._idle)
            module = self._idle.pop() if self._idle else copy_sharing_weights(self._module)
        try:
            yield module
        finally:
            with self._returned:
                self._idle.append(module)
                self._returned.notify()
