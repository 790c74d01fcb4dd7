"""Hidden neurons of experts: known from the operator that runs them, or from what an expert's module computes alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from crystallite.data.batch import Batch
from crystallite.graph.feed_forward import recognise_feed_forward
from crystallite.graph.neuron_groups import NeuronGroup
from crystallite.graph.trials import acts_alone
from crystallite.operators.experts import Expert

__all__ = ["expert_groups"]


def expert_groups(model: nn.Module, names: Collection[str], routed: Collection[str], batch: Batch) -> list[NeuronGroup]:
    """The hidden neurons of experts whose layers are all among the named ones, in the order of the model.

    Those of an `Expert` act alone, as nothing but numbers one by one lies between its layers. Another module among
    whose layers are some that are `routed` to is asked what it computes, and tried on a batch. No graph of the whole
    model is needed, which a loop over experts does not have.
    """
    found = list(_groups(model, routed))
    inside = [group for group in found if {*group.layers} <= {*names}]
    return [group for group in inside if _is_ours(model, group) or acts_alone(model, group, batch)]


def _groups(model: nn.Module, routed: Collection[str]) -> Iterator[NeuronGroup]:
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, Expert):
            *writers, reader = (prefix + role for role in module.layers())
            yield NeuronGroup.between(model, writers, reader)
        elif any(f"{prefix}{child}" in routed for child, _ in module.named_children()):
            pair = recognise_feed_forward(module)
            if pair is not None:
                writers = [prefix + child for child in (pair.gate, pair.first) if child is not None]
                yield NeuronGroup.between(model, writers, prefix + pair.second)


def _is_ours(model: nn.Module, group: NeuronGroup) -> bool:
    return isinstance(model.get_submodule(group.reader.rpartition(".")[0]), Expert)
