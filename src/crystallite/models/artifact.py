"""`save` and `load`: a reorganized model as a folder of safetensors and JSON. Nothing in it is executed, ever.

model.safetensors   every parameter and buffer that is in a state dict; all index tables int64
manifest.json       what `models/manifest.py` says: the same for every folder that we write

A model of a class of transformers' own becomes a transformers folder, with the same manifest beside `config.json`:
`from_pretrained` reads it too, and `load` opens it as the class it was. So there is one kind of folder to validate,
report and serve, and whoever has code for transformers needs no other. A block can be read without the others: see
`models/block_loading.py`. The weights must have the hash that the manifest names, and so must a verdict.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.files import new_folder
from crystallite.core.suggest import suggest_keywords
from crystallite.models.description import OPERATORS, build, check_indices, describe_parts, mixed_dtypes, replace
from crystallite.models.manifest import (
    CONFIG,
    MANIFEST,
    METHOD,
    VERSION,
    WEIGHTS,
    check_weights,
    read_manifest,
    source_sha256,
    weights_of,
    weights_sha256,
    write_manifest,
)
from crystallite.models.preparing import prepared
from crystallite.models.record import ExactOptions, Record, find_record, set_record_
from crystallite.models.recorded_call import recorded_call
from crystallite.models.transformers_folder import described_in_config, write_config, write_pretrained
from crystallite.models.transformers_opening import open_pretrained
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint
from crystallite.weights.plain_modules import without_wrappers

__all__ = ["load", "load_mapped", "save", "without_weights"]


@suggest_keywords
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    source: nn.Module | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    metadata: dict[str, Any] | None = None,
    files: str | os.PathLike[str] | None = None,
    example: Any = None,
) -> Path:
    """Write a reorganized model to a new folder, all of it or nothing; returns the folder.

    A folder that exists already is not touched.

    Args:
        model: what `reorganize`, `compress` or `upgrade` returned.
        path: the new folder.
        source: the model it was made from, or its file or folder; the manifest keeps a hash of its weights.
        metadata: plain JSON values that are kept in the manifest.
        files: the folder of the transformers model it was made from, of which all but the weights is copied: the
            tokenizer, and whatever else lies there.
        example: inputs that the model takes (a tensor, a tuple or a dict), whose names, kinds and shapes are kept, so
            that a service knows them; `compress` and `upgrade` have kept those of their data already.

    Returns:
        The folder.

    Raises:
        InvalidOption: the folder exists, or the model holds nothing that could be loaded again.
        WriteError: there is no space, or no permission to write there; nothing is left then.
    """
    target = Path(path)
    if target.exists():
        raise InvalidOption(f"{target}: exists already; choose another name or remove it")
    model, _ = prepared(model)
    record = find_record(model) or Record(ExactOptions())
    if example is not None:
        call = recorded_call(model, [example])
        if call is None:
            raise InvalidOption(
                "example: expected tensors whose first axis counts samples, named as the model names them"
            )
        record = dataclasses.replace(record, call=call)
    if record.method != "compressed" and not any(type(module) in OPERATORS.values() for module in model.modules()):
        raise InvalidOption("this model holds no reorganized layer; save it with safetensors or torch instead")
    in_config = described_in_config(model)
    modules = describe_parts(model) if in_config is None else in_config
    for name, description in modules.items():
        if " " in description["type"]:
            raise InvalidOption(f"{name}: {description['type']}, which could not be loaded again")
    if mixed := mixed_dtypes(model, "" in modules):
        raise InvalidOption(f"{mixed}: it could not run; convert it with model.to(dtype)")
    state = model.state_dict()
    if not state:
        raise InvalidOption("this model holds no weights, so there is nothing to save")
    ties = _ties(state) if in_config is None else {}
    manifest = {
        "format": METHOD,
        "version": VERSION,
        "crystallite": importlib.metadata.version("crystallite"),
        "torch": torch.__version__,
        "source_sha256": None if source is None else source_sha256(source),
        "modules": modules,
        "training": model.training,
        "tied": ties,
        "frozen": [name for name, value in model.named_parameters() if not value.requires_grad],
        "record": record.to_plain(),
        "verdict": None,
        "metadata": metadata or {},
    }
    with new_folder(target) as folder:
        if in_config is None:
            save_file({name: _alone(value) for name, value in state.items() if name not in ties}, folder / WEIGHTS)
        else:
            write_pretrained(model, folder, None if files is None else Path(files))
        write_manifest(folder, manifest | {"weights_sha256": weights_sha256(folder)})
    return target


@suggest_keywords
def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """The model that `save` wrote, or `save_pretrained` of a reorganized transformers model.

    A transformers model is opened as the class its config names, and needs no `into`. A model made of `nn.Sequential`,
    PyTorch's usual modules and block operators is rebuilt from the manifest. For a model with code of its own pass
    `into=` an instance of the original, which is not changed: a copy of it gets the modules and weights that were
    saved. Nothing of the original's weights is copied, but buffers that no state dict holds are its own. Parameters are
    frozen as they were.

    Args:
        path: the folder.
        into: an instance of the original, for a model with code of its own.

    Returns:
        The model, with what was done to it as its record.

    Raises:
        CheckpointError: a folder that is damaged, hostile or not of this format.
    """
    check_weights(path)
    return _opened(Path(path), into, mapped=False)


def load_mapped(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """The model that `save` wrote, its weights left in the file: what is not used is not read.

    The hash of the weights, for which all of them would be read, is not compared; see `check_weights`. The file must
    not be written to while the model is used.
    """
    return _opened(Path(path), into, mapped=True)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy whose weights have shapes and no numbers, to be loaded `into`; buffers of no state dict are copied.

    >>> without_weights(nn.Linear(2, 3)).weight
    Parameter containing:
    tensor(..., device='meta', size=(3, 2), requires_grad=True)
    """
    held = {id(value): _on_meta(value) for value in model.state_dict(keep_vars=True).values()}
    return copy.deepcopy(model, held)


