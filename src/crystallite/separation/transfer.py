"""Tensors and optimizer states carried between a dense model and the blocks it was reorganized into."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import InvalidOption
from crystallite.reorganization.restore import dense_form

__all__ = ["to_blocks", "to_dense", "transfer_optimizer"]


@dataclass(frozen=True)
class _Correspondence:
    """Where each entry of a reorganized model's parameters stands in the dense model."""

    sizes: dict[str, torch.Size]  # of the reorganized parameters, one after the other
    dense: dict[str, Tensor]  # dense parameter → number of the entry that stands at each place, −1: none

    @classmethod
    def of(cls, small: nn.Module) -> _Correspondence:
        # numbers take the way of the weights, whatever operators and folded orders they are stored in
        numbered = copy.deepcopy(small).double()
        sizes, start = {}, 1
        with torch.no_grad():
            for name, parameter in numbered.named_parameters():
                count = parameter.numel()
                numbers = torch.arange(start, start + count, dtype=torch.float64, device=parameter.device)
                parameter.copy_(numbers.view(parameter.shape))
                sizes[name], start = parameter.shape, start + count
        found = {name: p.detach() for name, p in dense_form(numbered).named_parameters()}
        dense = {name: numbers.long() - 1 for name, numbers in found.items()}
        met = torch.cat([places[places >= 0] for places in dense.values()])
        exact = all(torch.equal(numbers, numbers.round()) for numbers in found.values())
        if not exact or len(met.unique()) != len(met):
            raise InvalidOption("this model has layers whose parameters are no entries of the dense weights")
        return cls(sizes, dense)

    def to_dense(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([tensors[name].flatten() for name in self.sizes])
        padded = torch.cat([flat, flat.new_zeros(1)])  # −1 is the last
        return {name: padded[places.to(flat.device)] for name, places in self.dense.items()}

    def to_blocks(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        like = next(iter(tensors.values()))
        flat = like.new_zeros(sum(size.numel() for size in self.sizes.values()))
        for name, places in self.dense.items():
            flat[places[places >= 0].to(flat.device)] = tensors[name][(places >= 0).to(flat.device)]
        pieces = flat.split([size.numel() for size in self.sizes.values()])
        return {name: piece.view(size).clone() for (name, size), piece in zip(self.sizes.items(), pieces, strict=True)}

    def sources(self) -> dict[str, str]:
        """The dense parameter that each reorganized one was cut from."""
        starts = torch.cumsum(torch.tensor([0, *(size.numel() for size in self.sizes.values())]), 0)
        names, found = list(self.sizes), dict[str, str]()
        for dense, places in self.dense.items():
            owners = torch.bucketize(places[places >= 0].cpu(), starts[1:], right=True).unique().tolist()
            for owner in owners:
                if found.setdefault(names[owner], dense) != dense:
                    raise InvalidOption(f"{names[owner]} was cut from both {found[names[owner]]} and {dense}")
        return found


def to_blocks(tensors: Mapping[str, Tensor], small: nn.Module) -> dict[str, Tensor]:
    """Tensors in the shapes of the dense parameters, one for each, as the reorganized model holds its parameters.

    For gradients, moments, averages: whatever belongs to parameters entry by entry. What lies between blocks is lost.

    >>> from crystallite import reorganize
    >>> model = nn.Sequential(nn.Linear(4, 4, bias=False))
    >>> with torch.no_grad():
    ...     model[0].weight[:2, 2:] = model[0].weight[2:, :2] = 0
    >>> small = reorganize(model, level=None, only_if_faster=False)
    >>> to_blocks({"0.weight": torch.arange(16.0).view(4, 4)}, small)["0.weights.0"].tolist()
    [[[0.0, 1.0], [4.0, 5.0]], [[10.0, 11.0], [14.0, 15.0]]]
    """
    correspondence = _Correspondence.of(small)
    _check_names(tensors, {name: places.shape for name, places in correspondence.dense.items()})
    return correspondence.to_blocks(tensors)


def to_dense(tensors: Mapping[str, Tensor], small: nn.Module) -> dict[str, Tensor]:
    """Tensors in the shapes of the reorganized model's parameters, as the dense model holds its own.

    The inverse of `to_blocks`; zero between blocks.
    """
    correspondence = _Correspondence.of(small)
    _check_names(tensors, correspondence.sizes)
    return correspondence.to_dense(tensors)


def transfer_optimizer(optimizer: torch.optim.Optimizer, source: nn.Module, target: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the same kind for the target, which goes on where the given one of the source stands.

    One of the two models is the other reorganized, in either direction. Parameter groups keep their options. State
    tensors in the shape of their parameter are carried entry by entry (momentum, Adam's moments, …), others are copied
    (step counts). Moments of weights between blocks are dropped, or zero on the way back. For optimizers whose state
    belongs to entries: not for those that factor it (Adafactor) or keep one vector for all (L-BFGS).
    """
    reorganized = [hasattr(model, "reorganization") for model in (source, target)]
    if reorganized[0] == reorganized[1]:
        raise InvalidOption("expected a dense model and its reorganized form, in either order")
    into_blocks = reorganized[1]
    correspondence = _Correspondence.of(target if into_blocks else source)
    origin = correspondence.sources()  # block parameter → dense parameter
    names, targets = ({id(p): n for n, p in source.named_parameters()}, dict(target.named_parameters()))
    groups, owner = [], dict[str, str]()  # target parameter → a source parameter with its options and step
    for group in optimizer.param_groups:
        held = [names[id(p)] for p in group["params"] if id(p) in names]
        if len(held) < len(group["params"]):
            raise InvalidOption("the optimizer holds parameters that are not the source model's")
        pairs = [(b, d) if into_blocks else (d, b) for b, d in origin.items() if (d if into_blocks else b) in held]
        moved = {aim: start for aim, start in pairs if aim in targets and aim not in owner}
        owner |= moved
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [targets[name] for name in moved], **options})
    accepted = inspect.signature(type(optimizer)).parameters  # some keep more in `defaults` than they take
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    result = type(optimizer)([group for group in groups if group["params"]], **defaults)
    states = {names[id(p)]: dict(state) for p, state in optimizer.state.items() if isinstance(p, Tensor)}
    parameters = dict(source.named_parameters())
    carry = correspondence.to_blocks if into_blocks else correspondence.to_dense
    for key in dict.fromkeys(key for state in states.values() for key in state):
        found = {n: s[key] for n, s in states.items() if isinstance(s.get(key), Tensor) and s[key].ndim}
        shaped = {n for n, value in found.items() if value.shape == parameters[n].shape}
        tensors = {n: states[n][key] if n in shaped else torch.zeros_like(p) for n, p in parameters.items()}
        carried: dict[str, Any] = carry(tensors) if shaped else {}
        for aim, start in owner.items():
            value = states.get(start, {}).get(key)
            if value is not None:
                own = carried[aim] if start in shaped else copy.deepcopy(value)
                result.state[targets[aim]][key] = own
    return result


def _check_names(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    for name, size in expected.items():
        if name not in tensors or tensors[name].shape != size:
            others = ", ".join(tensors) or "nothing"
            got = f"shape {tuple(tensors[name].shape)}" if name in tensors else f"only {others}"
            raise InvalidOption(f"{name}: expected a tensor of shape {tuple(size)}, got {got}")
