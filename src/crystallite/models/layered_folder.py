"""A transformers folder or GGUF file read, and a folder written, one layer at a time: for models larger than memory."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.core.files import new_folder
from crystallite.models.description import build_once, check_indices, describe_parts
from crystallite.models.gguf_source import GgufWeights, is_gguf, model_of_gguf, write_tokenizer
from crystallite.models.manifest import CONFIG, METHOD, VERSION, weights_sha256, write_manifest
from crystallite.models.record import Record, set_record_
from crystallite.models.swap import put_
from crystallite.models.transformers_folder import copy_files, put_described_, say_size_, write_config_file
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = [
    "LayeredFolder", "describe_layer", "is_layered", "is_transformers_folder", "list_of_layers", "named",
    "read_described", "write_layered",
]  # fmt: skip


def list_of_layers(model: nn.Module) -> str:
    """The name of the list of modules that holds most of a model's numbers, "" if it has none."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    return max(lists, key=lambda one: sum(p.numel() for p in one[1].parameters()), default=("", None))[0]


def is_layered(path: Path) -> bool:
    """Whether `LayeredFolder` may open it: a folder with a model of transformers, or a GGUF file."""
    return is_transformers_folder(path) or is_gguf(path)


def is_transformers_folder(path: Path) -> bool:
    """Whether a folder holds a model of transformers."""
    return (path / CONFIG).is_file()


@dataclass(frozen=True)
class LayeredFolder:
    """A language model on disk: all but its layers in memory, and these read one by one."""

    folder: Path  # or GGUF file
    model: nn.Module  # layers have shapes and no numbers
    name: str  # of the list of layers
    names: frozenset[str]  # of all tensors on the disk
    gguf: GgufWeights | None = None

    @classmethod
    def open(cls, folder: Path) -> LayeredFolder:
        """The model of a transformers folder or of a GGUF file, its layers left on the disk."""
        if is_gguf(folder):
            model, weights = model_of_gguf(folder)
            return cls._of(folder, model, frozenset(weights.tensors), weights)
        try:
            library = importlib.import_module("transformers")
        except ImportError:
            raise InvalidOption(f"{folder}: a transformers model; install transformers to open it") from None
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        name = (config.architectures or [""])[0]
        kind: Any = getattr(library, name, None)
        if kind is None or getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(f"{folder}: expected a dense model of transformers' own, got {name or 'none'}")
        with torch.device("meta"):
            made: nn.Module = kind(config)
        with open_checkpoint(folder) as stored:
            return cls._of(folder, made, frozenset(stored.tensors))

    @classmethod
    def _of(
        cls, folder: Path, model: nn.Module, names: frozenset[str], gguf: GgufWeights | None = None
    ) -> LayeredFolder:
        layers = list_of_layers(model)
        if not layers:
            raise InvalidOption(f"{folder}: a {type(model).__name__}, which has no list of layers")
        found = cls(folder, model.eval(), layers, names, gguf)
        found._fill_rest()
        return found

    def _stored(self) -> Checkpoint | GgufWeights:
        """The weights on the disk; a folder is mapped anew, so that what was read before is not held."""
        return open_checkpoint(self.folder) if self.gguf is None else self.gguf

    def _fill_rest(self) -> None:
        """Give the model all its weights but those of the layers."""
        model: Any = self.model
        prefix = f"{self.name}."
        _compute_buffers_(model, prefix)
        state = {n: t for n, t in model.state_dict().items() if not n.startswith(prefix)}
        with self._stored() as stored:
            present = {n: _tensor(stored, n) for n in state if n in self.names}
        model.load_state_dict(present, strict=False, assign=True)
        model.tie_weights()
        empty = [n for n, t in model.state_dict().items() if t.is_meta and not n.startswith(prefix)]
        if empty:
            raise CheckpointError(f"{self.folder}: expected a tensor {empty[0]!r:.80}, found none")

    def layer(self, number: int) -> nn.Module:
        """One layer with its weights."""
        layers: Any = self.model.get_submodule(self.name)
        found = copy.deepcopy(layers[number])
        prefix = f"{self.name}.{number}."
        with self._stored() as stored:
            missing = [n for n in found.state_dict() if prefix + n not in stored.tensors]
            if missing:
                raise CheckpointError(f"{self.folder}: expected a tensor {prefix + missing[0]!r:.80}, found none")
            found.load_state_dict({n: _tensor(stored, prefix + n) for n in found.state_dict()}, assign=True)
        hollow = [n for n, b in found.named_buffers() if b.is_meta]
        if hollow:
            raise InvalidOption(f"{prefix}{hollow[0]}: computed when the model is made, so layers cannot be read alone")
        result: nn.Module = found.requires_grad_(False).eval()
        return result

    def without_layers(self) -> nn.Module:
        """A copy of the model as it is here, whose weights are the same tensors."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        return copy.deepcopy(self.model, {id(tensor): tensor for tensor in tensors})

    @property
    def identity(self) -> str:
        """What tells the weights from others without reading all of them: names, sizes and times of the files."""
        files = [self.folder]
        if self.gguf is None:
            files = sorted(p for p in self.folder.iterdir() if p.suffix in (".safetensors", ".bin"))
        return json.dumps([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])

    def write_files(self, folder: Path) -> None:
        """All that belongs to the model but weights and config: the tokenizer, and whatever else lies there."""
        if self.gguf is None:
            copy_files(self.folder, folder)
        else:
            write_tokenizer(self.folder, folder)


def _tensor(stored: Checkpoint | GgufWeights, name: str) -> Tensor:
    return nn.Parameter(torch.as_tensor(stored.read(name)).clone(), requires_grad=False)


@torch.no_grad()
def _compute_buffers_(model: Any, prefix: str) -> None:
    """Give modules outside the layers what they compute when they are made: tables of rotary positions, scales.

    transformers computes it again after a model was made without numbers. What it leaves alone is refused.
    """
    for where, module in model.named_modules():
        hollow = [n for n, b in module._buffers.items() if b is not None and b.is_meta]
        if where.startswith(prefix) or not hollow:
            continue
        for name in hollow:
            value = module._buffers[name]
            fill = torch.nan if value.is_floating_point() else -1
            module._buffers[name] = torch.full(value.shape, fill, dtype=value.dtype)
        model._init_weights(module)
        for name in hollow:
            value = module._buffers[name]
            if bool((value.isnan() if value.is_floating_point() else value == -1).any()):
                raise InvalidOption(f"{where}.{name}: computed when the model is made, so it cannot be read in parts")


def describe_layer(dense: nn.Module, layer: nn.Module) -> dict[str, Any]:
    """What stands in the place of the dense layer's modules, where that is something else."""
    before = describe_parts(dense)
    return {name: found for name, found in describe_parts(layer).items() if before.get(name) != found}


