"""The manifest of a saved model: what an artifact and a transformers folder of ours carry alike.

`manifest.json` names the format, what the modules are, how they came about (the record), which parameters are frozen,
the hashes of the weights and of the model they were made from, and holds the verdict of a validation. A transformers
folder has the same file beside its `config.json`, rather than more keys in the config, because a verdict comes later
than the weights and `from_pretrained` must go on reading configs that it understands. Where a reorganized model was
written by `save_pretrained` alone, its config says enough for a manifest without a source and without a verdict.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.files import write_file
from crystallite.models.recorded_call import RecordedCall
from crystallite.models.typed_json import to_plain
from crystallite.weights.checkpoint import open_checkpoint
from crystallite.weights.stored import SourceFile, load_json

__all__ = [
    "MANIFEST", "METHOD", "QUANT_METHOD", "VERSION", "attach_verdict", "check_source", "check_weights", "is_saved",
    "read_manifest", "source_sha256", "weights_of", "weights_sha256", "write_manifest",
]  # fmt: skip

VERSION = 4
METHOD = "crystallite"
# In the config of a transformers model; transformers shows it to whoever opens the folder without us.
QUANT_METHOD = "crystallite (pip install crystallite, and import crystallite before you open this folder)"
MANIFEST, CONFIG, WEIGHTS = "manifest.json", "config.json", "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
_PASS_ANOTHER = (
    "pass the one it was made from. cx.load gives the model itself, to compare it with any other and keep no verdict"
)
_MOST_BYTES = 32 << 20  # the orders of 80 layers of 28,672 neurons take 14 million
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "weights_sha256": str,
    "source_sha256": (str, type(None)),
    "modules": dict,
    "training": bool,
    "tied": dict,
    "frozen": list,
    "record": dict,
    "verdict": (dict, type(None)),
    "metadata": dict,
}


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` wrote about a model, checked to be complete. The weights are not read where there is a manifest.

    Args:
        path: the folder.

    Returns:
        The manifest, as plain values.

    Raises:
        CheckpointError: no such folder, another version, a field that is missing or of another type, or contents that
            are not those that were written.

    Examples:
        >>> read_manifest("nowhere")
        Traceback (most recent call last):
        crystallite.core.errors.CheckpointError: nowhere: expected a folder that crystallite saved, found no
        manifest.json
    """
    folder = Path(path)
    file = folder / MANIFEST
    if file.is_file():
        manifest = _read_json(file, "manifest")
        if (signed := manifest.pop("manifest_sha256", None)) != _signature(manifest):
            raise CheckpointError(
                f"{file}: expected a manifest as it was written, got one that was changed: its manifest_sha256 is "
                f"{signed!r:.80}; save the model again, or, if the change is yours, sign it with "
                "crystallite.models.manifest.write_manifest(folder, json.loads(text))"
            )
    elif (config := _our_config(folder)) is not None:
        manifest = {
            "format": METHOD, "version": VERSION, "weights_sha256": weights_sha256(folder), "source_sha256": None,
            "training": False, "tied": {}, "verdict": None, "metadata": {},
        } | {name: config.get(name) for name in ("modules", "frozen", "record")}  # fmt: skip
    else:
        raise CheckpointError(f"{path}: expected a folder that crystallite saved, found no {MANIFEST}")
    made_by, version = manifest.get("format"), manifest.get("version")
    if made_by != METHOD or version != VERSION:
        raise CheckpointError(f"{file}: expected format crystallite {VERSION}, got {made_by!r:.80} {version!r:.80}")
    for name, kind in _FIELDS.items():
        if name not in manifest or not isinstance(manifest[name], kind):
            raise CheckpointError(f"{file}: expected {name!r} in the manifest, got {manifest.get(name)!r:.80}")
    verdict = manifest["verdict"]
    if verdict is not None and verdict.get("weights_sha256") != manifest["weights_sha256"]:
        raise CheckpointError(f"{file}: the verdict was given on other weights; validate the model again")
    return manifest


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a reorganized model that `save`, or `save_pretrained` of such a model, wrote."""
    return (Path(path) / MANIFEST).is_file() or _our_config(Path(path)) is not None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write or replace the manifest of a folder with its hash, at once or not at all."""
    try:
        plain = json.loads(json.dumps(manifest | {"manifest_sha256": None}))  # as it will be read: names are strings
        text = json.dumps(plain | {"manifest_sha256": _signature(plain)}, indent=1)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"options, metadata and verdicts must be plain JSON values: {error}") from None
    write_file(folder / MANIFEST, f"{text}\n".encode())


