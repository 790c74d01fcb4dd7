"""Reorganized transformers models through `save_pretrained` and `from_pretrained`.

What layers became stands in `config.quantization_config`, where transformers looks for modules to swap before it loads
weights; index tables are buffers among the weights. transformers must know who swaps them: `import crystallite` tells
it, see `transformers_hook.py`.

Where crystallite was not imported, transformers skips a `quantization_config` that it does not know: it warns ("Unknown
quantization type, got crystallite (pip install …) … Hence, we will skip the quantization") and fills layers without
weights with random numbers, or fails where sizes differ. Nothing of ours must be opened so. The config therefore also
asks for a fusion of layers that does not exist, with what to do as its name, on which `from_pretrained` fails at once
(as of transformers 5.23; others only warn); our reader takes it out. What `save` writes names in the same way a file of
weights that does not exist, which more versions look for, and which `save_pretrained` drops from every config.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.description import build_once, check_indices, check_size, describe, describe_parts
from crystallite.models.manifest import CONFIG, QUANT_METHOD
from crystallite.models.record import ExactOptions, Record, find_record, set_record_
from crystallite.models.swap import put_
from crystallite.weights.checkpoint import open_checkpoint

__all__ = [
    "copy_files",
    "described_in_config",
    "is_ours",
    "put_described_",
    "register_with",
    "say_size_",
    "spellings",
    "write_config",
    "write_config_file",
    "write_pretrained",
]

_VERSION = 3
_NO_FILE = f"{QUANT_METHOD}.safetensors"
_FUSIONS = "fusion_config"  # where a config names fusions of layers
_OLD_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.h5",
                "*.msgpack", "*.onnx", "*.ot", "*.gguf")  # fmt: skip


def write_config(model: nn.Module, original: nn.Module | None = None) -> None:
    """Say in the config of a transformers model what its layers became: all that `save_pretrained` needs.

    To be called after modules have been replaced. Such a model inside another one is found; others are left alone.
    What a model's class makes of the config need not be said. A class that needs more than a config cannot be asked:
    then `original`, the model before, stands for what it makes; left out, nothing is taken to have changed.

    Raises `InvalidOption` if the class and the config would not make the model again, with all its weights in their
    places: what is returned can be saved and opened.

    >>> write_config(nn.Linear(2, 2))
    """
    for part, before in zip(_pretrained(model), _pretrained(model if original is None else original), strict=True):
        _forget_gguf_(part)
        made = _made_by_class(part)
        modules = {name: d for name, d in describe_parts(part).items() if not _holds(made or before, name, d)}
        if made is not None:
            _check_rebuilt(part, before, made, modules)
        _describe_in_config_(part, modules, find_record(model))


def _forget_gguf_(part: Any) -> None:
    """Weights that transformers took out of a GGUF file are plain numbers by now, which it would refuse to save."""
    if getattr(getattr(part, "hf_quantizer", None), "packed_modules", True):
        return
    del part.hf_quantizer, part.quantization_method
    part.is_quantized = False
    if not is_ours(getattr(part.config, "quantization_config", None)):
        del part.config.quantization_config


def _describe_in_config_(part: Any, modules: Mapping[str, Any], record: Record | None) -> None:
    """Name in the config what stands in the place of modules; nothing where nothing does."""
    _ask_for_reader_(part.config, bool(modules))
    if modules:
        _keep_names_(part)
        part.config.quantization_config = {
            "quant_method": QUANT_METHOD,
            "version": _VERSION,
            "modules": dict(modules),
            "frozen": [name for name, value in part.named_parameters() if not value.requires_grad],
            "record": (record or Record(ExactOptions())).to_plain(),
        }
    elif is_ours(getattr(part.config, "quantization_config", None)):
        del part.config.quantization_config


def say_size_(model: nn.Module, before: int, now: int) -> None:
    """Let the config of a transformers model say that something in every layer has another size, where it can.

    The number is looked for that makes the class build the model as it is; where there is none, the config stays, and
    `write_config` describes the layers.
    """
    for part in _pretrained(model):
        for name, value in part.config.to_dict().items():
            if value != before or isinstance(value, bool) or not hasattr(part.config, name):
                continue
            changed = copy.deepcopy(part.config)
            setattr(changed, name, now)
            made = _made_by_class(part, changed)
            if made is not None and _shapes(made) == _shapes(part):
                setattr(part.config, name, now)
                return


def described_in_config(model: nn.Module) -> dict[str, Any] | None:
    """The modules that the config of a transformers model describes; None if its class is not in transformers.

    >>> described_in_config(nn.Linear(2, 2))
    """
    library = sys.modules.get("transformers")
    pretrained: Any = next(_pretrained(model), None)
    if pretrained is not model or getattr(library, type(model).__name__, None) is not type(model):
        return None
    if not is_ours(getattr(pretrained.config, "quantization_config", None)):
        write_config(model)
    found: Any = getattr(pretrained.config, "quantization_config", None)
    return dict(found["modules"]) if is_ours(found) else {}


def _keep_names_(model: Any) -> None:
    """Let transformers save weights as they are: it would fuse or split them as an older format of the class has them.

    Layers that became something else do not fit that format any more.
    """
    model._weight_conversions = []


def copy_files(files: Path, folder: Path) -> None:
    """All of a transformers folder but its weights: its tokenizer, and whatever else lies there."""

    def ignored(place: str, names: list[str]) -> set[str]:
        """Weights of the old model; a folder inside it may hold those of another part, which stays what it is."""
        patterns = _OLD_WEIGHTS if Path(place) == files else ("*.onnx", "*.gguf")
        return shutil.ignore_patterns(*patterns)(place, names)

    shutil.copytree(files, folder, ignore=ignored, dirs_exist_ok=True)


def put_described_(model: nn.Module, modules: dict[str, Any]) -> None:
    """Put what is described in the place of modules, without numbers."""
    _put_blocks(model, modules, None)


def write_config_file(model: Any, folder: Path, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a model that need not have its numbers; the modules that it describes.

    changed: what was put in the place of modules, of which the class may make some by itself.
    """
    made = _made_by_class(model)
    modules = {name: found for name, found in changed.items() if made is None or not _holds(made, name, found)}
    if made is not None:
        _check_rebuilt(model, model, made, modules)
    _describe_in_config_(model, modules, find_record(model))
    model.config.save_pretrained(folder)
    _hide_weights(folder)
    return modules


