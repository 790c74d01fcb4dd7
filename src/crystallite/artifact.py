"""`save` and `load`: a reorganized model as a folder of safetensors and JSON. Nothing in it is executed, ever.

model.safetensors   every parameter and buffer; a block can be read without the others
manifest.json       format version, what each replaced module is, how it was made, and the hash of the weights
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from crystallite.errors import CheckpointError, InvalidOption
from crystallite.operators.chain import BlockChain, SubnetworkGroup
from crystallite.operators.linear import BlockLinear
from crystallite.reorganization.record import LayerChange, Reorganization
from crystallite.weights.checkpoint import open_checkpoint

__all__ = ["load", "load_block", "save"]

VERSION = 1
_MOST_MANIFEST_BYTES = 64 << 20
_WEIGHTS, _MANIFEST = "model.safetensors", "manifest.json"

# Modules that can be rebuilt from their names alone, with the attributes that are their constructor's arguments.
_KNOWN: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    cls.__name__: (cls, arguments)
    for cls, arguments in [
        (nn.Identity, ()), (nn.ReLU, ()), (nn.ReLU6, ()), (nn.SiLU, ()), (nn.Mish, ()), (nn.Tanh, ()), (nn.Sigmoid, ()),
        (nn.Softsign, ()), (nn.Tanhshrink, ()), (nn.LogSigmoid, ()), (nn.Hardsigmoid, ()), (nn.Hardswish, ()),
        (nn.SELU, ()), (nn.GELU, ("approximate",)), (nn.ELU, ("alpha",)), (nn.CELU, ("alpha",)),
        (nn.LeakyReLU, ("negative_slope",)), (nn.Softplus, ("beta", "threshold")),
        (nn.Hardtanh, ("min_val", "max_val")),
        (nn.Hardshrink, ("lambd",)), (nn.Softshrink, ("lambd",)), (nn.Threshold, ("threshold", "value")),
        (nn.Dropout, ("p",)), (nn.Softmax, ("dim",)), (nn.LogSoftmax, ("dim",)),
        (nn.Flatten, ("start_dim", "end_dim")),
        (nn.LayerNorm, ("normalized_shape", "eps", "elementwise_affine")),
        (nn.BatchNorm1d, ("num_features", "eps", "momentum", "affine", "track_running_stats")),
    ]
}  # fmt: skip


def save(model: nn.Module, path: str | os.PathLike[str], *, metadata: dict[str, Any] | None = None) -> Path:
    """Write a reorganized model to a new folder, all of it or nothing.

    `metadata` is kept in the manifest (the level, the null, the source, …) and must be plain JSON values. A folder
    that exists already is not touched.
    """
    target = Path(path)
    if target.exists():
        raise InvalidOption(f"{target}: exists already; choose another name or remove it")
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    replaced = _replaced(model)
    if not replaced:
        raise InvalidOption("this model holds no reorganized layer; save it with safetensors or torch instead")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        save_file(_untied(state), folder / _WEIGHTS)
        manifest = {
            "format": "crystallite",
            "version": VERSION,
            "weights_sha256": _sha256(folder / _WEIGHTS),
            "replaced": replaced,
            "tree": _tree(model),
            "dtype": str(next(iter(state.values())).dtype).removeprefix("torch."),
            "tied": _ties(state),
            "reorganization": [asdict(c) for c in getattr(model, "reorganization", Reorganization([])).changes],
            "metadata": metadata or {},
        }
        try:
            text = json.dumps(manifest, indent=1)
        except TypeError as error:
            raise InvalidOption(f"metadata must be plain JSON values: {error}") from None
        (folder / _MANIFEST).write_text(text + "\n")
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return target


def load(path: str | os.PathLike[str], into: nn.Module | None = None) -> nn.Module:
    """The model that `save` wrote.

    Models made of `nn.Sequential` and PyTorch's own elementwise modules and norms are rebuilt from the manifest. For a
    model with code of its own pass `into=` an instance of the original: a copy of it gets the reorganized layers.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    if into is not None:
        model = copy.deepcopy(into)
        for name, description in manifest["replaced"].items():
            parent, _, place = name.rpartition(".")
            if name not in dict(model.named_modules()):
                raise CheckpointError(f"{folder}: the given model has no module {name!r}")
            setattr(model.get_submodule(parent), place, _build(description, folder))
    elif manifest["tree"] is None:
        raise InvalidOption(f"{folder}: this model has code of its own; pass into= an instance of the original")
    else:
        model = _build(manifest["tree"], folder)
    _fill(model, folder, manifest)
    changes = [LayerChange(**c) for c in manifest["reorganization"]]
    model.reorganization = Reorganization(changes)  # type: ignore[assignment]
    return model


