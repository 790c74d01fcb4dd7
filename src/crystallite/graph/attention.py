"""Attention in a graph: which numbers of which layers its heads compare and hand on, however they are stored.

Between a layer and attention numbers are only moved: cut into heads, turned, repeated for queries that share them,
taken out of a product that makes queries, keys and values at once. Each is followed by moving its index instead.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from crystallite.graph.operator_rules import operator_name, stored_weight

__all__ = ["Attention", "HeadNumbers", "find_attentions", "layer_products"]

_SAME = {
    "alias", "clone", "contiguous", "detach", "dropout", "lift_fresh", "lift_fresh_copy", "to", "type_as", "_to_copy",
}  # fmt: skip
_MOVES = {
    "broadcast_to", "cat", "chunk", "expand", "expand_as", "flatten", "index", "index_select", "movedim", "narrow",
    "permute", "repeat", "repeat_interleave", "reshape", "roll", "select", "slice", "split", "split_with_sizes",
    "squeeze", "stack", "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "unsafe_split", "view",
    "_reshape_alias", "_unsafe_view",
}  # fmt: skip
_MASKS = {"masked_fill", "mul", "nan_to_num", "where"}
_PRODUCTS = {"baddbmm", "bmm", "matmul"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
_WEIGHTED = {"linear", "addmm", "mm", "matmul"}
_Scores = tuple[Node, Node, bool]  # queries, keys, and whether these are (numbers, positions)


class _Unclear(Exception):
    """Why numbers cannot be followed."""


@dataclass(frozen=True)
class HeadNumbers:
    """The numbers of heads as rows, or columns, of a layer's weight as (outputs, inputs)."""

    layer: str
    places: Tensor  # (heads, queries, numbers); queries: heads of queries that share a head of keys and values


@dataclass(frozen=True)
class Attention:
    """What an attention compares and what it hands on; None and a reason where that cannot be followed."""

    values: HeadNumbers | None = None  # rows; one query
    outputs: HeadNumbers | None = None  # columns that read them
    queries: HeadNumbers | None = None  # rows
    keys: HeadNumbers | None = None  # rows; one query
    why_not_values: str = ""
    why_not_scores: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """Those that are known, each once, those of queries and keys first."""
        parts = (self.queries, self.keys, self.values, self.outputs)
        return tuple(dict.fromkeys(part.layer for part in parts if part is not None))


def find_attentions(graph: Graph, names: Mapping[Node, str], constants: Mapping[Node, Tensor]) -> list[Attention]:
    """Every attention of a graph, in its order.

    names: of the parameters that nodes are; constants: values of nodes that are no inputs.
    """
    paths = _Paths(layer_products(graph, names), constants)
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if operator_name(node) == "scaled_dot_product_attention":
            query, key, value = node.args[:3]
            found.append(_attention(paths, node, value, (query, key, False)))
        elif (
            operator_name(node) in _PRODUCTS
            and operator_name(node) != "baddbmm"
            and (softmax := _from_softmax(node.args[0]))
        ):
            scores = _scores(softmax)
            found.append(_attention(paths, node, node.args[1], scores))
    return found


def layer_products(graph: Graph, names: Mapping[Node, str]) -> dict[Node, str]:
    """The products with a stored weight, and the sums of such a product and its bias: node → layer."""
    found: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if operator_name(node) in _WEIGHTED:
            weight = node.args[2] if operator_name(node) == "addmm" else node.args[1]
            owner, _, last = names.get(stored_weight(weight), "").rpartition(".")
            if last == "weight":
                found[node] = owner
        elif operator_name(node) == "add" and names.get(node.args[1], "") == f"{found.get(node.args[0])}.bias":
            found[node] = found[node.args[0]]
    return found


def _attention(paths: _Paths, applied: Node, value: Node, scores: _Scores | str) -> Attention:
    found = Attention()
    try:
        values, outputs = _values(paths, applied, value)
        found = replace(found, values=values, outputs=outputs)
    except _Unclear as unclear:
        found = replace(found, why_not_values=str(unclear))
    try:
        if isinstance(scores, str):
            raise _Unclear(scores)
        queries, keys = _compared(paths, *scores)
        return replace(found, queries=queries, keys=keys)
    except _Unclear as unclear:
        return replace(found, why_not_scores=str(unclear))