def write_pretrained(model: Any, folder: Path, files: Path | None) -> None:
    """A transformers model in a folder as `from_pretrained` reads it; files: the folder with its tokenizer."""
    if files is not None:
        copy_files(files, folder)
    model.save_pretrained(folder)
    _hide_weights(folder)


def _hide_weights(folder: Path) -> None:
    """Name a file of weights that does not exist, which our reader takes out: see above."""
    config = json.loads((folder / CONFIG).read_text())
    if is_ours(config.get("quantization_config")):
        (folder / CONFIG).write_text(json.dumps(config | {"transformers_weights": _NO_FILE}, indent=2) + "\n")


def register_with(readers: Any) -> None:
    """Add the reader of our configs to `transformers.quantizers.auto`, once."""
    if QUANT_METHOD in readers.AUTO_QUANTIZER_MAPPING:
        return
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class BlockConfig(QuantizationConfigMixin):  # type: ignore[misc, unused-ignore]
        """What `write_config` wrote, as transformers hands it on."""

        def __init__(
            self, modules: Any = None, frozen: Any = None, record: Any = None, version: Any = None, **_: Any
        ) -> None:
            if version != _VERSION or not isinstance(modules, dict) or not isinstance(frozen, list):
                came = f"version {version!r:.80} with {modules!r:.80} and {frozen!r:.80}"
                raise CheckpointError(
                    f"quantization_config: expected modules and frozen parameters in version {_VERSION}, got {came}"
                )
            vars(self).update(quant_method=QUANT_METHOD, version=version, modules=modules, frozen=frozen)
            vars(self).update(record=record)

    class BlockReader(HfQuantizer):  # type: ignore[misc, unused-ignore]
        """Puts blocks in the place of layers before weights are loaded, and checks what was loaded into them."""

        def update_attn_implementation(self, config: Any) -> Any:
            """The one call that sees the config before weights are looked for: they lie where they always do."""
            if getattr(config, "transformers_weights", None) == _NO_FILE:
                del config.transformers_weights
            _ask_for_reader_(config, False)
            return config

        update_tp_plan = update_attn_implementation  # the call that sees it in other versions of transformers

        def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> Any:
            self.config = self.quantization_config.to_dict()
            self.expected = _put_blocks(model, self.config["modules"], checkpoint_files)
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            _check_loaded(model, self.expected)
            set_record_(model, Record.from_plain(self.config["record"], "quantization_config"))
            named = dict(model.named_parameters())
            for name in self.config["frozen"]:
                for spelled in set(spellings(model, str(name))) & named.keys():
                    named[spelled].requires_grad_(False)
            # from here it is a model like any other: blocks can be cast, trained and saved again
            model.config.quantization_config = self.config
            _ask_for_reader_(model.config, True)
            del model.hf_quantizer, model.quantization_method
            _keep_names_(model)
            model.is_quantized = False
            return model

        def is_serializable(self) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return True

    readers.register_quantization_config(QUANT_METHOD)(BlockConfig)
    readers.register_quantizer(QUANT_METHOD)(BlockReader)


