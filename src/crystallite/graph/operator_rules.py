"""What each ATen operator does to the order of neurons along the axes of its tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from crystallite.graph.axes import Axes, Axis

__all__ = ["Reader", "operator_name", "stored_weight"]

Labels = list[Axis]  # one for each axis of a tensor
_POSITIONS = "its elements are positions"
_TRANSPOSES = frozenset(("t", "numpy_T", "permute", "transpose"))


class Reader:
    """Labels the axes of every tensor of a graph, node after node.

    An operator without a rule here fixes every axis it reads and writes.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.labels: dict[Any, Any] = {}  # of each node: Labels, or a list of them where a node has several results
        self.layers: list[tuple[Any, Axis, Axis]] = []  # (weight, outputs, inputs) of each product with a weight

    def read(self, node: Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            self.labels[node] = self.labels[node.args[0]][node.args[1]]
            return
        name = operator_name(node)
        if name.startswith(("_assert", "sym_")):
            return
        rule = _RULES.get(name)
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()) and not _several(node):
            rule = _pointwise
        result = rule(self, node) if rule else None
        if result is None or not self._fits(result, node):
            result = self._unknown(node, name)
        self.labels[node] = result
        for labels in result if _several(node) else [result]:
            self.axes.check(labels)

    def fixed(self, shape: Sequence[int], reason: str) -> Labels:
        return [self.axes.new(size, reason) for size in shape]

    def fix(self, labels: Sequence[Axis], reason: str) -> None:
        for axis in labels:
            self.axes.fix(axis, reason)

    def broadcast(self, tensors: Sequence[Labels], shape: Sequence[int]) -> Labels:
        """Labels of a result of this shape, all of them joined where they meet."""
        result: Labels = []
        for place in range(-len(shape), 0):
            meeting = [labels[place] for labels in tensors if len(labels) >= -place and labels[place]]
            for other in meeting[1:]:
                self.axes.join(meeting[0], other)
            # no order can be wrong along an axis on which everything is the same
            result.append(meeting[0] if meeting else self.axes.new(shape[place]))
        return result

    def tensors(self, node: Node) -> list[Labels]:
        return [self.labels[n] for n in node.all_input_nodes if n in self.labels]

    def _fits(self, result: Any, node: Node) -> bool:
        """Whether a rule's result has the shape that the graph says: an overload it does not know may have another."""
        several, value = _several(node), node.meta["val"]
        return all(
            [self.axes.length(self.axes.pieces(axis)) for axis in labels] == list(tensor.shape)
            for labels, tensor in (zip(result, value, strict=True) if several else [(result, value)])
        )

    def _unknown(self, node: Node, name: str) -> Any:
        reason = f"it passes through {name}"
        for source in node.all_input_nodes:
            if source in self.labels:
                for labels in self.labels[source] if _several(source) else [self.labels[source]]:
                    self.fix(labels, reason)
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return [self.fixed(v.shape, reason) if isinstance(v, torch.Tensor) else [] for v in value]
        return self.fixed(value.shape, reason) if isinstance(value, torch.Tensor) else []