def _values(paths: _Paths, applied: Node, value: Node) -> tuple[HeadNumbers, HeadNumbers]:
    """The rows that write what heads hand on, and the columns that read it."""
    layer, moved = paths.back(value, "values", strict=True)
    rows = _first_positions(moved, "values")  # (all heads of all samples, numbers)
    shape = _shape(applied)
    heads, width = math.prod(shape[:-2]), shape[-1]
    if heads % len(rows) or width != rows.shape[1]:
        raise _Unclear("its values are shared in a way that is not known")
    number = torch.arange(heads * width).view(*shape[:-2], 1, width).expand(*shape)
    reader, read = paths.forward(applied, number)
    places = read.flatten(0, -2)[0]  # (inputs of the reader,) of the first position of the first sample
    owner = rows[places // width // (heads // len(rows)), places % width]
    return _shared(layer, reader, owner, rows, width)


def _shared(layer: str, reader: str, owner: Tensor, rows: Tensor, width: int) -> tuple[HeadNumbers, HeadNumbers]:
    """Rows that are heads of values, in order, and the columns that read each of their numbers."""
    used = set(owner.tolist())
    heads = list(dict.fromkeys(tuple(row) for row in rows.tolist() if set(row) <= used))
    if len(used) != len(heads) * width or {row for head in heads for row in head} != used:
        raise _Unclear("its heads overlap")
    known = {row: number for number, row in enumerate(row for head in heads for row in head)}
    columns: list[list[int]] = [[] for _ in known]
    for column, row in enumerate(owner.tolist()):
        columns[known[row]].append(column)
    if len({len(own) for own in columns}) != 1:
        raise _Unclear("some of its numbers are read more often than others")
    written = torch.tensor(heads).view(len(heads), 1, width)
    read = torch.tensor(columns).view(len(heads), width, -1).mT
    return HeadNumbers(layer, written), HeadNumbers(reader, read)


def _compared(paths: _Paths, query: Node, key: Node, turned: bool) -> tuple[HeadNumbers, HeadNumbers]:
    """The rows of queries and keys; what lies before the products may mix numbers of a head: see the trials."""
    of_query, moved_query = paths.back(query, "queries", strict=False)
    of_key, moved_key = paths.back(key, "keys", strict=False)
    moved_key = moved_key.mT if turned else moved_key
    queries, keys = _first_positions(moved_query, "queries"), _first_positions(moved_key, "keys")
    if queries.shape[1] != keys.shape[1] or len(queries) % len(keys):
        raise _Unclear("its keys are shared in a way that is not known")
    owner = keys.repeat_interleave(len(queries) // len(keys), 0)  # (queries, numbers)
    groups: dict[tuple[int, ...], list[list[int]]] = {}
    for own, row in zip(queries.tolist(), owner.tolist(), strict=True):
        heads = groups.setdefault(tuple(row), [])
        if own not in heads:  # the same head of another sample
            heads.append(own)
    if len({len(heads) for heads in groups.values()}) != 1:
        raise _Unclear("some of its keys are compared with more queries than others")
    every = [row for heads in groups.values() for head in heads for row in head]
    if len(set(every)) != len(every) or len({row for head in groups for row in head}) != len(groups) * keys.shape[1]:
        raise _Unclear("its heads overlap")
    return (
        HeadNumbers(of_query, torch.tensor(list(groups.values()))),
        HeadNumbers(of_key, torch.tensor(list(groups)).unsqueeze(1)),
    )


def _first_positions(moved: Tensor, what: str) -> Tensor:
    """(heads of all samples, numbers) of indices (…, positions, numbers) that are the same at all positions."""
    if moved.ndim < 3 or not torch.equal(moved, moved[..., :1, :].expand_as(moved)):
        raise _Unclear(f"its {what} are not kept apart from positions")
    return moved[..., 0, :].flatten(0, -2)


class _Paths:
    """Follows numbers from layers to attention and from there to layers."""

    def __init__(self, layers: Mapping[Node, str], constants: Mapping[Node, Tensor]) -> None:
        self.layers, self.constants = layers, constants

    def back(self, node: Node, what: str, strict: bool) -> tuple[str, Tensor]:
        """The layer that wrote a tensor, and for each of its elements the output of that layer that it is.

        strict: numbers are only moved; otherwise the first of the tensors that an operator combines is followed.
        """
        sources: dict[Node, Tensor] = {}

        def index(node: Node) -> Tensor:
            if node in self.layers:
                shape = _shape(node)
                sources[node] = torch.arange(shape[-1]).expand(shape).contiguous()
                return sources[node]
            if node in self.constants:
                return self.constants[node]
            if node.op != "call_function":
                raise _Unclear(f"its {what} are no outputs of a layer")
            moved = _move(node, index)
            if moved is not None:
                return moved
            if not strict:
                for part in node.all_input_nodes:
                    if _depends(part, self.layers) and _shape(part) == _shape(node):
                        return index(part)
            raise _Unclear(f"its {what} pass through {operator_name(node)}")

        moved = index(node)
        if len(sources) != 1 or len(set(map(self.layers.get, sources))) != 1:
            raise _Unclear(f"its {what} come from {len(sources)} layers")
        (source,) = sources
        return self.layers[source], moved

    def forward(self, node: Node, value: Tensor) -> tuple[str, Tensor]:
        """The only layer that reads a tensor, and what it reads where the tensor has this value."""
        while True:
            readers = [user for user in node.users if not operator_name(user).startswith(("_assert", "sym_"))]
            if len(readers) != 1:
                raise _Unclear(f"{len(readers)} operators read what it hands on")
            (user,) = readers
            if user in self.layers:
                return self.layers[user], value
            moved = _move(user, partial(_given, before=node, value=value, constants=self.constants))
            if moved is None:
                raise _Unclear(f"what it hands on passes through {operator_name(user)}")
            node, value = user, moved


def _given(part: Node, before: Node, value: Tensor, constants: Mapping[Node, Tensor]) -> Tensor:
    if part is before:
        return value
    if part in constants:
        return constants[part]
    raise _Unclear("what it hands on is joined with something else")


def _move(node: Node, index: Callable[[Node], Tensor]) -> Tensor | None:
    """The result of an operator that only moves numbers, None for any other."""
    if node.target is operator.getitem:
        source, place = node.args
        if isinstance(source, Node) and operator_name(source) in _MOVES:
            several: Any = _move(source, index)
            return several[place]
        return None
    name = operator_name(node)
    if name in _SAME:
        return index(node.args[0])  # type: ignore[arg-type]
    if name not in _MOVES:
        return None
    if name in ("view", "_unsafe_view"):  # what is followed may lie otherwise in memory
        return index(node.args[0]).reshape(_shape(node))  # type: ignore[arg-type]
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), index)
    result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return result


