"""`save` and `load`: a reorganized model as a folder of safetensors and JSON. Nothing in it is executed, ever.

model.safetensors   every parameter and buffer that is in a state dict; all index tables int64
manifest.json       what `models/manifest.py` says: the same for every folder that we write

A model of a class of transformers' own becomes a transformers folder, with the same manifest beside `config.json`:
`from_pretrained` reads it too, and `load` opens it as the class it was. So there is one kind of folder to validate,
report and serve, and whoever has code for transformers needs no other. A block can be read without the others. The
weights must have the hash that the manifest names, and so must a verdict.
"""

from __future__ import annotations

import copy
import importlib.metadata
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
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
from crystallite.models.record import ExactOptions, Record, find_record, set_record_
from crystallite.models.transformers_folder import described_in_config, open_pretrained, write_config, write_pretrained
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["LoadedBlock", "load", "load_block", "load_mapped", "save", "without_weights"]


@suggest_keywords
def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    source: nn.Module | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    metadata: dict[str, Any] | None = None,
    files: str | os.PathLike[str] | None = None,
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

    Returns:
        The folder.

    Raises:
        InvalidOption: the folder exists, or the model holds nothing that could be loaded again.
    """
    target = Path(path)
    if target.exists():
        raise InvalidOption(f"{target}: exists already; choose another name or remove it")
    record = find_record(model) or Record(ExactOptions())
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
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        if in_config is None:
            save_file({name: _alone(value) for name, value in state.items() if name not in ties}, folder / WEIGHTS)
        else:
            write_pretrained(model, folder, None if files is None else Path(files))
        write_manifest(folder, manifest | {"weights_sha256": weights_sha256(folder)})
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
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
    manifest = read_manifest(folder)
    record = Record.from_plain(manifest["record"], folder / MANIFEST)
    if (folder / CONFIG).is_file():
        model = open_pretrained(folder, into)
        set_record_(model, record)
        return model.train(manifest["training"])
    if "" in manifest["modules"]:
        model = build(manifest["modules"][""], folder / MANIFEST)
    elif into is None:
        raise InvalidOption(f"{folder}: this model has code of its own; pass into= an instance of the original")
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


@dataclass(frozen=True)
class LoadedBlock:
    """One sub-operator: y[rows] = weight @ x[columns] + bias."""

    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    columns: Tensor


def load_block(path: str | os.PathLike[str], layer: str, block: int) -> LoadedBlock:
    """One block of a `BlockLinear`, a `BlockConv`, or a layer of a `BlockChain` ("name.layers.1"), as they are stored.

    A layer that stayed one matrix, such as a factor of a low rank, is block 0 of itself. The weight of a convolution's
    block is its kernel; its rows and columns are channels. Rows and columns are neurons of the dense model, whatever
    was folded. Only this block is read, and index tables of O(n); the hash of the weights, for which all of them would
    be read, is not compared.

    Args:
        path: the folder that `save` wrote.
        layer: the name of the layer.
        block: its number, from 0.

    Returns:
        A `LoadedBlock`: y[rows] = weight @ x[columns] + bias.

    Raises:
        CheckpointError: there is no such layer or block, or the folder is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    chain, number = layer, ""
    described = _description_at(manifest["modules"], layer)
    if described.get("type") not in ("BlockLinear", "BlockConv", "Linear"):  # a layer may have a digit for a name
        chain, _, number = layer.rpartition(".layers.")
        described = _description_at(manifest["modules"], chain) if number.isdigit() else {}
        if described.get("type") != "BlockChain":
            raise CheckpointError(
                f"{folder}: expected the name of a BlockLinear, a BlockConv, a linear layer or a BlockChain's layer, "
                f"got {layer!r:.80}"
            )
    of_conv, dense = described["type"] == "BlockConv", described["type"] == "Linear"
    with open_checkpoint(weights_of(folder)) as checkpoint:

        def table(name: str, at: Tensor, inverse: bool = False) -> Tensor:
            """The entries of a table, or the places themselves where there is none."""
            if name not in checkpoint.tensors:
                return at
            entries = _tensor(checkpoint, name)
            return (torch.argsort(entries) if inverse else entries)[at]

        prefix = f"{layer}." if layer else ""

        def stored(stack: int) -> tuple[str, tuple[int, int, int]] | None:
            """The name of a stack, and how many blocks of how many rows and columns it holds; None past the last."""
            name = f"{prefix}parts.{stack}.weight" if of_conv else f"{prefix}weights.{stack}"
            name = f"{prefix}weight" if dense and not stack else name
            info = checkpoint.tensors.get(name)
            if info is None:
                return None
            if not of_conv:
                return name, (1, *info.shape) if dense else info.shape  # type: ignore[return-value]
            groups = int(described["parts"][stack][2])
            return name, (groups, info.shape[0] // groups, info.shape[1])

        row = column = stack = 0
        left = block
        while (found := stored(stack)) and left >= found[1][0]:
            count, height, width = found[1]
            stack, left, row, column = stack + 1, left - count, row + count * height, column + count * width
        if found is None or left < 0:
            raise CheckpointError(f"{folder}: no block {block} in layer {layer!r:.80}")
        _, height, width = found[1]
        lines = torch.arange(row + left * height, row + (left + 1) * height)
        reads = f"{prefix}{'inputs' if of_conv else 'columns'}"
        columns = table(reads, torch.arange(column + left * width, column + (left + 1) * width))
        rows = lines
        if not number.isdigit():
            rows = lines = table(f"{prefix}outputs", lines, inverse=True)
        elif int(number) + 1 == len(described["layers"]):
            rows = table(f"{chain}.outputs", lines, inverse=True)
        else:
            rows = table(f"{prefix}neurons", lines)
        if number.isdigit() and int(number):
            columns = table(f"{chain}.layers.{int(number) - 1}.neurons", columns)
        bias = table(f"{prefix}bias", lines) if f"{prefix}bias" in checkpoint.tensors else None
        whole = _tensor(checkpoint, found[0])
        place = slice(left * height, (left + 1) * height)
        weight = (whole[place] if of_conv else whole if dense else whole[left]).clone()
    record = Record.from_plain(manifest["record"], folder / MANIFEST)
    outputs, inputs = _folded(record, *((chain, int(number)) if number.isdigit() else (layer, 0)))
    rows, columns = (at if order is None else order[at] for order, at in ((outputs, rows), (inputs, columns)))
    return LoadedBlock(weight, bias, rows, columns)


def _description_at(modules: dict[str, Any], name: str) -> dict[str, Any]:
    """The description of a module, which may stand inside that of another; empty if there is none."""
    inside: list[str] = []
    while name not in modules and name:
        name, _, place = name.rpartition(".")
        inside.insert(0, place)
    found: Any = modules.get(name, {})
    for place in inside:
        found = found.get("children", found) if isinstance(found, dict) else {}
        found = found.get(place, {}) if isinstance(found, dict) else {}
    return dict(found) if isinstance(found, dict) else {}


def _folded(record: Record, name: str, number: int) -> list[Tensor | None]:
    """The orders folded into the rows and columns of a layer: that of this name, or so many after it in a chain."""
    names = [change.name for change in record.changes]
    place = names.index(name) + number if name in names else len(names)
    if place >= len(names):
        return [None, None]
    orders = {where: fold.order for fold in record.folds for where in fold.places}
    axes = (1, 0) if record.changes[place].kind == "Conv1D" else (0, 1)
    return [orders.get((f"{names[place]}.weight", axis)) for axis in axes]


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


def _tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """The stored tensor, mapped."""
    return torch.as_tensor(checkpoint.read(name))


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
    tensors = {name: _tensor(checkpoint, name) for name in stored if name not in tied}
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