def read_described(layer: nn.Module, modules: Mapping[str, Any], file: Path, prefix: str) -> nn.Module:
    """A layer that became something else, from what `describe_layer` said and a file with its weights; in place.

    layer: a dense one, whose numbers are not needed.
    """
    made = dict[nn.Module, tuple[Any, nn.Module]]()
    for name, description in modules.items():
        put_(layer, name, build_once(description, f"{file}: {name}", layer.get_submodule(name), made))
    with open_checkpoint(file) as stored:
        layer.load_state_dict({n: _tensor(stored, prefix + n) for n in layer.state_dict()}, assign=True)
    check_indices(layer, file)
    return layer.requires_grad_(False).eval()


def write_layered(
    source: LayeredFolder, target: Path, shards: Mapping[int, Path], modules: Iterable[Mapping[str, Any]],
    record: Record, sizes: Iterable[tuple[int, int]], metadata: dict[str, Any],
    change_: Callable[[nn.Module], None] | None = None,
) -> None:  # fmt: skip
    """A folder as `from_pretrained` reads it, from files with the weights of one layer each, which are copied there.

    modules: by layer, what became of it (`describe_layer`). sizes: before and after, of what the config may say.
    change_: puts what changed outside the layers into a model.
    """
    model: Any = source.without_layers()
    changed = {f"{source.name}.{n}.{name}": d for n, found in enumerate(modules) for name, d in found.items()}
    put_described_(model, changed)
    if change_ is not None:
        described = describe_parts(model)
        change_(model)
        changed |= {name: found for name, found in describe_parts(model).items() if described.get(name) != found}
    set_record_(model, record)
    for before, now in sizes:
        say_size_(model, before, now)
    prefix = f"{source.name}."
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    rest = {n: t for n, t in model.state_dict().items() if not n.startswith(prefix) and n in source.names}
    rest |= {n: t for n, t in model.state_dict().items() if not n.startswith(prefix) and n not in tied}
    with new_folder(target) as folder:
        source.write_files(folder)
        places: dict[str, str] = {}
        total = 0
        count = len(shards) + 1
        for number in range(count):
            name = f"model-{number + 1:05}-of-{count:05}.safetensors"
            if number < len(shards):
                shutil.copy(shards[number], folder / name)
            else:
                save_file({n: t.detach().contiguous() for n, t in rest.items()}, folder / name, {"format": "pt"})
            with open_checkpoint(folder / name) as stored:
                places |= dict.fromkeys(stored.tensors, name)
                total += sum(info.nbytes for info in stored.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        described = write_config_file(model, folder, changed)
        manifest = {
            "format": METHOD, "version": VERSION, "crystallite": importlib.metadata.version("crystallite"),
            "torch": torch.__version__, "source_sha256": None, "modules": described, "training": False, "tied": {},
            "frozen": [], "record": record.to_plain(), "verdict": None, "metadata": metadata,
        }  # fmt: skip
        write_manifest(folder, manifest | {"weights_sha256": weights_sha256(folder)})


def named(layer: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The weights of a layer under their names in the whole model."""
    return {prefix + name: value.detach().contiguous() for name, value in layer.state_dict().items()}
