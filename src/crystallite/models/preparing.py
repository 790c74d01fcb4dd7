"""`prepared`: the model at the door of every verb, without wrappers, or refused by name.

A verb works on layers and on the numbers in them. What hides both, and does not change what the model computes, is
taken off (`weights/plain_modules.py`), and the record says so. What cannot be taken off is refused before any work
begins, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.arrays import odd_tensor
from crystallite.core.errors import InvalidOption
from crystallite.models.record import find_record, set_record_
from crystallite.models.recorded_call import recorded_call
from crystallite.weights.plain_modules import MERGE_FIRST, find_adapters, without_wrappers

__all__ = ["note_call_", "note_preparation_", "prepared"]

_QUANTISED = "quantised already: pass the model in floating point, and quantise the result"
_PACKAGES = {  # whose layers hold weights in a form of their own
    "auto_gptq", "autoawq", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel", "hqq",
    "optimum", "torchao",
}  # fmt: skip


def prepared(model: Any, *, dense: bool = False, finite: bool = False) -> tuple[nn.Module, tuple[str, ...]]:
    """The model without wrappers, and notes on what was taken off; the model itself where nothing was.

    Args:
        model: what the user passed.
        dense: refuse a model that was reorganized or compressed before, too, and layers without neurons.
        finite: refuse one with NaN or infinity among its parameters, too.

    Returns:
        The model and the notes.

    Raises:
        InvalidOption: something that is no model, or one whose layers or numbers cannot be had.

    Examples:
        >>> prepared(nn.DataParallel(nn.Linear(2, 2)))
        (Linear(in_features=2, out_features=2, bias=True), ('taken out of DataParallel',))
        >>> prepared(nn.Linear(2, 2, device="meta"))
        Traceback (most recent call last):
        crystallite.core.errors.InvalidOption: weight: expected numbers, got a tensor on the meta device; load the
        weights first
    """
    if not isinstance(model, nn.Module):
        raise InvalidOption(f"expected an nn.Module, got {type(model).__name__}")
    _refuse_code(model)
    if adapted := find_adapters(model):
        where, can_merge = adapted[-1] or "the model", hasattr(model, "merge_and_unload")
        hint = MERGE_FIRST if can_merge else "merge them into the weights first, or pass the model without them"
        raise InvalidOption(f"{where}: adapters of PEFT lie beside the weights, and would be lost; {hint}")
    for name, module in model.named_modules():
        if reason := _quantised(module):
            raise InvalidOption(f"{name or 'the model'}: {reason}, {_QUANTISED}")
    for name, value in _tensors(model):
        if reason := _without_numbers(value):
            raise InvalidOption(f"{name}: expected {reason}")
    for name, value in model.named_parameters() if dense else ():
        if value.ndim > 1 and not value.numel():
            shape = tuple(value.shape)
            raise InvalidOption(f"{name}: expected a layer with neurons, got a weight of shape {shape}; remove it")
    for name, value in model.named_parameters() if finite else ():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InvalidOption(f"{name}: expected finite numbers, got NaN or infinity; it cannot be fitted or trained")
    plain, notes = without_wrappers(model)
    if dense and find_record(plain) is not None:
        raise InvalidOption("this model is reorganized already; pass the original, or cx.restore(model)")
    return plain, notes


def note_preparation_(model: nn.Module, notes: tuple[str, ...]) -> None:
    """Say in the record of a result what was taken off the model that it was made from."""
    found = find_record(model)
    if notes and found is not None:
        set_record_(model, replace(found, prepared=notes))


def note_call_(model: nn.Module, examples: Iterable[Any]) -> None:
    """Say in the record of a result what it is called with, by inputs of the model that it was made from."""
    found, call = find_record(model), recorded_call(model, examples)
    if call is not None and found is not None:
        set_record_(model, replace(found, call=call))


def _refuse_code(model: nn.Module) -> None:
    """Layers must be modules of Python code, in one process."""
    for name, module in model.named_modules():
        where = f"{name}: " if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise InvalidOption(f"{where}scripted by TorchScript, its layers are fixed; pass the module it was made of")
        if hasattr(module, "_hf_hook"):
            raise InvalidOption(
                f"{where}its weights are moved by accelerate (device_map=); open it on one device, or call "
                "accelerate.hooks.remove_hook_from_submodules(model) first"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InvalidOption(f"{where}sharded by FSDP; gather its weights into a model of one process first")
    if isinstance(model, torch.fx.GraphModule) and not any(_calls_layer(model, node) for node in model.graph.nodes):
        raise InvalidOption("a graph of operations, as torch.export makes, has no layers; pass the module it is of")


def _calls_layer(model: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    return node.op == "call_module" and any(True for _ in model.get_submodule(str(node.target)).parameters())


def _quantised(module: nn.Module) -> str:
    """What kind of quantised layer a module is, or ""."""
    cls = type(module)
    package = cls.__module__.partition(".")[0]
    if package in _PACKAGES:
        return f"a {cls.__name__} of {package}"
    opened = getattr(module, "hf_quantizer", None)
    if opened is not None and getattr(opened, "packed_modules", True):  # GGUF, unless it was left in its blocks
        return f"a {cls.__name__} that transformers opened with a quantization_config"
    if cls.__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
        return f"a {cls.__name__} of torch.ao"
    return f"a {cls.__name__} of packed weights" if "qweight" in {**module._buffers, **module._parameters} else ""


def _tensors(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from ((name, value) for name, value in model.named_buffers() if not value.is_complex())  # rotations


def _without_numbers(value: Any) -> str:
    """What was expected and what came where a tensor does not simply hold real numbers in memory, or ""."""
    if nn.parameter.is_lazy(value):
        return "numbers, got a lazy parameter; run the model once first"
    if type(value) not in (Tensor, nn.Parameter) or value.is_quantized:
        package = type(value).__module__.partition(".")[0]
        came = "a quantised tensor" if value.is_quantized else f"a {type(value).__name__} of {package}"
        return f"plain numbers in memory, got {came}; pass the model in floating point, and quantise the result"
    if value.is_meta:
        return "numbers, got a tensor on the meta device; load the weights first"
    if odd := odd_tensor(value):
        return odd
    if value.is_complex():
        return f"real numbers, got {value.dtype}; layers of complex numbers are not taken apart"
    return ""
