"""One way into weights, whatever they come in: `open_checkpoint` lists the tensors and reads them one at a time.

A file is known by its content, not by its name. Everything it claims is checked here, once; what comes out can be
trusted. Nothing is executed, nothing is written, and nothing is allocated on a file's word alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from crystallite.core.errors import CheckpointError
from crystallite.weights.archive import open_zip
from crystallite.weights.folder import read_folder, read_index
from crystallite.weights.gguf_file import read_gguf
from crystallite.weights.module_roles import module_config, module_roles
from crystallite.weights.numpy_file import read_npy, read_npz
from crystallite.weights.onnx_file import read_onnx
from crystallite.weights.plain_modules import MERGE_FIRST, find_adapters, without_wrappers
from crystallite.weights.safetensors_file import read_safetensors
from crystallite.weights.stored import Array, Contents, Role, SourceFile, TensorInfo, in_memory, refuse
from crystallite.weights.torch_file import is_legacy_torch, named_tensors, read_torch

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


class Checkpoint:
    """The tensors of a model: listed in `tensors`, read one at a time, never kept.

    `source` says where they are from, `format` what they came in, `config` what Hugging Face's config.json (or a
    GGUF header) says, `roles` what the module classes or ONNX nodes that use a tensor make of it, and `notes` what a
    reader of the weights should know about how they were read.
    """

    def __init__(self, source: str, contents: Contents) -> None:
        self.source = source
        self.format = contents.format
        self.config = contents.config
        self.roles: Mapping[str, Role] = contents.roles
        self.notes = contents.notes
        self._stored = {tensor.info.name: tensor for tensor in contents.tensors}
        self.tensors: dict[str, TensorInfo] = {name: tensor.info for name, tensor in self._stored.items()}
        if not self.tensors:
            refuse(source, "at least one tensor", "none")
        if len(self.tensors) != len(contents.tensors):
            refuse(source, "each tensor name once", "one name twice")
        unprintable = next((name for name in self.tensors if not name.isprintable() or not name), None)
        if unprintable is not None:  # names are printed: no escape codes for the reader's terminal
            refuse(source, "printable tensor names", f"{unprintable!r:.80}")

    def read(self, name: str) -> Array:
        """The tensor of that name: mapped where the format allows it, and released when the result is.

        bfloat16 and float8 come as torch tensors, other file formats' numbers as NumPy arrays.

        >>> import numpy as np
        >>> open_checkpoint({"w": np.eye(2)}).read("w").shape
        (2, 2)
        """
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.source}: no tensor {name!r:.80}; it has {', '.join(list(self.tensors)[:5])} …"
            )
        if name not in self._stored:
            raise CheckpointError(f"{self.source}: closed; open it again to read {name!r:.80}")
        return self._stored[name].load()

    def close(self) -> None:
        """Lets go of the source; arrays already read stay valid."""
        self._stored = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        total = sum(info.nbytes for info in self.tensors.values() if info.alias_of is None)
        return f"<Checkpoint {self.source}: {self.format}, {len(self.tensors)} tensors, {total / 1e6:,.1f} MB>"


def open_checkpoint(source: torch.nn.Module | Mapping[str, Any] | str | os.PathLike[str]) -> Checkpoint:
    """The checkpoint behind a module, a state dict, a weights file or a Hugging-Face-style folder.

    Files may be safetensors, torch (`.pt`, `.pth`, `.bin`, `.ckpt`), `.npz`, `.npy`, ONNX or GGUF; folders hold one
    of them or an index of shards. Anything else, and anything damaged, raises `CheckpointError`.

    >>> with open_checkpoint(torch.nn.Linear(3, 2)) as checkpoint:
    ...     [(t.name, t.shape, t.dtype) for t in checkpoint.tensors.values()]
    [('weight', (2, 3), 'float32'), ('bias', (2,), 'float32')]
    """
    if isinstance(source, torch.nn.Module):
        source, notes = without_wrappers(source)
        label = type(source).__name__
        if adapted := find_adapters(source):
            notes += (f"{adapted[-1] or label}: weights without what adapters of PEFT add to them; {MERGE_FIRST}",)
        stored = source.state_dict()
        if packed := next((name for name, value in stored.items() if isinstance(value, tuple)), None):
            refuse(label, "weights as tensors", f"packed ones in {packed}", "pass the model before it was quantised")
        state = {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}
        contents = Contents("module", in_memory(state, label), module_config(source), module_roles(source), notes)
        return Checkpoint(label, contents)
    if isinstance(source, Mapping):
        return Checkpoint("state dict", Contents("state dict", in_memory(named_tensors(source), "state dict")))
    if not isinstance(source, (str, os.PathLike)):
        hint = 'for one matrix, use anneal and decompose, or pass {"name": matrix}'
        refuse("source", "a module, state dict or path", type(source).__name__, hint)
    path = Path(source)
    if not path.exists():
        refuse(path, "a file or folder of weights", "nothing at this path")
    if path.is_dir():
        return Checkpoint(str(path), read_folder(path, _read_file))
    if path.name.endswith(".index.json"):
        return Checkpoint(str(path), read_index(path.parent, path.name, _read_file))
    return Checkpoint(str(path), _read_file(path))


def _read_file(path: Path) -> Contents:
    """The tensors of one file, by what its first bytes say it is; its name decides only where they say nothing."""
    file = SourceFile.at(path)
    head = file.head(64)
    suffix = path.suffix.lower()
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _read_zip(file)
    if head.startswith(b"\x93NUMPY"):
        return read_npy(file)
    if head.startswith(b"GGUF"):
        return read_gguf(file)
    if is_legacy_torch(head):
        return read_torch(file, zipped=False)
    if head.startswith(b"version ") and b"git-lfs" in head:
        refuse(path, "weights", "a Git LFS pointer to them", "run `git lfs pull`")
    if head[8:9] == b"{" or suffix == ".safetensors":
        return read_safetensors(file)
    if head[:1] == b"\x08" or suffix == ".onnx":  # a protobuf whose first field is a number: ONNX's ir_version
        return read_onnx(file)
    if head.startswith(b"\x80"):
        refuse(path, "a file that torch.save wrote", "another kind of pickle, which could run code")
    refuse(path, "safetensors, torch, npz, npy, ONNX or GGUF", f"a file that begins with {head[:8]!r}")


def _read_zip(file: SourceFile) -> Contents:
    with open_zip(file) as archive:
        names = archive.namelist()
    if any(name.endswith("data.pkl") for name in names):
        return read_torch(file, zipped=True)
    if names and all(name.endswith(".npy") for name in names):
        return read_npz(file)
    refuse(file.path, "an archive of .npy arrays or one that torch.save wrote", f"members {names[:3]!r:.120}")
