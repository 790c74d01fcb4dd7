"""`subnetworks`: a model that separates end to end as networks that can run apart, and the step that joins them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.operators.chain import BlockChain
from crystallite.operators.chain_layer import ChainLayer
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear

__all__ = ["Subnetworks", "as_chain", "subnetworks"]


class Subnetworks(nn.Module):
    """Networks that share no neuron, side by side: `y[…, outputs[i]] = parts[i](x[…, inputs[i]])`.

    They may read the same inputs: each gets a copy. Outputs of no part emit constants. `before` and `after` are what
    the model does to the whole input and to the whole output: modules without weights.
    """

    idle: Tensor  # (out_features,) what each output emits if no part writes it

    def __init__(
        self,
        parts: Sequence[nn.Module],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        idle: Tensor,
        before: nn.Sequential,
        after: nn.Sequential,
    ) -> None:
        super().__init__()
        self.parts, self.before, self.after = nn.ModuleList(parts), before, after
        for i, (reads, writes) in enumerate(zip(inputs, outputs, strict=True)):
            self.register_buffer(f"inputs_{i}", reads)
            self.register_buffer(f"outputs_{i}", writes)
        self.register_buffer("idle", idle)

    @property
    def inputs(self) -> list[Tensor]:
        """Input features that each part reads, in its order."""
        return [self.get_buffer(f"inputs_{i}") for i in range(len(self.parts))]

    @property
    def outputs(self) -> list[Tensor]:
        """Output features that each part writes."""
        return [self.get_buffer(f"outputs_{i}") for i in range(len(self.parts))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.join([part(x.index_select(-1, reads)) for part, reads in zip(self.parts, self.inputs, strict=True)])

    def join(self, results: Sequence[Tensor]) -> Tensor:
        """The model's output from what the parts returned, wherever they ran."""
        y = self.idle.expand(*results[0].shape[:-1], -1)
        return self.after(y.index_copy(-1, torch.cat(self.outputs), torch.cat(list(results), -1)))


def subnetworks(model: nn.Module) -> Subnetworks:
    """A reorganized model that separates end to end, as independent networks and the step that joins them.

    Args:
        model: one block operator, or an `nn.Sequential` of one and modules without weights.

    Returns:
        The networks, which share no neuron but inputs, as one module that runs them side by side.

    Raises:
        InvalidOption: another kind of model, or one that does not separate end to end.

    Examples:
        >>> from crystallite import reorganize
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
        ...     model[2].weight[0, 2:] = model[2].weight[1, :2] = 0
        >>> networks = subnetworks(reorganize(model, level=None, only_if_faster=False))
        >>> [part[0].in_features for part in networks.parts], torch.cat(networks.outputs).sort().values.tolist()
        ([2, 2], [0, 1])
    """
    modules = list(model) if type(model) is nn.Sequential else [model]
    with_weights = [i for i, module in enumerate(modules) if any(True for _ in module.parameters())]
    if len(with_weights) != 1 or not isinstance(modules[with_weights[0]], (BlockChain, BlockLinear, BlockFeedForward)):
        raise InvalidOption(
            "expected a model that reorganize turned into one block operator, or an nn.Sequential of one and modules "
            f"without weights; here {len(with_weights)} modules of {type(model).__name__} hold weights"
        )
    place = with_weights[0]
    chain = as_chain(modules[place])
    found = chain.subnetworks()
    if len(found) < 2:
        raise InvalidOption("this model does not separate end to end: all its outputs depend on each other's inputs")
    parts, inputs, outputs = zip(*found, strict=True)
    before, after = (nn.Sequential(*map(copy.deepcopy, side)) for side in (modules[:place], modules[place + 1 :]))
    nowhere, constants = chain.idle_outputs()
    idle = constants.new_zeros(chain.out_features).index_copy(0, nowhere, constants)
    return Subnetworks([copy.deepcopy(part) for part in parts], inputs, outputs, idle, before, after)


def as_chain(operator: nn.Module) -> BlockChain:
    """A block operator that may be cut into subnetworks, as a chain; blocks of one layer are shared, not copied."""
    if isinstance(operator, BlockChain):
        return operator
    if isinstance(operator, BlockLinear):
        bias, outputs = None if operator.bias is None else operator.bias.detach(), None
        if operator.outputs is not None:
            rows = torch.argsort(operator.outputs, stable=True)  # dormant ones last
            bias, outputs = None if bias is None else bias[rows], torch.argsort(rows)
        sizes = operator.in_features, operator.out_features
        layer = ChainLayer(*sizes, list(operator.weights), operator.columns, None, bias, operator.empty.dtype)
        return BlockChain([layer], [], outputs)
    assert isinstance(operator, BlockFeedForward)
    pair = operator.to_dense()
    if pair.gate is not None:
        raise InvalidOption("a gated feed-forward pair alone cannot be split into subnetworks")
    return BlockChain.from_dense([pair.first, pair.second], [pair.activation])
