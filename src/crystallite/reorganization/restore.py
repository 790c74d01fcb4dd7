"""`restore`: the dense model that a reorganized one was made from, with its annealed weights."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.core.suggest import suggest_keywords
from crystallite.models.composites import collapse_, expand_
from crystallite.models.conv1d import conv1d_of
from crystallite.models.layers import set_trained_, trained
from crystallite.models.record import record
from crystallite.models.swap import put_, replace_
from crystallite.models.transformers_folder import write_config
from crystallite.operators.chain import BlockChain
from crystallite.operators.conv import BlockConv
from crystallite.operators.feed_forward import BlockFeedForward
from crystallite.operators.linear import BlockLinear
from crystallite.operators.recurrent import BlockRecurrent
from crystallite.reorganization.fold import unfold_
from crystallite.reorganization.runs import stages

__all__ = ["DenseFeedForward", "dense_form", "restore"]


class DenseFeedForward(nn.Module):
    """y = second(activation(first(x))), or second(activation(gate(x)) · first(x)), under the names its layers had.

    Stands where a module of the same function was reorganized as a whole.
    """

    def __init__(self, layers: dict[str, nn.Linear], roles: dict[str, str], activation: nn.Module) -> None:
        """roles: name → "first", "second" or "gate"."""
        super().__init__()
        for name in roles:  # in the order of the original
            self.add_module(name, layers[roles[name]])
        self._activation = activation.forward  # no child: whoever looks for modules finds those of the original
        self._names = {role: name for name, role in roles.items()}

    def forward(self, x: Tensor) -> Tensor:
        layers = {role: self.get_submodule(name) for role, name in self._names.items()}
        hidden = layers["first"](x)
        if "gate" in layers:
            return layers["second"](self._activation(layers["gate"](x)) * hidden)
        return layers["second"](self._activation(hidden))


@suggest_keywords
def restore(model: nn.Module) -> nn.Module:
    """A copy of a reorganized model with every block operator replaced by the dense layers it stands for.

    Weights are those of the original after annealing, bit for bit, in their places and under their names. A module
    that was replaced as a whole (a feed-forward pair) comes back as a `DenseFeedForward` of the same layers. A
    compressed model is refused: what its layers were is not in it.

    Args:
        model: what `reorganize` or `upgrade` returned; it is not changed.

    Returns:
        The dense model.

    Raises:
        InvalidOption: a compressed model.

    Examples:
        >>> from crystallite.reorganization.rewrite import reorganize
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> with torch.no_grad():
        ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
        ...     model[2].weight[0, 2:] = model[2].weight[1, :2] = 0
        >>> again = restore(reorganize(model, level=None))
        >>> all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
        True
    """
    if record(model).method == "compressed":
        raise InvalidOption(
            "this model was compressed: its dense weights are gone, nothing can restore them; keep the original"
        )
    return dense_form(model)


def dense_form(model: nn.Module) -> nn.Module:
    """The same for any model with a record: a compressed one keeps the neurons and ranks that it was given.

    What such a model computes stays what it is, layer by layer and with all neurons in the order of the original.
    """
    found, result = record(model), copy.deepcopy(model)
    vars(result).pop("reorganization", None)  # copies of torch.fx's modules are without it
    operators = [
        (name, module)
        for name, module in result.named_modules()
        if isinstance(module, (BlockLinear, BlockConv, BlockRecurrent, BlockChain, BlockFeedForward))
    ]
    kinds = {change.name: change.kind for change in found.changes}
    done: list[str] = []
    for name, operator in operators:
        if any(not outer or name.startswith(f"{outer}.") for outer in done):
            continue  # a part of an operator that is dense now
        done.append(name)
        prefix = f"{name}." if name else ""
        roles = {c.name.removeprefix(prefix): c.role for c in found.changes if c.role and c.name.startswith(prefix)}
        if isinstance(operator, BlockFeedForward) and roles:
            result = replace_(result, name, _feed_forward(operator, roles))
        elif isinstance(operator, (BlockChain, BlockFeedForward)):
            _put_back_(result, name, operator)
        else:
            dense = operator.to_dense()
            if isinstance(dense, nn.Linear) and kinds.get(name) == "Conv1D":
                result = replace_(result, name, conv1d_of(dense))
            else:
                result = replace_(result, name, dense)
    result = expand_(result)  # folds name the layers inside
    unfold_(result, found.folds)
    result = collapse_(result)
    write_config(result)
    return result


def _feed_forward(operator: BlockFeedForward, roles: dict[str, str]) -> DenseFeedForward:
    pair = operator.to_dense()
    layers = {"first": pair.first, "second": pair.second} | ({} if pair.gate is None else {"gate": pair.gate})
    return DenseFeedForward(layers, roles, pair.activation)


def _put_back_(model: nn.Module, name: str, operator: BlockChain | BlockFeedForward) -> None:
    """The layers of a run at the places it took, in an nn.Sequential that has kept them."""
    parent, _, place = name.rpartition(".")
    places = list(model.get_submodule(parent)._modules)
    for later, module in zip(places[places.index(place) :], stages(operator), strict=False):
        if isinstance(module, nn.Linear):
            module.training = operator.training
            set_trained_(module, *trained(operator))
        put_(model, f"{parent}.{later}" if parent else later, module)
