"""Modules without what others put around them: wrappers of whole modules, and weights that are computed when used.

`torch.compile`, `DataParallel` and `DistributedDataParallel` run a module that lies inside them under another name.
`weight_norm`, `spectral_norm`, `torch.nn.utils.prune` and parametrizations compute a weight from other parameters.
Neither changes what the model computes, so both are taken off: what is left is the module that was wrapped, and in a
copy the weight that came out. Adapters of PEFT stay: what they add lies beside the weight until they are merged.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormLoadStateDictPreHook
from torch.nn.utils.weight_norm import WeightNorm

from crystallite.core.errors import InvalidOption

__all__ = ["MERGE_FIRST", "find_adapters", "without_wrappers"]

MERGE_FIRST = "merge them first: model = model.merge_and_unload()"
_AROUND = {nn.DataParallel: "DataParallel", nn.parallel.DistributedDataParallel: "DistributedDataParallel"}
_COMPILED = "_orig_mod"  # where torch.compile keeps the module
_NAMES = {"_WeightNorm": "weight_norm", "_SpectralNorm": "spectral_norm", "_Orthogonal": "orthogonal"}
_SHOWN = 3  # names of layers in a note


def without_wrappers(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model without wrappers and with plain weights, and a note on each kind of thing that was taken off.

    It is the model itself, or what a wrapper held, if nothing inside it had to change; else a copy.

    >>> net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.ReLU())
    >>> plain, notes = without_wrappers(nn.DataParallel(net))
    >>> type(plain[0]).__name__, notes
    ('Linear', ('taken out of DataParallel', 'weights as weight_norm computes them: 0'))
    """
    model, around = _inside(model)
    places = model.named_modules(remove_duplicate=False)
    wrapped = {name: kind for name, module in places if (kind := _wrapper(module))}
    computed = {name: kinds for name, module in model.named_modules() if (kinds := sorted(set(_computed(module))))}
    left = _left_by_training(model)
    if wrapped or computed or left:
        model = copy.deepcopy(model, {id(value): value.detach().clone() for value in left})
    for name in computed:
        _compute_(model.get_submodule(name), name)
    for name in reversed(wrapped):  # inner ones first, as the names of others may lead through them
        outer, _, place = name.rpartition(".")
        setattr(model.get_submodule(outer), place, _inside(model.get_submodule(name))[0])
    notes = [f"taken out of {kind}" for kind in around]
    notes += _joined(("taken out of {}", kind, name) for name, kind in wrapped.items())
    notes += _joined(
        ("weights as {} computes them", kind, name or "the model") for name, kinds in computed.items() for kind in kinds
    )
    return model, tuple(notes)


def find_adapters(model: nn.Module) -> list[str]:
    """Names of the modules that PEFT has put into a model.

    >>> find_adapters(nn.Linear(2, 2))
    []
    """
    return [name for name, module in model.named_modules() if _is_of_peft(module)]


def _is_of_peft(module: nn.Module) -> bool:
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


def _wrapper(module: nn.Module) -> str:
    """The name of the wrapper that a module is, or ""."""
    if _COMPILED in module._modules:
        return "torch.compile"
    return next((name for cls, name in _AROUND.items() if isinstance(module, cls)), "")


def _inside(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """What the wrappers around a module hold, and which they are."""
    around: list[str] = []
    while kind := _wrapper(module):
        around.append(kind)
        module = module.get_submodule(_COMPILED if kind == "torch.compile" else "module")
    return module, around


def _computed(module: nn.Module) -> Iterator[str]:
    """By what tensors of a module are computed from others."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield "weight_norm"
        elif isinstance(hook, SpectralNorm):
            yield "spectral_norm"
        elif isinstance(hook, prune.BasePruningMethod):
            yield "torch.nn.utils.prune"
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        kinds = (type(step).__name__ for steps in lists.values() for step in steps)
        yield from (_NAMES.get(kind, f"the parametrization {kind}") for kind in kinds)


def _left_by_training(model: nn.Module) -> list[Tensor]:
    """Tensors that hang on modules with the graph they come from, as computed weights and states do: PyTorch does not
    copy them."""
    held = (value for module in model.modules() for value in vars(module).values())
    return [value for value in held if isinstance(value, Tensor) and not value.is_leaf]


@torch.no_grad()
def _compute_(module: Any, name: str) -> None:
    """Make computed tensors of a module its own, as evaluation mode computes them, and as frozen as their sources."""
    modes = {part: part.training for part in module.modules()}
    module.eval()  # a spectral norm goes on estimating while it trains
    try:
        if parametrize.is_parametrized(module):
            _take_off_parametrizations_(module)
        for hook in list(module._forward_pre_hooks.values()):
            _take_off_hook_(module, hook)
    except (RuntimeError, ValueError) as error:
        raise InvalidOption(
            f"{name or 'the model'}: a weight that is computed from others must be computed before: {error}"
        ) from None
    for part, training in modes.items():
        part.training = training


def _take_off_parametrizations_(module: Any) -> None:
    """What `remove_parametrizations` does, without its change to the class, which the original shares."""
    lists = dict(module.parametrizations.items())
    values = {tensor: getattr(module, tensor).detach().clone() for tensor in lists}
    plain = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    module.__class__ = plain
    for tensor, steps in lists.items():
        sources = [value for key, value in steps._parameters.items() if key.startswith("original")]
        if sources:
            trained = any(value.requires_grad for value in sources)
            module.register_parameter(tensor, nn.Parameter(values[tensor], trained))
        else:
            module.register_buffer(tensor, values[tensor])


def _take_off_hook_(module: Any, hook: Any) -> None:
    remove: Any
    if isinstance(hook, WeightNorm):
        tensor, ending, remove = hook.name, "_g", remove_weight_norm
    elif isinstance(hook, SpectralNorm):
        tensor, ending, remove = hook.name, "_orig", remove_spectral_norm
    elif isinstance(hook, prune.BasePruningMethod):
        tensor, ending, remove = hook._tensor_name, "_orig", prune.remove
    else:
        return
    trained = module._parameters[tensor + ending].requires_grad
    remove(module, tensor)
    for key, loading in list(module._load_state_dict_pre_hooks.items()):
        if isinstance(getattr(loading, "hook", loading), SpectralNormLoadStateDictPreHook):
            del module._load_state_dict_pre_hooks[key]  # PyTorch wraps it, and then does not find it
    module._parameters[tensor].requires_grad_(trained)


def _joined(found: Iterable[tuple[str, str, str]]) -> list[str]:
    """(sentence, kind, name of a layer), one note for each sentence and kind."""
    names: dict[str, list[str]] = {}
    for sentence, kind, name in found:
        names.setdefault(sentence.format(kind), []).append(name)
    more = {text: f" and {len(some) - _SHOWN} more" * (len(some) > _SHOWN) for text, some in names.items()}
    return [f"{text}: {', '.join(some[:_SHOWN])}{more[text]}" for text, some in names.items()]
