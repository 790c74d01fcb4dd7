"""`Experts`: the experts of a mixture as modules of their own, behind the interface of the stack they are stored in."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidMatrix, InvalidOption

__all__ = ["Expert", "Experts", "Gating", "StackLayout", "active_experts", "holds_stacks"]

ROLES = ("gate", "up", "down")


@dataclass(frozen=True)
class Gating:
    """What an expert does between its layers: f(min(gate, limit)) · (clip(up, ±limit) + shift), or f(up)."""

    alpha: float | None = None  # f is x · sigmoid(alpha · x); None: it is the expert's activation
    limit: float | None = None  # None: nothing is clipped
    shift: float = 0.0

    def __post_init__(self) -> None:
        given = [value for value in (self.alpha, self.limit, self.shift) if value is not None]
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in given)
        if not numbers or (self.limit is not None and self.limit <= 0):
            raise InvalidOption(f"expected finite numbers and a positive limit of an expert's gate, got {self}")

    def hidden(self, activation: nn.Module | None, gate: Tensor | None, up: Tensor) -> Tensor:
        """What the last layer reads; gate: None where the expert has none."""
        gated = up if gate is None else gate
        if self.limit is not None:
            gated = gated.clamp(max=self.limit)
        found: Tensor = gated * torch.sigmoid(gated * (self.alpha or 0)) if activation is None else activation(gated)
        if gate is None:
            return found
        up = up if self.limit is None else up.clamp(-self.limit, self.limit)
        return found * (up + self.shift if self.shift else up)


class Expert(nn.Module):
    """y = down(f(gate(x)) · up(x)), or down(f(up(x))): one of the feed-forward networks of a mixture.

    >>> Expert(None, nn.Linear(4, 8), nn.Linear(8, 4), nn.ReLU())(torch.zeros(3, 4)).shape
    torch.Size([3, 4])
    """

    def __init__(
        self, gate: nn.Module | None, up: nn.Module, down: nn.Module, activation: nn.Module | None,
        gating: Gating | None = None,
    ) -> None:  # fmt: skip
        """Args:
        gate: the layer that f is applied to; None: f is applied to what `up` writes.
        up: a layer that reads what `gate` reads.
        down: the layer that reads their product.
        activation: f; None where `gating` says what it is.
        gating: what else is done between the layers.
        """
        super().__init__()
        self.gate, self.up, self.down, self.activation = gate, up, down, activation
        self.gating = Gating() if gating is None else gating
        if (activation is None) != (self.gating.alpha is not None):
            raise InvalidOption("expected an expert with an activation or the alpha of one, got both or none")

    def layers(self) -> dict[str, nn.Module]:
        """By role; those that are there."""
        return {role: layer for role in ROLES if (layer := getattr(self, role)) is not None}

    def forward(self, x: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x)
        y: Tensor = self.down(self.gating.hidden(self.activation, gate, self.up(x)))
        return y

    @property
    def in_features(self) -> int:
        return int(self.up.in_features)  # type: ignore[arg-type]

    @property
    def out_features(self) -> int:
        return int(self.down.out_features)  # type: ignore[arg-type]

    def describe(self) -> dict[str, Any]:
        """Layers, activation and gating."""
        parts = {role: getattr(self, role) for role in (*ROLES, "activation")}
        return parts | {"gating": asdict(self.gating)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Expert:
        """An expert of these layers, not filled."""
        gate, up, down, activation = (description[name] for name in (*ROLES, "activation"))
        made = cls(gate, up, down, activation, Gating(**description["gating"]))
        sizes = [(layer.in_features, layer.out_features) for layer in (up, up if gate is None else gate)]
        if sizes[0] != sizes[1] or sizes[0][1] != down.in_features:
            raise InvalidMatrix(f"expected an expert whose layers fit, got {sizes} before {down.in_features} inputs")
        return made

    def index_limits(self) -> dict[str, int]:
        """Nothing: its layers know their own."""
        return {}


@dataclass(frozen=True)
class StackLayout:
    """How experts lie in the parameters of the module they came from: (experts, outputs, inputs) each, or otherwise."""

    weights: Mapping[str, str]  # role → parameter; gate and up may be rows of one
    biases: Mapping[str, str]
    transposed: bool = False  # (experts, inputs, outputs)
    interleaved: bool = False  # rows of gate and up take turns
    gate_first: bool = True

    def __post_init__(self) -> None:
        for names in (self.weights, self.biases):
            if not {*names} <= {*ROLES} or not all(isinstance(name, str) for name in names.values()):
                raise InvalidOption(f"expected parameters of {', '.join(ROLES)}, got {names!r:.200}")

    @property
    def names(self) -> set[str]:
        return {*self.weights.values(), *self.biases.values()}

    def views(self, stacks: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
        """Role, "weight" or "bias", and its part of a stack: (experts, outputs, inputs) or (experts, outputs).

        >>> layout = StackLayout({"gate": "w", "up": "w", "down": "v"}, {}, interleaved=True)
        >>> stacks = {"w": torch.arange(4.0).view(1, 4, 1), "v": torch.zeros(1, 1, 2)}
        >>> [(role, view.flatten().tolist()) for role, _, view in layout.views(stacks)]
        [('gate', [0.0, 2.0]), ('up', [1.0, 3.0]), ('down', [0.0, 0.0])]
        """
        for role in ROLES:
            for kind, names in (("weight", self.weights), ("bias", self.biases)):
                if role in names:
                    whole = stacks[names[role]]
                    whole = whole.mT if self.transposed and kind == "weight" else whole
                    fused = role != "down" and names.get("gate") == names.get("up")
                    yield role, kind, self._rows(whole, role) if fused else whole

    def _rows(self, whole: Tensor, role: str) -> Tensor:
        second = (role == "gate") != self.gate_first
        if self.interleaved:
            return whole[:, int(second) :: 2]
        half = whole.shape[1] // 2
        return whole[:, half:] if second else whole[:, :half]


class Experts(nn.Module):
    """The drop-in for a module that holds its experts as stacked parameters, as those of transformers do.

    Each expert is a module of its own, an `Expert` or whatever replaces it, so that its layers can be of any size. An
    expert runs on the tokens that are sent to it. Only in an exported graph, which cannot depend on them, all experts
    run on all tokens, and those that were not asked weigh nothing.

    >>> experts = Experts([Expert(None, nn.Linear(4, 8), nn.Linear(8, 4), nn.ReLU()) for _ in range(3)])
    >>> experts(torch.randn(5, 4), torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)).shape
    torch.Size([5, 4])
    >>> experts
    Experts(3 experts, 4 → 4)
    """

    def __init__(self, experts: Sequence[nn.Module], layout: StackLayout | None = None) -> None:
        """Args:
        experts: as many as `top_k_index` counts.
        layout: where they lay in the module that they stand for.
        """
        super().__init__()
        if not experts:
            raise InvalidOption("expected at least one expert, got none")
        for number, expert in enumerate(experts):
            self.add_module(str(number), expert)
        self.layout = layout
        self.opaque = False  # one operator in a traced graph, whatever lies inside
        self._stands_for: tuple[nn.Module, ...] = ()  # not a child: it has no weights

    @classmethod
    def from_stack(
        cls, module: nn.Module, layout: StackLayout, activation: nn.Module | None, gating: Gating
    ) -> Experts:
        """The experts of a module with stacked parameters, copied; `stand_for_` says which module it was."""
        stacks = {name: module.get_parameter(name) for name in layout.names}
        count = len(stacks[layout.weights["down"]])
        parts: list[dict[str, dict[str, Tensor]]] = [{} for _ in range(count)]
        for role, kind, view in layout.views(stacks):
            for number in range(count):
                parts[number].setdefault(role, {})[kind] = view[number]
        trained = {role: stacks[name].requires_grad for role, name in layout.weights.items()}
        made = []
        for own in parts:
            layers = {role: _linear(**tensors).requires_grad_(trained[role]) for role, tensors in own.items()}
            acting = None if activation is None else copy.deepcopy(activation)
            made.append(Expert(layers.get("gate"), layers["up"], layers["down"], acting, gating))
        result = cls(made, layout)
        result.stand_for_(module)
        return result.train(module.training)

    @property
    def experts(self) -> list[nn.Module]:
        return list(self.children())

    def stand_for_(self, module: nn.Module) -> None:
        """Remember the module whose place this takes, without its weights, so that `to_dense` can give it back."""
        if self.layout is not None and self.layout.names <= module._parameters.keys():
            empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
            self._stands_for = (_copy(module, empty),)

    def to_dense(self) -> nn.Module | None:
        """The module that this stands for with the weights of the experts.

        None where it is not known, or where an expert's layers are no longer of the sizes that it had.
        """
        if not self._stands_for or self.layout is None:
            return None
        module, like = _copy(self._stands_for[0], {}), next(self.parameters())
        stacks = {
            name: torch.empty(module.get_parameter(name).shape, dtype=like.dtype, device=like.device)
            for name in self.layout.names
        }
        for role, kind, view in self.layout.views(stacks):
            for expert, place in zip(self.experts, view, strict=True):
                layer = expert._modules.get(role)
                if type(layer) is not nn.Linear or getattr(layer, kind).shape != place.shape:
                    return None
                place.copy_(getattr(layer, kind).detach())
        first: Any = self.experts[0]
        for name, stack in stacks.items():
            role = next(r for r, n in [*self.layout.weights.items(), *self.layout.biases.items()] if n == name)
            frozen = not any(p.requires_grad for p in first.get_submodule(role).parameters())
            setattr(module, name, nn.Parameter(stack, not frozen))
        return module.train(self.training)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, features) from what each token is, which experts it is sent to, and what each of them counts."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.opaque:
            return torch.ops.crystallite.experts(x, top_k_index, top_k_weights, list(self.parameters())).view_as(
                hidden_states
            )
        if torch.compiler.is_exporting():
            return self._all_on_all(x, top_k_index, top_k_weights).view_as(hidden_states)
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        tokens, weights = order // top_k_index.shape[-1], top_k_weights.reshape(-1)[order]
        counts = torch.bincount(chosen, minlength=len(self.experts))
        result, start = torch.zeros_like(x), 0
        for expert, count in zip(self.experts, counts.tolist(), strict=False):  # more: tokens that are sent nowhere
            if count or _watched(expert):
                rows = tokens[start : start + count]
                written = expert(x[rows]) * weights[start : start + count, None]
                result.index_add_(0, rows, written.to(result.dtype))
            start += count
        return result.view_as(hidden_states)

    def _all_on_all(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (index == number)).sum(-1, keepdim=True)
            result = result + (expert(x) * share).to(result.dtype)
        return result

    def describe(self) -> dict[str, Any]:
        """The experts one by one, and how they lay in the module that they stand for."""
        layout = None if self.layout is None else asdict(self.layout)
        return {"experts": self.experts, "layout": layout}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Experts:
        """Experts of these sizes, not filled."""
        layout = description["layout"]
        made = cls(description["experts"], None if layout is None else StackLayout(**layout))
        sizes = {(expert.in_features, expert.out_features) for expert in made.experts}
        if len(sizes) > 1:
            raise InvalidMatrix(f"expected experts that all read and write as much, got {sorted(sizes)!s:.200}")
        return made

    def index_limits(self) -> dict[str, int]:
        """Nothing: the experts know their own."""
        return {}

    def __repr__(self) -> str:
        first: Any = self.experts[0]
        return f"Experts({len(self.experts)} experts, {first.in_features} → {first.out_features})"


def holds_stacks(module: nn.Module) -> bool:
    """Whether a module holds at least two stacks of as many matrices, and no weights below it.

    >>> holds_stacks(nn.Linear(2, 2))
    False
    """
    lengths = [len(p) for p in module.parameters(recurse=False) if p.ndim == 3 and p.is_floating_point()]
    inside = any(True for child in module.children() for _ in child.parameters())
    return len(lengths) > 1 and len({*lengths}) == 1 and lengths[0] > 1 and not inside


def active_experts(module: nn.Module, inputs: Sequence[Any]) -> float | None:
    """Of a call of a module with stacks of weights, the share of them that each token meets; None for other modules.

    Tokens stand in rows, and beside them the indices of their experts; without such indices, as in gates of several
    heads, a token meets all.

    >>> stack = nn.Module()
    >>> stack.w, stack.v = nn.Parameter(torch.zeros(8, 3, 2)), nn.Parameter(torch.zeros(8, 2, 3))
    >>> active_experts(stack, (torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.long)))
    0.25
    >>> active_experts(stack, (torch.zeros(1, 5, 2), torch.arange(5)[None]))  # positions, not experts
    1.0
    """
    if not holds_stacks(module):
        return None
    tokens = [len(v) for v in inputs[:1] if isinstance(v, Tensor) and v.ndim == 2]
    chosen = [v for v in inputs[1:] if isinstance(v, Tensor) and v.dtype == torch.long and v.ndim == 2]
    chosen = [v for v in chosen if [len(v)] == tokens]
    number = next(len(p) for p in module.parameters(recurse=False) if p.ndim == 3)
    return chosen[0].shape[1] / number if chosen else 1.0


def _copy(module: nn.Module, instead: dict[int, Any]) -> nn.Module:
    """A copy with other values for some; its configuration is that of the model, which must stay one."""
    config = getattr(module, "config", None)
    return copy.deepcopy(module, instead | ({} if config is None else {id(config): config}))


def _watched(expert: nn.Module) -> bool:
    """Whether somebody looks at what its layers do: they then run on no rows too, so that nobody waits for them."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in expert.modules())


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, weight.device, weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


@torch.library.custom_op("crystallite::experts", mutates_args=())
def _opaque(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    raise NotImplementedError("only traced")


@_opaque.register_fake
def _(x: Tensor, index: Tensor, weights: Tensor, parameters: list[Tensor]) -> Tensor:
    return torch.empty_like(x)
