"""What modules read and return while a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

from torch import nn

from crystallite.core.errors import InvalidOption
from crystallite.data.batch import Batch

__all__ = ["Enough", "LayerCall", "layer_call", "watching"]


class LayerCall(NamedTuple):
    """One call of a module."""

    inputs: tuple[Any, ...]
    output: Any

    @property
    def returned(self) -> Any:
        """The output, or the first one where there are several."""
        return self.output[0] if isinstance(self.output, (tuple, list)) else self.output


class Enough(Exception):
    """Ends a run of a model that has shown all that was to be seen."""


@contextmanager
def watching(model: nn.Module, names: Iterable[str], until: str | None = None) -> Iterator[dict[str, list[LayerCall]]]:
    """The calls of some modules while the model runs inside the `with`, as tensors of the run itself, not copies.

    until: a module of these after which the run ends.

    >>> import torch
    >>> net = nn.Sequential(nn.Flatten(), nn.ReLU())
    >>> with watching(net, ["1"]) as calls:
    ...     _ = net(torch.tensor([[[-1.0, 2.0]]]))
    >>> calls["1"][0].inputs[0].tolist(), calls["1"][0].output.tolist()
    ([[-1.0, 2.0]], [[0.0, 2.0]])
    """
    calls: dict[str, list[LayerCall]] = {name: [] for name in names}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            calls[name].append(LayerCall(inputs, output))
            if name == until:
                raise Enough

        return hook

    with ExitStack() as stack:
        stack.enter_context(suppress(Enough))
        for name in calls:
            stack.callback(model.get_submodule(name).register_forward_hook(keep(name)).remove)
        yield calls


def layer_call(model: nn.Module, name: str, batch: Batch) -> LayerCall:
    """What a module reads and returns on a batch; the model is run no further than that."""
    with watching(model, [name], until=name) as calls:
        batch.call(model)
    if not calls[name]:
        raise InvalidOption(f"{name}: the model does not run this layer on the data, so it cannot be fitted")
    return calls[name][0]