def load_block(path: str | os.PathLike[str], layer: str, stack: int, block: int) -> Tensor:
    """One block of one `BlockLinear`, read without the others."""
    with open_checkpoint(Path(path) / _WEIGHTS) as checkpoint:
        name = f"{layer}.weights.{stack}"
        if name not in checkpoint.tensors or not 0 <= block < checkpoint.tensors[name].shape[0]:
            raise CheckpointError(f"{path}: no block {block} in {name}")
        part = checkpoint.read(name)[block]
        return part.clone() if isinstance(part, Tensor) else torch.from_numpy(part.copy())


def _replaced(model: nn.Module) -> dict[str, Any]:
    """Descriptions of the reorganized modules, and of the places in an nn.Sequential that a chain left empty."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, (BlockLinear, BlockChain)):
            found[name] = _describe(module)
        elif isinstance(module, nn.Sequential) and any(isinstance(m, BlockChain) for m in module):
            empty = (place for place, child in module.named_children() if type(child) is nn.Identity)
            found |= {f"{name}.{place}" if name else place: _tree(nn.Identity()) for place in empty}
    return found


def _describe(module: nn.Module) -> dict[str, Any]:
    if isinstance(module, BlockLinear):
        return {
            "type": "BlockLinear",
            "in_features": module.in_features,
            "out_features": module.out_features,
            "stacks": [list(w.shape) for w in module.weights],
            "columns": len(module.columns),
            "bias": module.bias is not None,
        }
    assert isinstance(module, BlockChain)
    return {
        "type": "BlockChain",
        "sizes": list(module.sizes),
        "groups": [[list(w.shape) for w in group.weights] for group in module.subnetwork_groups],
        "activations": [_tree(a) for a in module.activations],
        "inputs": len(module.inputs),
        "idle": len(module.idle_bias),
    }


def _tree(module: nn.Module) -> dict[str, Any] | None:
    """The module as names and numbers, or None if it has code of its own."""
    if isinstance(module, (BlockLinear, BlockChain)):
        description = _describe(module)
        return None if None in description.get("activations", []) else description
    if type(module) is nn.Sequential:
        children = {name: _tree(child) for name, child in module.named_children()}
        return None if None in children.values() else {"type": "Sequential", "children": children}
    if type(module) is nn.Linear:
        return {"type": "Linear", "arguments": [module.in_features, module.out_features, module.bias is not None]}
    name = type(module).__name__
    if name in _KNOWN and type(module) is _KNOWN[name][0]:
        return {"type": name, "arguments": [_plain(getattr(module, a)) for a in _KNOWN[name][1]]}
    return None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _build(description: Any, folder: Path) -> nn.Module:
    """An empty module from its description; sizes are checked against the weights when it is filled."""
    try:
        kind = description["type"]
        builder: Callable[[Any], nn.Module] = _BUILDERS.get(kind, _build_known)
        with torch.device("meta"):  # nothing is allocated on the manifest's word
            return builder(description)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"{folder / _MANIFEST}: expected the description of a module, got {error}") from None


def _build_known(description: dict[str, Any]) -> nn.Module:
    cls, _names = _KNOWN[description["type"]]
    return cls(*description["arguments"])


def _build_sequential(description: dict[str, Any]) -> nn.Module:
    result = nn.Sequential()
    for name, child in description["children"].items():
        result.add_module(name, _BUILDERS.get(child["type"], _build_known)(child))
    return result


def _build_linear(description: dict[str, Any]) -> nn.Module:
    return nn.Linear(*description["arguments"])


def _build_block_linear(description: dict[str, Any]) -> nn.Module:
    rows = int(description["out_features"])
    return BlockLinear(
        int(description["in_features"]),
        rows,
        [torch.empty(*shape) for shape in description["stacks"]],
        torch.empty(int(description["columns"]), dtype=torch.long),
        torch.empty(rows, dtype=torch.long),
        torch.empty(rows) if description["bias"] else None,
    )


def _build_chain(description: dict[str, Any]) -> nn.Module:
    groups = [
        SubnetworkGroup([torch.empty(*s) for s in shapes], [torch.empty(s[0], 1, s[1]) for s in shapes])
        for shapes in description["groups"]
    ]
    activations = [_BUILDERS.get(a["type"], _build_known)(a) for a in description["activations"]]
    inputs = torch.empty(int(description["inputs"]), dtype=torch.long)
    outputs = torch.empty(int(description["sizes"][-1]), dtype=torch.long)
    return BlockChain(description["sizes"], groups, activations, inputs, outputs, torch.empty(int(description["idle"])))


_BUILDERS: dict[str, Callable[[Any], nn.Module]] = {
    "Sequential": _build_sequential,
    "Linear": _build_linear,
    "BlockLinear": _build_block_linear,
    "BlockChain": _build_chain,
}


def _fill(model: nn.Module, folder: Path, manifest: dict[str, Any]) -> None:
    """Give the model its weights after checking that every one is there, in its size, and nothing else."""
    with open_checkpoint(folder / _WEIGHTS) as checkpoint:
        expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        stored = {name: info.shape for name, info in checkpoint.tensors.items()}
        stored |= {name: stored.get(source, ()) for name, source in manifest["tied"].items()}
        if stored != expected:
            wrong = next(iter(sorted(set(stored.items()) ^ set(expected.items()))))[0]
            raise CheckpointError(
                f"{folder}: tensor {wrong!r:.80}: expected shape {expected.get(wrong)}, got {stored.get(wrong)}"
            )
        tensors = {name: torch.as_tensor(checkpoint.read(name)).clone() for name in checkpoint.tensors}
    tensors |= {name: tensors[source] for name, source in manifest["tied"].items()}
    for name, module in model.named_modules():
        if isinstance(module, (BlockLinear, BlockChain)):
            _check_indices(folder, name, module, tensors)
    model.load_state_dict(tensors, assign=True)
    for module in model.modules():
        if isinstance(module, BlockLinear):
            first = next(module.parameters(), None)
            dtype = getattr(torch, manifest["dtype"]) if first is None else first.dtype
            module.empty = torch.empty(0, dtype=dtype)


def _check_indices(folder: Path, name: str, module: BlockLinear | BlockChain, tensors: dict[str, Tensor]) -> None:
    """Index tables must stay inside their vectors: a wrong one would read another neuron, or crash."""
    prefix = f"{name}." if name else ""
    if isinstance(module, BlockLinear):
        limits = {"columns": module.in_features, "outputs": module.out_features + 1}
    else:
        limits = {"inputs": module.in_features, "outputs": module.out_features}
    for table, limit in limits.items():
        values = tensors[prefix + table]
        if values.dtype != torch.int64 or (len(values) and not 0 <= int(values.min()) <= int(values.max()) < limit):
            raise CheckpointError(f"{folder}: {prefix}{table} must hold indices below {limit}")


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / _MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder}: expected a folder that crystallite saved, found no {_MANIFEST}")
    if file.stat().st_size > _MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{file}: {file.stat().st_size} bytes is too long for a manifest")
    try:
        manifest = json.loads(file.read_bytes())
        version = manifest["version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a manifest: {error}") from None
    if manifest.get("format") != "crystallite" or version != VERSION:
        raise CheckpointError(
            f"{file}: expected format crystallite {VERSION}, got {manifest.get('format')!r} {version!r}"
        )
    missing = {"weights_sha256", "replaced", "tree", "tied", "dtype", "reorganization"} - set(manifest)
    if missing:
        raise CheckpointError(f"{file}: no {sorted(missing)[0]!r}")
    if _sha256(folder / _WEIGHTS) != manifest["weights_sha256"]:
        raise CheckpointError(f"{folder / _WEIGHTS}: its contents are not those the manifest was written for")
    return manifest


def _sha256(file: Path) -> str:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _ties(state: dict[str, Tensor]) -> dict[str, str]:
    """name → the earlier name that holds the same memory."""
    seen: dict[Any, str] = {}
    tied = {}
    for name, value in state.items():
        key = (value.data_ptr(), value.storage_offset(), tuple(value.shape))
        if value.numel() and key in seen:
            tied[name] = seen[key]
        seen.setdefault(key, name)
    return tied


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    ties = _ties(state)
    return {name: value for name, value in state.items() if name not in ties}
