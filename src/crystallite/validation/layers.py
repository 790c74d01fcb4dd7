"""Where in the network two systems part: relative deviation of every layer's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from crystallite.reorganization.restore import dense_form

__all__ = ["LayerDeviation", "LayerWatch", "comparable"]


@dataclass(frozen=True)
class LayerDeviation:
    """√(Σ‖y′ − y‖² / Σ‖y‖²) of one layer over all samples."""

    name: str
    deviation: float


def comparable(model: nn.Module) -> nn.Module:
    """A model whose layers can be compared with the original's one by one.

    For a reorganized one that is its dense form: the same function, layer by layer and with all neurons in the
    original's order, where blocks may run as chains and hidden neurons may have changed places.
    """
    return dense_form(model) if hasattr(model, "reorganization") else model


class LayerWatch:
    """Compares what layers of the same name return while both models run on the same batch: first the original.

    Layers are the modules of the original with parameters of their own, whatever the other model has in their places.
    uncompared: those that write something else in the other model → why. Each batch is a `with` of its own,
    in which the original's outputs are held until the other model has run.
    """

    def __init__(self, original: nn.Module, other: nn.Module, uncompared: Mapping[str, str] | None = None) -> None:
        layers, others = {n: m for n, m in original.named_modules() if m._parameters}, dict(other.named_modules())
        added = [n for n, m in others.items() if m._parameters and not any(_is_part(n, layer) for layer in layers)]
        alone = [*(name for name in layers if name not in others), *added]
        self._skipped = {**dict.fromkeys(alone, "only in one of the models"), **(uncompared or {})}
        self._waiting: dict[str, list[Tensor]] = {}
        self._sums: dict[str, tuple[float, float]] = {}
        self._handles: list[RemovableHandle] = []
        self._pairs = {
            name: (layer, others[name])
            for name, layer in layers.items()
            if name in others and name not in (uncompared or {})
        }

    def __enter__(self) -> LayerWatch:
        for name, (layer, other) in self._pairs.items():
            self._handles.append(layer.register_forward_hook(self._keep(name)))
            self._handles.append(other.register_forward_hook(self._compare(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._waiting.clear()

    def done(self) -> tuple[tuple[LayerDeviation, ...], dict[str, str]]:
        """Every layer that could be compared, in the order of the original, and why others could not."""
        found, skipped = [], dict(self._skipped)
        for name in self._pairs:
            if name not in skipped and name not in self._sums:
                skipped[name] = "it did not run by itself"
        for name, (difference, size) in self._sums.items():
            if name not in skipped:
                found.append(LayerDeviation(name, (difference / size) ** 0.5 if size else float(difference > 0)))
        order = {name: place for place, name in enumerate(self._pairs)}
        return tuple(sorted(found, key=lambda layer: order[layer.name])), skipped

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if tensor is not None:  # a copy: what follows may write into the output
                self._waiting.setdefault(name, []).append(tensor.detach().clone())

        return hook

    def _compare(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = _first_tensor(output)
            if not self._waiting.get(name) or tensor is None:
                self._skipped[name] = "it ran more often in one of the models, or returned no tensor"
                return
            expected = self._waiting[name].pop(0)
            if expected.shape != tensor.shape:
                shapes = f"{tuple(expected.shape)} and {tuple(tensor.shape)}"
                self._skipped[name] = f"its outputs differ in shape: {shapes}"
                return
            difference, size = self._sums.get(name, (0.0, 0.0))
            apart = (tensor.detach().to(expected.device).float() - expected.float()).norm() ** 2
            self._sums[name] = difference + float(apart), size + float(expected.float().norm() ** 2)

        return hook


def _is_part(name: str, layer: str) -> bool:
    """Whether a module is this layer, or one of the smaller ones that it became."""
    return name == layer or name.startswith(f"{layer}.") or not layer


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor)), None)
    return output if isinstance(output, Tensor) and output.is_floating_point() else None
