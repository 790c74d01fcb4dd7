"""A transformers folder opened as the class that its config names, with all of its weights and no others."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.models.manifest import MANIFEST
from crystallite.models.transformers_folder import is_ours, spellings

__all__ = ["open_pretrained"]

_SHOWN = 5  # names of tensors in an error


def open_pretrained(folder: Path, into: nn.Module | None = None) -> nn.Module:
    """The model of a transformers folder, as the class that its config names, with all of its weights and no others.

    into: an instance of that class, where it is not one of transformers' own.
    """
    try:
        library = importlib.import_module("transformers")
    except ImportError:
        raise InvalidOption(f"{folder}: a transformers model; install transformers to open it") from None
    if not sys.stderr.isatty():
        library.utils.logging.disable_progress_bar()
    try:
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = config.architectures or ["AutoModel"]  # then all weights must be known: a head has no other name
        own = into is not None and type(into).__name__ == names[0]
        cls: Any = type(into) if own else getattr(library, names[0], None)
        kinds: Any = (library.PreTrainedModel, library.AutoModel) if not own else object
        is_model = inspect.isclass(cls) and issubclass(cls, kinds)
        if not is_model:
            raise CheckpointError(
                f"{folder}: a {names[0]:.80}, which transformers {library.__version__} does not have; open it with "
                "code of your own, or pass into= an instance of it"
            )
        asked = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # they are named below
        opener: Any = cls
        model, info = opener.from_pretrained(folder, local_files_only=True, **asked)
    except CheckpointError:
        raise
    except Exception as error:  # it meets damaged files in its own ways: OSError, AttributeError, SafetensorError …
        raise CheckpointError(f"{folder}: transformers cannot open it: {error}") from None
    ours = (folder / MANIFEST).is_file() or is_ours(getattr(config, "quantization_config", None))
    _check_keys(folder, model, info, strict=ours or not config.architectures)
    opened: nn.Module = model
    return opened


def _check_keys(folder: Path, model: nn.Module, info: Mapping[str, Any], strict: bool) -> None:
    """Refuse a model that was not given all its weights and no others; weights of other heads are said to be left out.

    strict: those are refused too.
    """
    kinds, name = ("missing", "unexpected", "mismatched"), type(model).__name__
    wrong = {kind: sorted(map(_named, info[f"{kind}_keys"])) for kind in kinds}
    renamed = wrong["missing"] or wrong["mismatched"]  # then any other may be one of them
    beside = set() if strict or renamed else _of_other_heads(model, wrong["unexpected"])
    wrong["unexpected"] = [key for key in wrong["unexpected"] if key not in beside]
    if any(wrong.values()):
        hint = "" if renamed else "; if they do not matter, open it with transformers and save it again"
        came = "; ".join(f"{kind} {_some(keys)}" for kind, keys in wrong.items() if keys)
        raise CheckpointError(f"{folder}: expected the weights of a {name}, as its config says, got {came}{hint}")
    if beside:
        left = _some(sorted(beside))
        said = f"{folder}: weights of parts that a {name}, as its config says, does not have are left out: {left}"
        warnings.warn(said, stacklevel=3)


def _of_other_heads(model: Any, names: Iterable[str]) -> set[str]:
    """Tensors of modules that the class does not have at all, as a pooler or the head of another task.

    A tensor more in a module that is there, or a layer more in a list of them, is no other head: the config is wrong.
    """

    def is_beside(name: str) -> bool:
        module = model
        for part in name.split(".")[:-1]:
            if part not in module._modules:
                return not isinstance(module, nn.ModuleList)
            module = module.get_submodule(part)
        return False

    return {name for name in names if all(map(is_beside, spellings(model, name)))}


def _named(key: Any) -> str:
    """A tensor's name, with its sizes in the file and in the model where they differ."""
    return key if isinstance(key, str) else f"{key[0]} {tuple(key[1])} for {tuple(key[2])}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