def _put_blocks(model: Any, modules: dict[str, Any], files: Sequence[str] | None) -> dict[str, torch.Size]:
    """Replace what is described, on the meta device; the names and shapes of the tensors that must then be loaded.

    A module that this class of model does not have belongs to another head: its weights are not loaded either.
    """
    source = f"{model.config.name_or_path}: quantization_config"
    expected: dict[str, torch.Size] = {}
    check_size(modules, source)
    made = dict[nn.Module, tuple[Any, nn.Module]]()
    for name, description in modules.items():
        place = next((p for p in spellings(model, name) if _module_at(model, p) is not None), None)
        if place is None:
            continue
        built = build_once(description, f"{source}: {name}", model.get_submodule(place), made)
        put_(model, place, built.to(torch.get_default_dtype()))  # that of the model to come
        expected |= {f"{place}.{key}": value.shape for key, value in built.state_dict().items()}
    if files is not None:  # what is not in the files is allocated
        stored = {name: info.shape for file in files for name, info in open_checkpoint(file).tensors.items()}
        numbers, described = (sum(map(math.prod, shapes.values())) for shapes in (stored, expected))
        if described > numbers:
            raise CheckpointError(f"{source}: expected modules of up to {numbers} numbers, as stored, got {described}")
        for name, shape in expected.items():
            found = next((stored[spelled] for spelled in spellings(model, name) if spelled in stored), shape)
            if found != shape:
                raise CheckpointError(f"{source}: tensor {name!r:.80}: expected {tuple(shape)}, got {tuple(found)}")
    return expected


def _check_loaded(model: Any, expected: Mapping[str, torch.Size]) -> None:
    """transformers fills what is missing with anything."""
    source = model.config.name_or_path
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name in expected:
        if not getattr(state[name], "_is_hf_initialized", False):  # transformers marks what it has loaded
            raise CheckpointError(f"{source}: expected a tensor {name!r:.80}, found none")
    check_indices(model, source)


def spellings(model: Any, name: str) -> Iterator[str]:
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


def _made_by_class(model: Any, config: Any = None) -> nn.Module | None:
    """What the model's class makes of its config, or of another, or None if it needs more than that."""
    try:
        with torch.device("meta"):
            made: nn.Module = type(model)(copy.deepcopy(model.config if config is None else config))
    except Exception:  # whatever a constructor of the user's raises
        return None
    return made


def _check_rebuilt(model: nn.Module, before: nn.Module, made: nn.Module, modules: dict[str, Any]) -> None:
    """Refuse a model that is not what its class and the described modules make; `made`, by its class, is used up.

    What the model before had beyond its class is its owner's own.
    """
    own = _differences(_shapes(before), _shapes(made))
    class_has = {name for name, _ in made.named_modules()}
    added = tuple(f"{name}." for name, _ in before.named_modules() if name not in class_has)
    try:
        _put_blocks(made, modules, None)
    except CheckpointError as error:
        raise InvalidOption(f"the model could not be opened again: {error}; pass its layer as ignore=") from None
    found, rebuilt = _shapes(model), _shapes(made)
    if wrong := sorted(name for name in _differences(found, rebuilt) - own if not name.startswith(added)):
        name = wrong[0]
        raise InvalidOption(
            f"{name}: the model could not be opened again: from_pretrained would make {rebuilt.get(name, 'no tensor')} "
            f"of it, here it is {found.get(name, 'no tensor')}; pass its layer as ignore="
        )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _ask_for_reader_(config: Any, needed: bool) -> None:
    """Make `from_pretrained` fail where our reader does not take this out again, or take it out."""
    others = {name: asked for name, asked in (getattr(config, _FUSIONS, None) or {}).items() if name != QUANT_METHOD}
    if needed or others:
        setattr(config, _FUSIONS, others | ({QUANT_METHOD: True} if needed else {}))
    elif hasattr(config, _FUSIONS):
        delattr(config, _FUSIONS)


def _module_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name) if name else None
    except AttributeError:
        return None


def _holds(model: nn.Module, name: str, description: dict[str, Any]) -> bool:
    """Whether the model has this module at this place."""
    module = _module_at(model, name)
    return module is not None and describe(module) == description


def is_ours(config: Any) -> bool:
    return isinstance(config, dict) and config.get("quant_method") == QUANT_METHOD
