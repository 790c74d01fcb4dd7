"""Modules that compute a feed-forward pair and nothing else, recognised by what they compute, not by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crystallite.graph.trace import export_quietly

__all__ = ["FeedForwardNames", "recognise_feed_forward"]

_LINEAR, _PRODUCT = torch.ops.aten.linear.default, torch.ops.aten.mul.Tensor
_ACTIVATIONS: dict[Any, Callable[..., nn.Module]] = {
    torch.ops.aten.silu.default: nn.SiLU,
    torch.ops.aten.gelu.default: nn.GELU,
    torch.ops.aten.relu.default: nn.ReLU,
    torch.ops.aten.tanh.default: nn.Tanh,
    torch.ops.aten.sigmoid.default: nn.Sigmoid,
}


@dataclass(frozen=True)
class FeedForwardNames:
    """Which children of a module are the layers of y = second(activation(first(x))), or with · gate as in SwiGLU."""

    first: str
    activation: nn.Module
    second: str
    gate: str | None

    @property
    def roles(self) -> dict[str, str]:
        """child → role"""
        return {self.first: "first", self.second: "second"} | ({self.gate: "gate"} if self.gate else {})


def recognise_feed_forward(module: nn.Module) -> FeedForwardNames | None:
    """The layers of a module whose forward(x) is exactly a feed-forward pair, plain or gated; None for any other.

    Proved on the module's exported graphs in evaluation and in training mode, which must be the same pair. A module
    with parameters or buffers beside those of its layers is none: they would be lost.

    >>> class Gated(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)
    ...     def forward(self, x):
    ...         return self.b(self.a(x) * nn.functional.silu(self.c(x)))
    >>> recognise_feed_forward(Gated())
    FeedForwardNames(first='a', activation=SiLU(), second='b', gate='c')
    """
    layers = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    others = [child for child in module.children() if type(child) is not nn.Linear]
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    holds_more = bool(own) or any([*m.parameters(), *m.buffers()] for m in others)
    if len(layers) not in (2, 3) or holds_more or len(inspect.signature(module.forward).parameters) != 1:
        return None
    for width in _widths(list(layers.values())):
        x = next(iter(layers.values())).weight.new_zeros(2, width)
        evaluated, trained = (_pair(module, x, layers, training) for training in (False, True))
        # activations are modules: equal if they are built alike
        if evaluated is not None and repr(evaluated) == repr(trained):
            return evaluated
    return None


def _widths(layers: list[nn.Linear]) -> list[int]:
    """Widths of an input that fits all layers if one of them is the second, and the others read the input."""
    found = {}
    for second in layers:
        (width, hidden), *more = {(layer.in_features, layer.out_features) for layer in layers if layer is not second}
        if not more and hidden == second.in_features:
            found[width] = True
    return list(found)


def _pair(module: nn.Module, x: torch.Tensor, layers: dict[str, nn.Linear], training: bool) -> FeedForwardNames | None:
    modes = {m: m.training for m in module.modules()}
    try:
        program = export_quietly(module.train(training), (x,))
    except Exception:  # whatever the module's own code raises: it is not what we look for
        return None
    finally:
        for m, mode in modes.items():
            m.training = mode
    return _match(program, layers)


def _match(program: Any, layers: dict[str, nn.Linear]) -> FeedForwardNames | None:
    parameters = program.graph_signature.inputs_to_parameters
    inputs, calls = program.graph_signature.user_inputs, [n for n in program.graph.nodes if n.op == "call_function"]
    if len(inputs) != 1 or len(program.graph_signature.user_outputs) != 1:
        return None
    (x,) = (n for n in program.graph.nodes if n.op == "placeholder" and n.name == inputs[0])

    def layer(node: Any) -> tuple[str, Any]:
        """The child that a node applies, and to what; ("", None) for other nodes."""
        if getattr(node, "target", None) is not _LINEAR:  # numbers are no nodes
            return "", None
        read, *tensors = node.args
        child = parameters.get(tensors[0].name, "").removesuffix(".weight")
        bias = parameters.get(tensors[1].name) if len(tensors) > 1 else None
        fits = child in layers and bias == (None if layers[child].bias is None else f"{child}.bias")
        return (child, read) if fits else ("", None)

    def activated(node: Any) -> tuple[str, nn.Module] | None:
        """The child and the activation where a node is activation(child(x))."""
        if getattr(node, "target", None) not in _ACTIVATIONS or len(node.args) != 1:
            return None
        child, read = layer(node.args[0])
        return (child, _ACTIVATIONS[node.target](**node.kwargs)) if child and read is x else None

    output = next(n for n in program.graph.nodes if n.op == "output").args[0][0]
    second, hidden = layer(output)
    if not second:
        return None
    if len(layers) == 2:
        found = activated(hidden)
        return FeedForwardNames(found[0], found[1], second, None) if found and len(calls) == 3 else None
    if hidden.target is not _PRODUCT or len(calls) != 5:
        return None
    for gated, plain in (hidden.args, hidden.args[::-1]):
        found, (first, read) = activated(gated), layer(plain)
        if found and first and read is x and len({found[0], first, second}) == 3:
            return FeedForwardNames(first, found[1], second, found[0])
    return None
