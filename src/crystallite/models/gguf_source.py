"""The weights of a language model in a GGUF file, one at a time and under the names that transformers has for them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crystallite.core.errors import CheckpointError, InvalidOption
from crystallite.data.text import open_tokenizer
from crystallite.weights.checkpoint import Checkpoint, open_checkpoint

__all__ = ["GgufWeights", "is_gguf", "model_of_gguf", "write_tokenizer"]

_SHOWN = 3  # names of tensors in an error


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.is_file() and path.suffix == ".gguf"


def model_of_gguf(file: Path) -> tuple[nn.Module, GgufWeights]:
    """A model as the header of a file says, on the meta device, and its weights; those are left on the disk.

    transformers knows what the header means, and which tensor is which; the file is checked before it sees it.
    """
    try:
        library = importlib.import_module("transformers")
        mapping = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        importlib.import_module("gguf")
    except ImportError:
        raise InvalidOption(
            f"{file}: GGUF files need gguf and transformers: pip install 'crystallite[gguf,hf]'"
        ) from None
    stored = open_checkpoint(file)
    try:
        config = library.AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        kind: Any = library.AutoModelForCausalLM._model_mapping[type(config)]
    except Exception as error:  # it meets what it does not know in its own ways
        raise CheckpointError(f"{file}: transformers does not know this model: {error!s:.300}") from None
    config.architectures, config.dtype = [kind.__name__], torch.float32
    with torch.device("meta"):
        model: nn.Module = kind(config)
    architecture = str(stored.config.get("general.architecture"))
    processor = mapping.TENSOR_PROCESSORS.get(architecture, mapping.TensorProcessor)(config=config.to_dict())
    names = mapping.get_gguf_hf_weights_map(model, processor)
    unknown = [name for name in stored.tensors if name not in names]
    if unknown:
        listed = ", ".join(unknown[:_SHOWN]) + (f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else "")
        raise CheckpointError(f"{file}: transformers would leave out tensors of this {architecture}: {listed}")
    return model, GgufWeights(stored, {names[name]: name for name in stored.tensors}, processor)


@dataclass(frozen=True)
class GgufWeights:
    """As much of a `Checkpoint` as is needed to read one tensor after the other, in float32."""

    stored: Checkpoint
    tensors: dict[str, str]  # name in transformers → in the file
    processor: Any

    def read(self, name: str) -> np.ndarray[Any, Any]:
        given = self.tensors[name]
        numbers = torch.as_tensor(self.stored.read(given)).float().numpy()
        found: Any = self.processor.process(weights=numbers, name=given, tensor_key_mapping={}, parsed_parameters={})
        return np.asarray(found.weights, np.float32)

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *_: object) -> None:
        """Stays open: nothing of the file is held."""


def write_tokenizer(file: Path, folder: Path) -> None:
    """The tokenizer of a GGUF file, as transformers makes it."""
    open_tokenizer(file)[0].save_pretrained(folder)