def _opened(folder: Path, into: nn.Module | None, mapped: bool) -> nn.Module:
    into = None if into is None else without_wrappers(into)[0]
    manifest = read_manifest(folder)
    record = Record.from_plain(manifest["record"], folder / MANIFEST)
    if (folder / CONFIG).is_file():
        model = open_pretrained(folder, into)
        set_record_(model, record)
        return model.train(manifest["training"])
    if "" in manifest["modules"]:
        model = build(manifest["modules"][""], folder / MANIFEST)
    elif into is None:
        raise InvalidOption(
            f"{folder}: this model has code of its own; pass into= an instance of the original, or on the command line "
            "--original package.module:factory"
        )
    else:
        model = without_weights(into)
        replace(model, manifest["modules"], folder / MANIFEST)
    with open_checkpoint(weights_of(folder)) as checkpoint:
        _fill(model, folder, manifest["tied"], checkpoint, mapped)
    check_indices(model, folder)
    if mixed := mixed_dtypes(model, "" in manifest["modules"]):
        raise CheckpointError(f"{folder}: {mixed}")
    frozen = {name for name in manifest["frozen"] if isinstance(name, str)}
    for name, value in model.named_parameters():
        value.requires_grad_(value.is_floating_point() and name not in frozen)
    set_record_(model, record)
    if into is not None:
        write_config(model, into)  # so that `save_pretrained` writes what `from_pretrained` reads
    return model.train(manifest["training"])


def _ties(state: Mapping[str, Tensor]) -> dict[str, str]:
    """name → the earlier name that holds the same memory."""
    seen: dict[Any, str] = {}
    tied = {}
    for name, value in state.items():
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and seen.setdefault(key, name) != name:
            tied[name] = seen[key]
    return tied


def _alone(value: Tensor) -> Tensor:
    """The tensor in memory of its own, which safetensors demands."""
    value = value.detach().contiguous()
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _on_meta(value: Tensor) -> Tensor:
    empty = torch.empty_like(value, device="meta")
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def _fill(model: nn.Module, folder: Path, tied: dict[str, Any], checkpoint: Checkpoint, mapped: bool) -> None:
    """Give the model its weights after checking that every one is there, in its size and kind, and nothing else."""
    expected = {name: (tuple(v.shape), v.is_floating_point()) for name, v in model.state_dict().items()}
    stored = {name: (info.shape, "float" in info.dtype) for name, info in checkpoint.tensors.items()}
    for name, first in tied.items():
        if not isinstance(first, str) or first not in checkpoint.tensors or name in checkpoint.tensors:
            raise CheckpointError(f"{folder / MANIFEST}: {name!r:.80} cannot be tied to {first!r:.80}")
    stored |= {name: stored[first] for name, first in tied.items()}
    if stored != expected:
        wrong = min(set(stored.items()) ^ set(expected.items()))[0]
        came, wanted = (_size(sizes.get(wrong)) for sizes in (stored, expected))
        raise CheckpointError(f"{folder}: tensor {wrong!r:.80}: expected {wanted}, got {came}")
    tensors = {name: torch.as_tensor(checkpoint.read(name)) for name in stored if name not in tied}
    if not mapped:
        tensors = {name: value.clone() for name, value in tensors.items()}
    model.load_state_dict(tensors | {name: tensors[first] for name, first in tied.items()}, assign=True)
    for name, first in tied.items():  # one parameter in two places, not two that share memory
        parent, _, place = name.rpartition(".")
        shared = model.get_submodule(first.rpartition(".")[0])._parameters.get(first.rpartition(".")[2])
        if shared is not None:
            setattr(model.get_submodule(parent), place, shared)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and not buffer.numel():  # says only the dtype
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _size(found: tuple[tuple[int, ...], bool] | None) -> str:
    return "none" if found is None else f"{'floating-point numbers' if found[1] else 'integers'} of shape {found[0]}"