def _several(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def operator_name(node: Node) -> str:
    """`relu` for aten.relu.default and aten.relu_.default."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[-1] if schema else str(node.target)
    return name if name.endswith("__") else name.removesuffix("_")


def stored_weight(node: Any) -> Any:
    """The tensor that a factor of a product is the transpose of, or the factor itself."""
    while isinstance(node, Node) and node.op == "call_function" and operator_name(node) in _TRANSPOSES:
        node = node.args[0]
    return node


def _argument(node: Node, name: str) -> Any:
    """What the operator was given for an argument of its schema."""
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _labels(r: Reader, node: Node, name: str) -> Any:
    """Labels of a tensor argument, or None where it was left out."""
    return r.labels.get(_argument(node, name))


def _shape(node: Node) -> list[int]:
    return list(node.meta["val"].shape)


def _pointwise(r: Reader, node: Node) -> Labels:
    return r.broadcast(r.tensors(node), _shape(node))


def _kept(r: Reader, node: Node) -> Labels:
    return list(r.labels[node.args[0]])


def _constant(r: Reader, node: Node) -> Labels:
    return r.fixed(_shape(node), "")


def _reshape(r: Reader, node: Node) -> Labels | None:
    if getattr(node.target, "_overloadname", "") == "dtype":
        return None  # the bits of one element seen as several
    return r.axes.reshape(r.labels[node.args[0]], _shape(node))


def _permute(r: Reader, node: Node) -> Labels:
    labels = r.labels[node.args[0]]
    if operator_name(node) == "permute":
        return [labels[place] for place in _argument(node, "dims")]
    one, other = (
        (0, -1) if operator_name(node) in ("t", "numpy_T") else (_argument(node, "dim0"), _argument(node, "dim1"))
    )
    result = list(labels)
    result[one], result[other] = labels[other], labels[one]
    return result


def _reduction(r: Reader, node: Node) -> Labels | None:
    labels = r.labels[node.args[0]]
    places = _argument(node, "dim")
    if _several(node):
        return None  # with the positions of the largest
    if len(r.tensors(node)) > 1:
        return _pointwise(r, node)  # the larger of two tensors
    places = [places] if isinstance(places, int) else places
    gone = {place % len(labels) for place in places} if places else set(range(len(labels)))
    if _argument(node, "keepdim"):
        return [() if place in gone else axis for place, axis in enumerate(labels)]
    return [axis for place, axis in enumerate(labels) if place not in gone]


def _product(r: Reader, first: Labels, second: Labels, shape: Sequence[int]) -> Labels | None:
    """… × m × n times … × n × p."""
    if len(first) < 2 or len(second) < 2:
        return None
    batch = r.broadcast([first[:-2], second[:-2]], shape[:-2])
    r.axes.join(first[-1], second[-2])
    r.axes.check([*batch, first[-2], first[-1], second[-1]])  # the products before they are summed
    return [*batch, first[-2], second[-1]]


def _matmul(r: Reader, node: Node) -> Labels | None:
    """mm, bmm, matmul, addmm, baddbmm: the last two tensors are multiplied, one before them is added."""
    *added, x, weight = node.args[:3] if operator_name(node).endswith(("addmm", "baddbmm")) else node.args[:2]
    result = _product(r, r.labels[x], r.labels[weight], _shape(node))
    if result is None:
        return None
    if len(r.labels[weight]) == 2:
        r.layers.append((weight, r.labels[weight][1], r.labels[weight][0]))
    return r.broadcast([result, *(r.labels[a] for a in added)], _shape(node))


def _linear(r: Reader, node: Node) -> Labels | None:
    x, weight, bias = (_labels(r, node, name) for name in ("input", "weight", "bias"))
    if len(weight) != 2:
        return None
    r.axes.join(x[-1], weight[1])
    r.axes.check([*x, weight[0]])
    if bias:
        r.axes.join(weight[0], bias[0])
    r.layers.append((node.args[1], weight[0], weight[1]))
    return [*x[:-1], weight[0]]


def _convolution(r: Reader, node: Node) -> Labels:
    x, weight, bias = (_labels(r, node, name) for name in ("input", "weight", "bias"))
    channels, groups = len(x) - len(weight) + 1, _argument(node, "groups")
    r.fix(x[channels + 1 :], _POSITIONS)
    r.fix(weight[2:], _POSITIONS)
    if groups == 1:
        r.axes.join(x[channels], weight[1])
        r.axes.check([*x, weight[0]])
    else:  # the weight's second axis serves all groups
        outer, inner = _grouped(r, x[channels], groups)
        r.axes.join(outer, _grouped(r, weight[0], groups)[0])
        r.axes.join(inner, weight[1])
    if bias:
        r.axes.join(weight[0], bias[0])
    r.layers.append((node.args[1], weight[0], x[channels]))
    return [*x[:channels], weight[0], *r.fixed(_shape(node)[channels + 1 :], _POSITIONS)]


def _grouped(r: Reader, axis: Axis, groups: int) -> Labels:
    """An axis as groups × members."""
    length = r.axes.length(r.axes.pieces(axis))
    outer = r.axes.new(groups)
    inner = r.axes.new(length // groups, within=outer)
    r.axes.join(axis, outer + inner)
    return [outer, inner]


def _attention(r: Reader, node: Node) -> Labels | None:
    query, key, value, mask = (_labels(r, node, name) for name in ("query", "key", "value", "attn_mask"))
    if _argument(node, "enable_gqa"):
        return None
    scores = r.broadcast([query[:-2], key[:-2], value[:-2]], _shape(node)[:-2])
    scores += [query[-2], key[-2]]
    if mask is not None:
        r.broadcast([mask, scores], [r.axes.length(r.axes.pieces(axis)) for axis in scores])
    if _argument(node, "is_causal"):
        r.fix(scores[-2:], _POSITIONS)
    r.axes.join(query[-1], key[-1])
    r.axes.check([*scores, query[-1]])
    r.axes.join(key[-2], value[-2])
    r.axes.check([*scores, value[-1]])
    return [*scores[:-1], value[-1]]


def _norm_last(r: Reader, node: Node) -> Labels:
    """layer_norm, rms_norm: over the last axes, which the weights share."""
    x = r.labels[node.args[0]]
    for weights in r.tensors(node)[1:]:
        for place in range(-len(weights), 0):
            r.axes.join(x[place], weights[place])
    return list(x)


def _norm_channels(r: Reader, node: Node) -> Labels:
    """batch_norm, instance_norm, group_norm, prelu: everything else they read belongs to the channels."""
    x = r.labels[node.args[0]]
    groups = _argument(node, "num_groups")
    channels = x[1] if len(x) > 1 else ()
    if groups:
        _grouped(r, channels, groups)
    for weights in r.tensors(node)[1:]:
        if weights[0]:
            r.axes.join(channels, weights[0])
    return list(x)


def _pool(r: Reader, node: Node) -> Labels | None:
    """Pooling and resampling over the last axes: as many as the name says."""
    if _several(node):
        return None
    x, shape = r.labels[node.args[0]], _shape(node)
    last = next(int(c) for c in operator_name(node) if c.isdigit())
    r.fix(x[-last:], _POSITIONS)
    return [*x[:-last], *r.fixed(shape[-last:], _POSITIONS)]


def _pad(r: Reader, node: Node) -> Labels:
    """Axes that become longer are positions; others stay as they are."""
    labels, shape = list(r.labels[node.args[0]]), _shape(node)
    for place, axis in enumerate(labels):
        if r.axes.length(r.axes.pieces(axis)) != shape[place]:
            r.axes.fix(axis, _POSITIONS)
            labels[place] = r.axes.new(shape[place], _POSITIONS)
    return labels


def _expand(r: Reader, node: Node) -> Labels:
    return r.broadcast([r.labels[node.args[0]]], _shape(node))


def _embedding(r: Reader, node: Node) -> Labels:
    weight, indices = _labels(r, node, "weight"), _labels(r, node, "indices")
    r.fix(weight, "an embedding writes it")
    return [*indices, weight[1]]


def _slice(r: Reader, node: Node) -> Labels:
    """slice, select, cumsum: one axis is read by position."""
    labels, shape, name = list(r.labels[node.args[0]]), _shape(node), operator_name(node)
    place = _argument(node, "dim") % len(labels)
    if name == "slice" and r.axes.length(r.axes.pieces(labels[place])) == shape[place]:
        return labels
    reason = "only a range of it is read" if name != "cumsum" else "it passes through cumsum"
    r.axes.fix(labels[place], reason)
    labels[place : place + 1] = [] if name == "select" else r.fixed(shape[place : place + 1], reason)
    return labels


def _cut(r: Reader, node: Node) -> list[Labels]:
    """split, chunk: ranges of one axis."""
    labels = r.labels[node.args[0]]
    place = _argument(node, "dim") % len(labels)
    axes = r.axes.cut(labels[place], [value.shape[place] for value in node.meta["val"]])
    return [[*labels[:place], axis, *labels[place + 1 :]] for axis in axes]


def _concatenate(r: Reader, node: Node) -> Labels | None:
    tensors, shape = [r.labels[n] for n in _argument(node, "tensors")], _shape(node)
    if any(len(labels) != len(shape) for labels in tensors):
        return None
    place = (_argument(node, "dim") or 0) % len(shape)
    others = [[*labels[:place], (), *labels[place + 1 :]] for labels in tensors]
    result = r.broadcast(others, [*shape[:place], 1, *shape[place + 1 :]])
    result[place] = r.axes.concatenate([labels[place] for labels in tensors])
    return result


def _glu(r: Reader, node: Node) -> Labels:
    """One half of an axis gates the other."""
    labels = list(r.labels[node.args[0]])
    place = _argument(node, "dim") % len(labels)
    half = _shape(node)[place]
    one, other = r.axes.cut(labels[place], [half, half])
    r.axes.join(one, other)
    labels[place] = one
    return labels


def _table(rule: Callable[[Reader, Node], Any], names: str) -> dict[str, Callable[[Reader, Node], Any]]:
    return dict.fromkeys(names.split(), rule)


_RULES = {
    # elementwise, or the same for any order of any axis
    **_table(_kept, "alias alpha_dropout celu clone contiguous detach detach_copy dropout feature_dropout hardsigmoid"),
    **_table(_kept, "hardswish lift_fresh lift_fresh_copy log_sigmoid log_softmax relu6 selu softmax to type_as"),
    **_table(_pointwise, "copy masked_fill where __and__ __or__"),  # beside all that PyTorch calls pointwise
    **_table(_reduction, "all amax amin any linalg_vector_norm logsumexp max mean min norm prod std sum var"),
    **_table(_constant, "full full_like new_full new_ones new_zeros ones ones_like scalar_tensor zeros zeros_like"),
    **_table(_reshape, "flatten reshape squeeze unflatten unsqueeze view _unsafe_view"),
    **_table(_permute, "numpy_T permute t transpose"),
    **_table(_expand, "broadcast_to expand expand_as"),
    **_table(_matmul, "addmm baddbmm bmm matmul mm"),
    **_table(_linear, "linear"),
    **_table(_convolution, "conv1d conv2d conv3d"),
    **_table(_attention, "scaled_dot_product_attention"),
    **_table(_norm_last, "layer_norm rms_norm"),
    **_table(_norm_channels, "batch_norm group_norm instance_norm prelu"),
    **_table(_pool, "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d"),
    **_table(_pool, "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"),
    **_table(_pool, "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d upsample_bicubic2d"),
    **_table(_pad, "constant_pad_nd pad"),
    **_table(_embedding, "embedding"),
    **_table(_slice, "cumsum select slice"),
    **_table(_cut, "chunk split split_with_sizes"),
    **_table(_concatenate, "cat"),
    **_table(_glu, "glu"),
}
