"""Which `nn.Sequential`s of a model are only ever called as a whole, so that their layers may become one operator."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

__all__ = ["Watch", "whole_by_definition"]

_LOOKED_AT = ("in_features", "out_features", "weight", "bias")


class _Watched(nn.Linear):
    """Remembers that code around it looked at it; its own forward does not count."""

    def __getattribute__(self, name: str) -> Any:
        if name in _LOOKED_AT:
            self.__dict__["_looked_at"].add(self.__dict__["_watched_as"])
        return super().__getattribute__(name)

    def forward(self, input: Tensor) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return F.linear(input, weight, self._parameters["bias"])


class Watch:
    """Follows the members of a model's `nn.Sequential`s through its exported graphs.

    `watch_` prepares a copy that is about to be exported, `read` takes its graph; `whole` are then the names of all
    those whose members ran, each time inside a call of the nn.Sequential, and were not looked at from outside.
    """

    def __init__(self, model: nn.Module) -> None:
        names = dict(model.named_modules(remove_duplicate=False))
        parents = {name: name.rpartition(".")[0] for name in names if name}
        self._members = {name: parent for name, parent in parents.items() if _is_plain(names[parent])}
        self._called: set[str] = set()
        self._apart: set[str] = set()  # those with a member that was called or looked at alone

    def watch_(self, twin: nn.Module) -> None:
        for member, name in self._members.items():
            module = twin.get_submodule(member)
            if type(module) is nn.Linear:
                module.__dict__.update(_looked_at=self._apart, _watched_as=name)
                module.__class__ = _Watched

    def read(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            path = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
            for caller, member in pairwise(path):
                name = self._members.get(member)
                if name is not None:
                    (self._called if name == caller else self._apart).add(name)

    @property
    def whole(self) -> frozenset[str]:
        return frozenset(self._called - self._apart)


def whole_by_definition(model: nn.Module) -> frozenset[str]:
    """The `nn.Sequential`s that nothing but other ones around them calls: no code of the model's own is involved.

    >>> inner = nn.Sequential(nn.Linear(2, 2))
    >>> sorted(whole_by_definition(nn.Sequential(inner, nn.ModuleDict({"a": inner}))))
    ['', '0']
    """
    found = {""} if _is_plain(model) else set()
    for name, module in model.named_modules():
        if name and name.rpartition(".")[0] in found and _is_plain(module):
            found.add(name)
    return frozenset(found)


def _is_plain(module: nn.Module) -> bool:
    """Whether its forward is that of nn.Sequential."""
    return type(module) is nn.Sequential and "forward" not in vars(module)