def attach_verdict(path: str | os.PathLike[str], verdict: dict[str, Any], call: RecordedCall | None = None) -> None:
    """Write a validation's verdict into a saved model's manifest, bound to the weights as they lie there.

    An earlier verdict is replaced; the manifest changes at once or not at all.

    Args:
        path: the folder.
        verdict: plain JSON values, such as `Verdict.to_json()`.
        call: what the model was called with, to be kept where the record does not say it yet.

    Returns:
        Nothing.

    Raises:
        CheckpointError: the folder is damaged, or its weights are not those that the manifest names.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    found = check_weights(folder)
    if call is not None and manifest["record"].get("call") is None:
        manifest["record"] = manifest["record"] | {"call": to_plain(RecordedCall, call)}
    write_manifest(folder, manifest | {"verdict": verdict | {"weights_sha256": found}})


def check_weights(path: str | os.PathLike[str]) -> str:
    """The hash of a saved model's weights, compared with the one that the manifest names."""
    folder = Path(path)
    named, found = read_manifest(folder)["weights_sha256"], weights_sha256(folder)
    if found != named:
        raise CheckpointError(f"{weights_of(folder)}: its contents are not those the manifest was written for")
    return found


def check_source(path: str | os.PathLike[str], original: nn.Module, advice: str = _PASS_ANOTHER) -> None:
    """Refuse an original that a saved model was not made from, as far as its manifest says what that was.

    advice: what to do then.
    """
    named = read_manifest(path)["source_sha256"]
    if named is not None and (found := source_sha256(original)) != named:
        raise InvalidOption(
            f"{path}: made from a model with the hash {named:.12}…, got an original with {found:.12}…; {advice}"
        )


def weights_of(folder: Path) -> Path:
    """The file of a saved model's weights, or the index of the files that transformers spread them over."""
    index = folder / _INDEX
    return index if index.is_file() and not (folder / WEIGHTS).is_file() else folder / WEIGHTS


def weights_sha256(folder: Path) -> str:
    """The hash of a saved model's weights: of the file, or of the hashes of several by sorted name."""
    file = weights_of(folder)
    if file.name == WEIGHTS:
        return _sha256(file)
    names = _read_json(file, "index").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise CheckpointError(f"{file}: expected names of files beside it, got {names!r:.80}")
    parts = ((name, _sha256(folder / name)) for name in sorted(set(names.values())))
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in parts).encode()).hexdigest()


def source_sha256(source: nn.Module | Mapping[str, Any] | str | os.PathLike[str]) -> str:
    """A hash of a model's weights: names, dtypes, shapes and bytes, by sorted name, whatever file they lie in.

    Of tensors that share their data the first counts.

    Args:
        source: a model, a state dict, a file or a folder.

    Returns:
        The hash, in hexadecimal.

    Raises:
        CheckpointError: a file that cannot be read as weights.

    Examples:
        >>> source_sha256({"a": torch.ones(2)}) == source_sha256({"a": torch.zeros(2)})
        False
    """
    digest = hashlib.sha256()
    with open_checkpoint(source) as checkpoint:
        for name, info in sorted(checkpoint.tensors.items()):
            if info.alias_of is None:
                digest.update(json.dumps([name, info.dtype, info.shape]).encode())
                values: Any = checkpoint.read(name)
                if isinstance(values, torch.Tensor):
                    values = values.contiguous().reshape(-1).view(torch.uint8).numpy()
                numbers: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
                digest.update(numbers)
    return digest.hexdigest()


def _our_config(folder: Path) -> dict[str, Any] | None:
    """What `write_config` put into the config of a transformers folder."""
    if not (folder / CONFIG).is_file():
        return None
    found = _read_json(folder / CONFIG, "config").get("quantization_config")
    return found if isinstance(found, dict) and found.get("quant_method") == QUANT_METHOD else None


def _signature(manifest: dict[str, Any]) -> str:
    """The hash of a manifest's contents but the hash itself: JSON with sorted names and no spaces."""
    signed = {name: value for name, value in manifest.items() if name != "manifest_sha256"}
    try:
        return hashlib.sha256(json.dumps(signed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    except RecursionError:
        raise CheckpointError("expected a manifest in JSON, got values too deep in each other") from None


def _read_json(file: Path, what: str) -> dict[str, Any]:
    opened = SourceFile.at(file)
    if opened.size > _MOST_BYTES:
        raise CheckpointError(f"{file}: expected a {what} of at most {_MOST_BYTES} bytes, got {opened.size}")
    return load_json(file, opened.head(opened.size), what)


def _sha256(file: Path) -> str:
    if not file.is_file():
        raise CheckpointError(f"{file}: missing")
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
