"""`Work`: what one sample brings to the operators and modules of a model, counted in one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from crystallite.data.batch import Batch
from crystallite.operators.conv import BlockConv
from crystallite.operators.experts import Experts
from crystallite.serving.cuts.operators import CUTTABLE
from crystallite.serving.example import Example
from crystallite.serving.interface import NamedModel
from crystallite.validation.cost import macs_by_module

__all__ = ["Work", "count_work"]


@dataclass(frozen=True)
class Work:
    """What a sample brings; without a sample, one vector, position or time step to each operator."""

    sample: str = ""  # that was counted on: "input_ids [104]"; "": none is known
    vectors: Mapping[str, int] = field(default_factory=dict)  # by the name of an operator that can be cut, of a call
    macs: Mapping[str, int] = field(default_factory=dict)  # by the name of a module

    def macs_of(self, model: nn.Module, names: Sequence[str]) -> int:
        """Multiply-adds of some modules of a model; where no sample is known, each weight counts once."""
        if not self.sample:
            return sum(p.numel() for name in names for p in model.get_submodule(name).parameters() if p.ndim > 1)
        inside = (sum(n for own, n in self.macs.items() if f"{own}.".startswith(f"{name}.")) for name in names if name)
        return sum(self.macs.values()) if "" in names else sum(inside)


def count_work(model: nn.Module, examples: Iterable[Example], outputs: tuple[str, ...] = ()) -> Work:
    """The work of one sample, of the size that the first example has which the model takes.

    Of an operator that can be cut, these are the vectors, positions or time steps that a call of it brings; of experts
    the share that each gets if all get the same. Nothing is known of a model that takes none of the examples.
    """
    operators = {name: module for name, module in model.named_modules() if isinstance(module, CUTTABLE)}
    for example in examples:
        found: dict[str, int] = {}

        def count(name: str, module: nn.Module, args: Any, given: Any, output: Any, found: Any = found) -> None:
            found[name] = max(found.get(name, 1), _vectors(module, [*args, *given.values()], output))

        hooks = [
            module.register_forward_hook(_named(count, name), with_kwargs=True) for name, module in operators.items()
        ]
        try:
            made = example.made(1)
            macs = macs_by_module(NamedModel(model, example.positional, outputs), Batch(0, 1, (made,)))
        except Exception:  # whatever the model's own code raises: whoever serves it will say so
            continue
        finally:
            for hook in hooks:
                hook.remove()
        macs = {name.removeprefix("model").removeprefix("."): n for name, n in macs.items()}
        return Work(Batch(0, 1, named=made).sample, found, macs)
    return Work()


def _named(count: Any, name: str) -> Any:
    def hook(module: nn.Module, args: Any, given: Any, output: Any) -> None:
        count(name, module, args, given, output)

    return hook


def _vectors(module: nn.Module, given: list[Any], output: Any) -> int:
    """Of one call."""
    first = given[0]
    if isinstance(module, BlockConv):
        return math.prod(output.shape[-len(module.kernel_size) :])
    if isinstance(module, Experts):
        index: Tensor = given[1]
        return math.ceil(index.numel() / len(module.experts))
    if isinstance(first, PackedSequence):
        return len(first.data)
    return math.prod(first.shape[:-1])
