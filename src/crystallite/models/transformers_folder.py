"""Reorganized transformers models through `save_pretrained` and `from_pretrained`.

What layers became stands in `config.quantization_config`, where transformers looks for modules to swap before it loads
weights; index tables are buffers among the weights. transformers must know who swaps them: `transformers_hook.py` tells
it. Nothing here loads it.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError
from crystallite.models.description import build, check_indices, describe, describe_parts
from crystallite.models.record import Reorganization
from crystallite.models.swap import put_
from crystallite.weights.checkpoint import open_checkpoint

__all__ = ["add_reader", "write_config"]

_METHOD = "crystallite"
_VERSION = 2


def write_config(model: nn.Module, original: nn.Module | None = None) -> None:
    """Say in the config of a transformers model what its layers became: all that `save_pretrained` needs.

    To be called after modules have been replaced. Such a model inside another one is found; others are left alone.
    What a model's class makes of the config need not be said. A class that needs more than a config cannot be asked:
    then `original`, the model before, stands for what it makes; left out, nothing is taken to have changed.

    >>> write_config(nn.Linear(2, 2))
    """
    for part, before in zip(_pretrained(model), _pretrained(model if original is None else original), strict=True):
        made = _made_by_class(part) or before
        modules = {name: d for name, d in describe_parts(part).items() if not _holds(made, name, d)}
        if modules:
            part.config.quantization_config = {
                "quant_method": _METHOD,
                "version": _VERSION,
                "modules": modules,
                "frozen": [name for name, value in part.named_parameters() if not value.requires_grad],
                "reorganization": getattr(model, "reorganization", Reorganization([])).to_plain(),
            }
        elif _is_ours(getattr(part.config, "quantization_config", None)):
            del part.config.quantization_config


def add_reader(readers: Any) -> None:
    """Add ours to the readers of `transformers.quantizers.auto`; `transformers_hook.py` calls it at the right time."""
    if _METHOD in readers.AUTO_QUANTIZER_MAPPING:
        return
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class BlockConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
        """What `write_config` wrote, as transformers hands it on."""

        def __init__(
            self, modules: Any = None, frozen: Any = None, reorganization: Any = None, version: Any = None, **_: Any
        ) -> None:
            if version != _VERSION or not isinstance(modules, dict) or not isinstance(frozen, list):
                came = f"version {version!r:.80} with {modules!r:.80} and {frozen!r:.80}"
                raise CheckpointError(
                    f"quantization_config: expected modules and frozen parameters in version {_VERSION}, got {came}"
                )
            vars(self).update(quant_method=_METHOD, version=version, modules=modules, frozen=frozen)
            vars(self).update(reorganization=reorganization)

    class BlockReader(HfQuantizer):  # type: ignore[misc, unused-ignore]
        """Puts blocks in the place of layers before weights are loaded, and checks what was loaded into them."""

        def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> Any:
            self.config = self.quantization_config.to_dict()
            self.expected = _put_blocks(model, self.config["modules"], checkpoint_files)
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            _check_loaded(model, self.expected)
            model.reorganization = Reorganization.from_plain(self.config["reorganization"], "quantization_config")
            named = dict(model.named_parameters())
            for name in self.config["frozen"]:
                for spelled in set(_spellings(model, str(name))) & named.keys():
                    named[spelled].requires_grad_(False)
            # from here it is a model like any other: blocks can be cast, trained and saved again
            model.config.quantization_config = self.config
            del model.hf_quantizer, model.quantization_method
            model.is_quantized = False
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    readers.register_quantization_config(_METHOD)(BlockConfig)
    readers.register_quantizer(_METHOD)(BlockReader)


def _put_blocks(model: Any, modules: dict[str, Any], files: Sequence[str] | None) -> dict[str, torch.Size]:
    """Replace what is described, on the meta device; the names and shapes of the tensors that must then be loaded.

    A module that this class of model does not have belongs to another head: its weights are not loaded either.
    """
    source = f"{model.config.name_or_path}: quantization_config"
    expected: dict[str, torch.Size] = {}
    for name, description in modules.items():
        place = next((p for p in _spellings(model, name) if _module_at(model, p) is not None), None)
        if place is None:
            continue
        built = build(description, f"{source}: {name}").to(torch.get_default_dtype())  # that of the model to come
        put_(model, place, built)
        expected |= {f"{place}.{key}": value.shape for key, value in built.state_dict().items()}
    if files is not None:  # what is not in the files is allocated
        stored = sum(math.prod(info.shape) for file in files for info in open_checkpoint(file).tensors.values())
        described = sum(shape.numel() for shape in expected.values())
        if described > stored:
            raise CheckpointError(f"{source}: expected modules of up to {stored} numbers, as stored, got {described}")
    return expected


def _check_loaded(model: Any, expected: Mapping[str, torch.Size]) -> None:
    """transformers compares no shapes of modules that were swapped, and fills what is missing with anything."""
    source = model.config.name_or_path
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, shape in expected.items():
        value = state[name]
        if not getattr(value, "_is_hf_initialized", False):  # transformers marks what it has loaded
            raise CheckpointError(f"{source}: expected a tensor {name!r:.80}, found none")
        if value.shape != shape:
            raise CheckpointError(f"{source}: tensor {name!r:.80}: expected {tuple(shape)}, got {tuple(value.shape)}")
    check_indices(model, source)


def _spellings(model: Any, name: str) -> Iterator[str]:
    """The name of a module in the model that was saved, and what it may be in the same model under another head."""
    prefix = f"{model.base_model_prefix}."
    yield from (name, prefix + name, name.removeprefix(prefix))


def _pretrained(model: nn.Module) -> Iterator[Any]:
    """The transformers models in a model that are not inside another one."""
    library = sys.modules.get("transformers.modeling_utils")  # whoever has such a model has imported it
    if library is None:
        return
    if isinstance(model, library.PreTrainedModel):
        yield model
        return
    for child in model.children():
        yield from _pretrained(child)


def _made_by_class(model: Any) -> nn.Module | None:
    """What the model's class makes of its config, or None if it needs more than that."""
    try:
        with torch.device("meta"):
            made: nn.Module = type(model)(copy.deepcopy(model.config))
    except Exception:  # whatever a constructor of the user's raises
        return None
    return made


def _module_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name) if name else None
    except AttributeError:
        return None


def _holds(model: nn.Module, name: str, description: dict[str, Any]) -> bool:
    """Whether the model has this module at this place."""
    module = _module_at(model, name)
    return module is not None and describe(module) == description


def _is_ours(config: Any) -> bool:
    return isinstance(config, dict) and config.get("quant_method") == _METHOD