def _depends(node: Node, layers: Mapping[Node, str], seen: set[Node] | None = None) -> bool:
    """Whether a layer's output reaches a node."""
    seen = set() if seen is None else seen
    if node in layers:
        return True
    if node in seen or node.op != "call_function":
        return False
    seen.add(node)
    return any(_depends(part, layers, seen) for part in node.all_input_nodes)


def _from_softmax(node: Any) -> Node | None:
    """The softmax whose results a tensor holds, moved or cut, or None."""
    while isinstance(node, Node) and node.op == "call_function":
        if operator_name(node) in _SOFTMAX:
            return node
        if operator_name(node) not in _SAME | _MOVES | _MASKS or not node.args:
            return None
        parts = [part for part in node.all_input_nodes if part.op == "call_function"]
        node = node.args[0] if operator_name(node) != "where" or len(parts) < 2 else parts[-1]
    return None


def _scores(softmax: Node) -> _Scores | str:
    """The factors of the one product that a softmax is taken of, or why they are not known."""
    products: list[Node] = []
    seen: set[Node] = set()
    waiting: list[Node] = [softmax.args[0]]  # type: ignore[list-item]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if operator_name(node) in _PRODUCTS:
            products.append(node)
        elif operator_name(node) not in _WEIGHTED:
            waiting += node.all_input_nodes
    if len(products) != 1:
        return f"its scores are a sum of {len(products)} products"
    (product,) = products
    query, key = product.args[-2:] if operator_name(product) == "baddbmm" else product.args[:2]
    return query, key, True  # type: ignore[return-value]


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
