"""Finds the weights of a Hugging-Face-style folder, and keeps every file it names inside that folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from crystallite.weights.stored import Contents, SourceFile, StoredTensor, load_json, refuse

__all__ = ["inside", "read_folder", "read_index"]

_PREFERRED = tuple(  # transformers' order
    f"{stem}{suffix}"
    for stem in ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
    for suffix in ("", ".index.json")
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".npy", ".onnx", ".gguf")
_MAX_CONFIG_BYTES = 10 << 20

ReadFile = Callable[[Path], Contents]


def inside(root: Path, relative: str, named_in: Path) -> Path:
    """The file that `relative` names under `root`, or an error if it lies elsewhere, links followed.

    The Hugging Face cache keeps a snapshot's files as links to blobs beside it, so links may lead anywhere within
    the nearest folder called `models--…`.
    """
    absolute = PurePosixPath(relative).is_absolute() or PureWindowsPath(relative).anchor
    if not relative or "\0" in relative or absolute or ".." in PureWindowsPath(relative).parts:
        refuse(named_in, "the name of a file in the same folder", f"{relative!r:.80}")
    real_root = root.resolve()
    cache = next((p for p in real_root.parents if p.name.startswith("models--")), real_root)
    try:
        target = (real_root / relative).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        refuse(named_in, f"a readable file {relative!r:.80}", str(error))
    if not (target.is_relative_to(real_root) or target.is_relative_to(cache)):
        refuse(named_in, f"file {relative!r:.80} inside its folder", "a link that leaves it")
    return real_root / relative


def read_folder(root: Path, read_file: ReadFile) -> Contents:
    """The weights of a folder: `model.safetensors`, its index, `pytorch_model.bin`, or the only weights file."""
    chosen = next((name for name in _PREFERRED if (root / name).exists()), None) or _only_weights_file(root)
    contents = (
        read_index(root, chosen, read_file)
        if chosen.endswith(".index.json")
        else read_file(inside(root, chosen, named_in=root))
    )
    return Contents(contents.format, contents.tensors, {**contents.config, **_config(root)}, contents.roles)


def read_index(root: Path, index_name: str, read_file: ReadFile) -> Contents:
    """The tensors of all the shards that an index names, in the order of the shards."""
    path = inside(root, index_name, named_in=root)
    weight_map = _json_file(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(path, "a weight_map from tensor names to files", f"{weight_map!r:.80}")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        refuse(path, "file names in weight_map", "something else")
    shards = {shard: inside(root, shard, named_in=path) for shard in sorted(set(weight_map.values()))}
    named: dict[str, list[str]] = {shard: [] for shard in shards}
    for name, shard in weight_map.items():
        named[shard].append(name)
    tensors: dict[str, StoredTensor] = {}
    formats = set()
    for shard, shard_path in shards.items():
        contents = read_file(shard_path)
        formats.add(contents.format)
        for tensor in contents.tensors:
            if tensor.info.name in tensors:
                refuse(path, "each tensor in one shard", f"{tensor.info.name!r:.80} again in {shard}")
            tensors[tensor.info.name] = tensor
        missing = [name for name in named[shard] if name not in tensors]
        if missing:
            refuse(path, f"tensor {missing[0]!r:.80} in {shard}", f"{len(contents.tensors)} others there")
    return Contents("+".join(sorted(formats)), list(tensors.values()))


def _only_weights_file(root: Path) -> str:
    found = sorted(p.name for p in root.iterdir() if p.name.endswith((*_WEIGHT_SUFFIXES, ".index.json")))
    indexes = [name for name in found if name.endswith(".index.json")]
    if len(indexes) == 1:
        return indexes[0]
    if not found:
        refuse(root, f"a folder with weights ({', '.join(_WEIGHT_SUFFIXES)})", "none in it")
    if len(found) > 1:
        refuse(root, "one weights file or an index", f"{', '.join(found)[:200]}", "name the one you mean")
    return found[0]


def _config(root: Path) -> dict[str, Any]:
    path = root / "config.json"
    return _json_file(inside(root, path.name, named_in=root)) if path.exists() else {}


def _json_file(path: Path) -> dict[str, Any]:
    file = SourceFile.at(path)
    if file.size > _MAX_CONFIG_BYTES * (10 if path.name.endswith(".index.json") else 1):
        refuse(path, "a JSON file of a sane size", f"{file.size} bytes")
    return load_json(path, file.head(file.size), path.name)
